"""How one answer follows its grammar: masks, steps and forced text, within a credit of CPU time."""
from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .grammar_limits import Credit
from .request import RequestError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["Matcher", "Spellings", "unpack"]

MANY = 256  # tokens
PIECE = 8  # bytes after which the time is looked at; a token of blanks or dashes may have ten times as many


class Spellings:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, tokens: list[bytes]) -> None:
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self.mask_width = -(-len(tokens) // 32)
        self._ordered = [tokens[id] for id in order]
        self._place = torch.empty(len(tokens), dtype=torch.int32)  # of each token in that order
        self._place[torch.tensor(order)] = torch.arange(len(tokens), dtype=torch.int32)
        self.inside = torch.zeros(self.mask_width, dtype=torch.int32)  # a mask of the tokens that go on with a character begun before them
        for id, token in enumerate(tokens):
            if token[:1] and 0x80 <= token[0] < 0xC0:
                self.inside[id // 32] |= (1 << id % 32) - (1 << 32) * (id % 32 == 31)

    def common_prefix(self, mask: Tensor) -> bytes:
        """Of all tokens in `mask` (ceil(V / 32),) int32; control tokens have no bytes, and nothing in common with others. Many tokens share
        a character at most, which is no token's worth: they are not looked at."""
        if int.from_bytes(mask.numpy().tobytes(), "little").bit_count() > MANY:
            return b""
        places = self._place[unpack(mask, len(self._place))]
        if not len(places):
            return b""
        first, last = self._ordered[places.min()], self._ordered[places.max()]  # whatever lies between begins with what these share
        return first[:next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))]


class Matcher:
    """How far one answer has come in its grammar.

    Forced tokens are decided when their text becomes the only one, and then come one after the other, whether there is room for all of
    them at once or they wait for the next steps: so an answer does not depend on who shares the pool.
    """

    def __init__(self, state: Any, tokenizer: Tokenizer, spellings: Spellings, credit: Credit) -> None:
        self._state, self._tokenizer, self._spellings, self._credit = state, tokenizer, spellings, credit
        self._forced: deque[int] = deque()  # tokens that come next
        self._ran_out = False  # the last of them has just come, and not from `jump`: as after a jump, the model has the next word
        self._mask: Tensor | None = None  # the mask of the next token, when `jump` has looked at it already
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    @property
    def overdrawn(self) -> bool:
        """The grammar takes too long to follow: no token is allowed any more."""
        return self._credit.overdrawn

    def fill(self, mask: Tensor, row: int) -> None:
        """Write the tokens that may come next to row `row` of `mask` (S, ceil(V / 32)) int32: bit i of word w is token 32 w + i."""
        if self._forced:
            word, bit = divmod(self._forced[0], 32)
            mask[row] = 0
            mask[row, word] = (1 << bit) - (1 << 32) * (bit == 31)  # the highest bit is the sign
        elif self._mask is not None:
            mask[row] = self._mask
        else:
            with self._credit:
                self._state.fill_next_token_bitmask(mask, row)
        # In free text xgrammar 0.2.8 lets any byte through; what ends no character would only be refused.
        mask[row] &= self._spellings.inside if self._utf8.getstate()[0] else ~self._spellings.inside
        if self.overdrawn:
            mask[row] = 0

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing changed, if the grammar does not allow it or its bytes end no character."""
        forced = bool(self._forced)
        if forced and self._forced.popleft() != token:
            raise ValueError(f"token {token} is accepted where another is forced")
        self._ran_out = forced and not self._forced
        with self._credit:
            ok = self._go(token)
        self._credit.book(ok)
        return ok

    def replay(self, tokens: Sequence[int], *, jumping: bool) -> None:
        """Go on by the tokens of an answer that another matcher has followed so far; `jumping` if it was asked to `jump`: what it had found
        to be forced is found again, so that the rest of it still comes.

        Raises:
            RequestError: the grammar does not allow them.
        """
        for token in tokens:
            if not self.accept(token):
                raise RequestError(f"resume: the grammar does not allow token {token} of the output so far; resume what it has led to")
            if jumping:
                self.jump(0)

    def _go(self, token: int) -> bool:
        before = self._utf8.getstate()
        added = b"" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)
        ok = self._is_text(added) and self._can_walk(added) and self._state.accept_token(token)
        if ok:
            self._mask = None
        else:
            self._utf8.setstate(before)
        return ok

    def _is_text(self, added: bytes) -> bool:
        """To xgrammar 0.2.8 half a surrogate pair is a character. In UTF-8 it is none, and its three bytes would be read as three characters."""
        try:
            self._utf8.decode(added)
        except UnicodeDecodeError:
            return False
        begun = self._utf8.getstate()[0]
        return not (begun[:1] == b"\xed" and begun[1:2] >= b"\xa0")  # Python judges these only at the third byte, when nothing else can follow

    def _can_walk(self, text: bytes) -> bool:
        """False if the credit does not last for `text`. Only what is long is tried; whether the grammar allows it is another question."""
        if len(text) > PIECE:
            self._state.rollback(self._walk(text))
        return not self.overdrawn

    def _walk(self, text: bytes) -> int:
        """Go on by `text` while it is allowed and the credit lasts; returns in how many steps, each of PIECE bytes at most."""
        steps = 0
        for at in range(0, len(text), PIECE):
            if self.overdrawn or not self._state.accept_string(text[at: at + PIECE]):
                break
            steps += 1
        return steps

    def jump(self, room: int) -> list[int]:
        """Go on by the text that must come next, at most `room` tokens; returns them.

        The tokens are those that the tokenizer gives that text by itself, without the last: where the forced text ends, the model may
        prefer a token that reaches further.
        """
        with self._credit:
            if not self._forced and not self._ran_out:
                self._forced.extend(self._forced_tokens())
        tokens = [self._forced.popleft() for _ in range(min(room, len(self._forced)))]
        for token in tokens:
            with self._credit:
                self._go(token)
            self._credit.book(True)
        return tokens

    def _forced_tokens(self) -> list[int]:
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(self._forced_bytes())  # what ends inside a character is left to the model
        except UnicodeDecodeError:  # it begins inside one
            return []
        tokens = []
        for token in self._tokenizer.encode(text, add_special_tokens=False)[:-1] if text else ():
            # What is written like a control token is not one; and a tokenizer may add something, a blank in front for instance.
            if token in self._tokenizer.special_ids or self.overdrawn or not self._state.accept_token(token):
                break
            tokens.append(token)
        if tokens:
            self._state.rollback(len(tokens))
        return tokens

    def _forced_bytes(self) -> bytes:
        """The text that all answers go on with. Found mask by mask: xgrammar's own search ends only where the text does, which for an
        ambiguous grammar may take minutes."""
        forced, steps = b"", 0
        while not self.overdrawn:
            mask = torch.zeros(1, self._spellings.mask_width, dtype=torch.int32)
            self._state.fill_next_token_bitmask(mask, 0)
            if not steps:
                self._mask = mask[0]
            more = self._spellings.common_prefix(mask[0])
            walked = self._walk(more)
            steps += walked
            if not more or walked * PIECE < len(more):
                break
            forced += more
        self._state.rollback(steps)
        return forced


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """Bits (..., W) int32 as (..., vocab_size) bool."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(-2)[..., :vocab_size]
