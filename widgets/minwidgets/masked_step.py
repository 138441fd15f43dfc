"""One state of a tool call under its grammar: what is written, which tokens may come next, which text must.

    masked_step("glm", "get_weather", '{"type": "object", "properties": {...}}', text="<tool_call>get_")

The grammar, the masks and the jumps are the engine's, over smollm2's vocabulary. On a static page `book/static/grammar.js` gives
the same answers, key for key.
"""
from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from minengine.grammar import GrammarBackend
from minengine.request import RequestError, StructuredOutputsParams
from minengine.serve.tools import FORMATS, structural_tag
from minengine.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LIMITS", "MODEL", "control_tokens", "masked_step", "named_tag", "stop_ids", "tokens_of_text"]

MODEL = "smollm2"
LIMITS = {"schema": 8000, "text": 4000, "tokens": 1000}
SHOWN = {"word": 6, "mark": 8, "other": 4}  # of the allowed tokens, where there are more than these: the first in the vocabulary
WORD, MARK = re.compile(rb" ?[A-Za-z]{2,}"), re.compile(rb'["<>{}[\],:/]')
NAME, IDS = re.compile(r"[A-Za-z0-9_-]{1,64}"), re.compile(r"([0-9]+(\.[0-9]+)*)?")


def masked_step(format: str, tool_name: str, schema: str, tokens: str = "", text: str = "") -> dict[str, Any]:
    """A call of the tool `tool_name`, which takes what the JSON `schema` describes, after `tokens` (ids, dots between them) and then `text`.

    Of the text, the longest tokens that are allowed are taken until none is.

    Returns:
        pieces: of what is written, [id, text, how many tokens were allowed there, whether a text was forced there] each.
        refused: what is left of the text.
        forced, forced_tokens: the text that must come next, and those of its tokens that the engine takes without asking the model.
        vocab_size, allowed: how many tokens there are and how many may come next.
        shown: [id, text, how many are allowed behind it], of all of them, or of `SHOWN`.
        stop, ended: whether the end token is allowed next, or has come.

    Raises:
        RequestError: an argument is not as described, or the engine refuses the schema.
    """
    call = _Call(_compiled(format, tool_name, schema))
    if not isinstance(tokens, str) or not IDS.fullmatch(tokens):
        raise RequestError(f"tokens='{tokens}': write ids with dots between them")
    ids = [int(id) for id in tokens.split(".")] if tokens else []
    if len(ids) > LIMITS["tokens"]:
        raise RequestError(f"tokens: use up to {LIMITS['tokens']}")
    if not isinstance(text, str) or len(text) > LIMITS["text"]:
        raise RequestError(f"text: use up to {LIMITS['text']} characters")
    for place, id in enumerate(ids, 1):
        if not call.allows(id):
            raise RequestError(f"tokens: the grammar masks token {id} at place {place}; start over or go back")
        call.take(id)
    refused = call.write(text)
    pieces = [[id, _text(id), allowed, forced != ""] for id, allowed, forced in call.pieces]
    forced, forced_tokens = call.forced(), call.jump()
    return {"pieces": pieces, "refused": refused, "forced": forced, "forced_tokens": forced_tokens, "vocab_size": call.vocab_size,
            "allowed": call.count(), "shown": call.shown(), "stop": any(map(call.allows, stop_ids())), "ended": call.ended}


