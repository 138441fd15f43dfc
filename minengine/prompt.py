"""What a request may bring as its prompt, read into token ids. The engine reads it, or whoever stands in front of engines elsewhere."""
from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Iterable, Mapping, NamedTuple, Sequence

from .request import RequestError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["Prompt", "read_prompt"]


class Prompt(NamedTuple):
    """A prompt that `read_prompt` has read."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None


def read_prompt(prompt: str | Sequence[int] | Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    """Check and tokenize a prompt: a text, a list of token ids, or vLLM's dict form with `prompt` or `prompt_token_ids` and an
    optional `cache_salt`. Changes nothing, so any thread may call it, and a long text need not hold up a step.

    Raises:
        RequestError: it is none of these.
    """
    salt = None
    if isinstance(prompt, Mapping):
        extra = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if extra or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(f"prompt: a dict holds 'prompt' or 'prompt_token_ids', and optionally 'cache_salt'; got {sorted(prompt)}")
        salt = prompt.get("cache_salt")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("prompt: this model has no tokenizer; send prompt_token_ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: character {error.start} is half of a surrogate pair, which no text contains; remove it") from error
        return Prompt(prompt, tokenizer.encode(prompt), salt)
    tokens = list(prompt) if isinstance(prompt, Iterable) else [None]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
        raise RequestError(f"prompt: use a text, a list of token ids or a dict; got {str(prompt)[:80]!r}")
    ids = [int(token) for token in tokens]
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt_token_ids: {bad} is not a token; ids go from 0 to {vocab_size - 1}")
    return Prompt(None, ids, salt)
