"""Log-probabilities in the two forms that OpenAI's endpoints give them. There is an entry for every token that `usage` counts, the
one that ended the answer included, as in vLLM."""
from __future__ import annotations

from typing import Any

from ..request import Logprob, RequestOutput
from ..tokenizer import Tokenizer

__all__ = ["ChatLogprobs", "CompletionLogprobs"]

LEAST = -9999.0  # stands for -inf, which JSON cannot write


class ChatLogprobs:
    """A list of {"token", "logprob", "bytes", "top_logprobs"}; the bytes of all tokens, joined, are the text's."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top

    def __call__(self, output: RequestOutput) -> list[dict[str, Any]]:
        delta = output.outputs[0]
        return [
            self._entry(id, best[id]) | {"top_logprobs": [self._entry(other, logprob) for other, logprob in best.items() if logprob.rank <= self._top]}
            for id, best in zip(delta.token_ids, delta.logprobs)
        ]

    def _entry(self, id: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": logprob.decoded_token, "logprob": max(logprob.logprob, LEAST), "bytes": list(self._tokenizer.token_bytes(id))}


class CompletionLogprobs:
    """Four lists side by side. `text_offset` counts characters of the answer; one spread over several tokens counts at each."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def __call__(self, output: RequestOutput) -> dict[str, list[Any]]:
        delta = output.outputs[0]
        entries: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for id, best in zip(delta.token_ids, delta.logprobs):
            top: dict[str, float] = {}
            for logprob in best.values():
                top.setdefault(logprob.decoded_token, max(logprob.logprob, LEAST))  # several tokens may look alike: the likeliest stays
            entries["tokens"].append(best[id].decoded_token)
            entries["token_logprobs"].append(max(best[id].logprob, LEAST))
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self._offset)
            self._offset += len(best[id].decoded_token)
        return entries
