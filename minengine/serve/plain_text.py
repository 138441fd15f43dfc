"""What a client writes stays text: the tokens that give a prompt its structure are the chat template's alone.

A tokenizer reads `<|im_end|>` as the control token wherever it stands, so also in a message, a tool's result or a tool's description, and
whoever writes one of these could end the turn and open another. Here such a text is broken behind its first character before the
template sees it, and the prompt is tokenized piece by piece, so that no piece spells the token. A text without one is left as it is.
"""
from __future__ import annotations

import re
from typing import Any

from ..tokenizer import BYTE_OF_CHARACTER, Tokenizer

__all__ = ["PlainText"]

BREAK = "\ud800"  # half a surrogate pair: no text from outside holds one, and no text with one can be tokenized by mistake
BLANKS = " \t\r\n\u2581"


class PlainText:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = [token for token in tokenizer.backend.get_added_tokens_decoder().values() if len(token.content) > 1 and token.content.strip(BLANKS)]
        self._any, self._special = _one_of([token.content for token in added]), _one_of([token.content for token in added if token.special])
        self._longest = _longest(tokenizer)
        self._lost = bytes(byte for character, byte in BYTE_OF_CHARACTER.items() if tokenizer.backend.token_to_id(character) is None)

    def guard(self, value: Any, *, own: bool = False) -> Any:
        """A text, or the texts and names in a JSON value, as a template may print them.

        Args:
            own: the model's words. Of the added tokens it writes those that are no control tokens (`<think>`, `<tool_call>`: they show in
                its text), and they must be read back as it wrote them, or the prompt's prefix would be another.
        """
        if isinstance(value, str):
            tokens = self._special if own else self._any
            while tokens.search(value):  # again, for two may overlap
                value = tokens.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self.guard(name, own=own): self.guard(part, own=own) for name, part in value.items()}
        return [self.guard(part, own=own) for part in value] if isinstance(value, list) else value

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what a template made of guarded texts."""
        return [id for piece in rendered.split(BREAK) for id in self._tokenizer.encode(piece, add_special_tokens=False)]

    def least_tokens(self, text: str) -> int:
        """Tokens that a text, guarded or not, has at least, told without tokenizing it; 0 where that cannot be told."""
        return -(-len(text.encode(errors="ignore").translate(None, self._lost)) // self._longest) if self._longest else 0


def _one_of(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _longest(tokenizer: Tokenizer) -> int | None:
    """Bytes of the longest token; None unless tokens are runs of bytes, and only bytes that the vocabulary lacks are in none."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder().values()
    if (not tokenizer.byte_level or backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added)
            or re.search("Removed|Whitespace", repr(backend.pre_tokenizer))):
        return None
    return max(len(tokenizer.token_bytes(id)) for id in backend.get_vocab().values())
