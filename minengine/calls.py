"""What `LLM` and `Cluster` share of their faces: how prompts and parameters are paired, and conversations under a chat template."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

from .request import RequestError, RequestOutput, SamplingParams

__all__ = ["Chat", "Prompt", "one_each"]

Prompt = str | Mapping[str, Any]


def one_each(prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> tuple[list[Prompt], list[SamplingParams]]:
    """The prompts of a call of `generate` as a list, and parameters for each.

    Raises:
        RequestError: these are no prompts, or there is another number of parameters.
    """
    if not isinstance(prompts, (str, Mapping, Sequence)):
        raise RequestError(f"prompts: use a text, a dict or a list of them; got {prompts!r}")
    many = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    params = list(sampling_params) if isinstance(sampling_params, (list, tuple)) else [sampling_params or SamplingParams()] * len(many)
    if len(params) != len(many):
        raise RequestError(f"sampling_params: {len(params)} given for {len(many)} prompts; give one, or one a prompt")
    return many, params


class Chat:
    """Conversations, for a class that has `generate` and `_tokenizer`."""

    _tokenizer: Any

    def chat(self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation `[{"role": ..., "content": ...}, ...]` under the model's own chat template."""
        return self.generate(self.chat_prompt(messages), sampling_params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The prompt that `chat` sends, for use with `stream`."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}  # the template writes them itself

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise RequestError("this model directory has no tokenizer.json; send prompt_token_ids")
        return self._tokenizer