def named_tag(format: str, tool_name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The structural tag of an answer that is one call of this tool."""
    tool = {"type": "function", "function": {"name": tool_name, "parameters": schema}}
    return structural_tag(format, [tool], {"type": "function", "function": {"name": tool_name}})


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def tokens_of_text() -> list[bytes]:
    """The bytes of every token by its id, none of a control token: so the engine's grammars know them."""
    tokenizer = _tokenizer()
    return [b"" if id in tokenizer.special_ids else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]


def control_tokens() -> dict[int, str]:
    """Name of every control token by its id."""
    return {id: _text(id) for id in sorted(_tokenizer().special_ids)}


def stop_ids() -> list[int]:
    return [_tokenizer().backend.token_to_id(_tokenizer().eos_token)]


@lru_cache(maxsize=1)
def _backend() -> GrammarBackend:
    return GrammarBackend(_tokenizer(), _tokenizer().vocab_size, stop_ids())


@lru_cache(maxsize=1)
def _ids_of_text() -> dict[bytes, int]:
    """Bytes of every token that is text -> its id."""
    return {token: id for id, token in enumerate(tokens_of_text()) if token}


def _compiled(format: str, tool_name: str, schema: str) -> Any:
    """xgrammar's CompiledGrammar of one call of the tool."""
    if format not in FORMATS:
        raise RequestError(f"format='{format}': use one of {', '.join(FORMATS)}")
    if not isinstance(tool_name, str) or not NAME.fullmatch(tool_name):
        raise RequestError(f"tool_name='{tool_name}': use 1 to 64 letters, digits, _ or -")
    if not isinstance(schema, str) or len(schema) > LIMITS["schema"]:
        raise RequestError(f"schema: use a text of up to {LIMITS['schema']} characters")
    try:
        read = json.loads(schema)
    except ValueError as error:
        raise RequestError(f"schema: this is not JSON ({error}); write one object, from {{ to }}") from error
    if not isinstance(read, dict):
        raise RequestError('schema: write an object such as {"type": "object", "properties": {…}}')
    return _backend().compile(StructuredOutputsParams(structural_tag=named_tag(format, tool_name, read)))


def _text(id: int) -> str:
    return _tokenizer().token_bytes(id).decode("utf-8", errors="replace")


@lru_cache(maxsize=None)
def _kind(id: int) -> str:
    token = _tokenizer().token_bytes(id)
    return "word" if WORD.fullmatch(token) else "mark" if MARK.search(token) else "other"


class _Call:
    """A call as far as it is written, and the mask of its next token."""

    def __init__(self, compiled: Any) -> None:
        from xgrammar import GrammarMatcher

        self.state = GrammarMatcher(compiled)
        self.vocab_size = _tokenizer().vocab_size
        self.pieces: list[tuple[int, int, str]] = []  # token, tokens allowed there, text forced there
        self._mask = torch.zeros(1, -(-self.vocab_size // 32), dtype=torch.int32)
        self._look()

    @property
    def ended(self) -> bool:
        return self.state.is_terminated()

    def _look(self) -> None:
        if self.ended:
            self._mask.zero_()
        else:
            self._mask.fill_(-1)  # xgrammar leaves it where every token is allowed
            self.state.fill_next_token_bitmask(self._mask)
        self._bits = np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")[: self.vocab_size]

    def allows(self, id: int) -> bool:
        return id < self.vocab_size and bool(self._bits[id])

    def count(self) -> int:
        return int(self._bits.sum())

    def forced(self) -> str:
        """The text that must come next; none where it starts or ends within a character."""
        try:
            return "" if self.ended else self.state.find_jump_forward_string()
        except UnicodeDecodeError:
            return ""

    def jump(self) -> list[int]:
        """The tokens of it that the engine takes at once; the call stays where it is."""
        tokens = _backend().following(self.state).jump(LIMITS["text"]) if self.forced() else []
        if tokens:
            self.state.rollback(len(tokens))
        return tokens

    def take(self, id: int) -> None:
        self.pieces.append((id, self.count(), self.forced()))
        self.state.accept_token(id)
        self._look()

    def write(self, text: str) -> str:
        """Take the longest tokens that are allowed, as far as the text goes; what is left of it."""
        rest, known = text.encode(), _ids_of_text()
        while rest:
            found = next((id for size in range(min(len(rest), _longest()), 0, -1)
                          if (id := known.get(rest[:size])) is not None and self.allows(id)), None)
            if found is None:
                break
            self.take(found)
            rest = rest[len(_tokenizer().token_bytes(found)):]
        return rest.decode("utf-8", errors="replace")

    def shown(self) -> list[list[Any]]:
        left_out = {*_tokenizer().special_ids, *stop_ids()}
        ids = [int(id) for id in self._bits.nonzero()[0] if int(id) not in left_out]
        if len(ids) > sum(SHOWN.values()):
            ids = [id for kind, count in SHOWN.items() for id in [id for id in ids if _kind(id) == kind][:count]]
        return [[id, _text(id), self._behind(id)] for id in ids]

    def _behind(self, id: int) -> int:
        self.take(id)
        count = self.count()
        self.state.rollback(1)
        self.pieces.pop()
        self._look()
        return count


@lru_cache(maxsize=1)
def _longest() -> int:
    return max(map(len, _ids_of_text()))
