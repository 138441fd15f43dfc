"""What a rank does in a step, counted, and who says what that takes: the interface between the cluster's simulator and a model of costs."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .cost import StepCost

__all__ = ["Costs", "LinearCosts", "NOTHING", "Work", "attended", "picoseconds"]


class Work(NamedTuple):
    """Of one data rank in one step; zeros are a dummy forward."""

    decodes: int = 0  # requests that compute one token each
    context: int = 0  # sum of their lengths, that token included: rows that an indexer scores
    attended: int = 0  # sum of min(length, index_topk)
    prefill_tokens: int = 0  # of all chunks
    prefill_pairs: int = 0  # sum over their tokens of the rows before them, themselves included
    prefill_attended: int = 0  # sum over their tokens of min(those rows, index_topk)
    sampled: int = 0  # rows of logits


NOTHING = Work()


class Costs(Protocol):
    """Of one engine's topology. All times are whole picoseconds, so that their sums are exact in any order."""

    index_topk: int | None  # rows that a token attends to at most; None: all

    def rank_ps(self, works: Sequence[Work]) -> Sequence[int]:
        """How long each data rank would take for its step; `works` has one entry a data rank (one under TP, TEP and DCP). They step together, so
        the slowest decides. With decodes alone, and their numbers fixed, each is an affine function with whole coefficients of that rank's
        (context, attended): stretches of decode steps are advanced in one go by that."""
        ...

    def transfer_ps(self, descriptors: int, nbytes: int) -> int:
        """One request's rows from a prefill engine to one rank of this one."""
        ...

    def retrieve_ps(self, nbytes: int) -> int:
        """One request's rows from the host tier to one rank of this one."""
        ...

    hand_over_ps: int  # from a first token to the decoder's knowing of the request


def picoseconds(seconds: float) -> int:
    """To the nearest one."""
    return round(seconds * 1e12)


def attended(start: int, tokens: int, most: int | None) -> int:
    """Rows that `tokens` tokens after `start` computed ones attend to, in sum, each to itself and to those before it, but to `most` at most."""
    full = tokens if most is None else max(0, min(tokens, most - start))
    return full * start + full * (full + 1) // 2 + (0 if most is None else (tokens - full) * most)


class LinearCosts:
    """A `StepCost` for each rank by itself: of an engine that was measured, whatever it is made of.

    Args:
        cost: seconds of a step.
        decode_attention_s: for a row that a decode attends to, where that is not what one costs that a prompt's token attends to; None: it is.
        piece_s, byte_s: of a transfer, for each piece and for each byte; retrieve_byte_s: the same of the host tier.
    """

    index_topk = None

    def __init__(self, cost: StepCost = StepCost(), *, decode_attention_s: float | None = None, piece_s: float = 0.0, byte_s: float = 0.0,
                 retrieve_byte_s: float = 0.0, hand_over_s: float = 0.0) -> None:
        self.base, self.decode, self.prefill, self.attention = map(picoseconds, (cost.base_s, cost.decode_s, cost.prefill_s, cost.attention_s))
        self.decode_attention = self.attention if decode_attention_s is None else picoseconds(decode_attention_s)
        self.piece_s, self.byte_s, self.retrieve_byte_s = piece_s, byte_s, retrieve_byte_s
        self.hand_over_ps = picoseconds(hand_over_s)

    def rank_ps(self, works: Sequence[Work]) -> list[int]:
        return [self.base + self.decode * work.decodes + self.decode_attention * work.context + self.prefill * work.prefill_tokens
                + self.attention * work.prefill_pairs for work in works]

    def transfer_ps(self, descriptors: int, nbytes: int) -> int:
        return picoseconds(descriptors * self.piece_s + nbytes * self.byte_s)

    def retrieve_ps(self, nbytes: int) -> int:
        return picoseconds(nbytes * self.retrieve_byte_s)
