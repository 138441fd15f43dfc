"""What one rank has to do in one step, as the numbers that its time depends on."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["IDLE", "Costs", "Work", "chunk_work"]


class Work(NamedTuple):
    """Counts over all requests that a rank serves in a step. All zero: a dummy forward, taken only for the other ranks."""

    decodes: int = 0  # requests that get one token each
    context: int = 0  # rows that their queries score: the sum of their lengths, the new token included
    attended: int = 0  # rows that their queries attend to: the sum of min(length, index_topk)
    prefill_tokens: int = 0
    prefill_pairs: int = 0  # rows scored, over the tokens of all chunks
    prefill_attended: int = 0  # rows attended to, over the tokens of all chunks
    sampled: int = 0  # rows of logits


IDLE = Work()


class Costs(Protocol):
    """What a worker of one topology takes, in whole picoseconds: integers are equal on every machine, and sums of them exact."""

    def step_ps(self, works: Sequence[Work]) -> int:
        """A step; `works` has one entry a data-parallel rank, one in all under other topologies. Where nobody prefills, it is the
        maximum over ranks of an integer function that is affine in (context, attended) as long as all ranks' `decodes` stay."""

    def transfer_ps(self, descriptors: int, nbytes: int) -> int:
        """One request's rows to one rank of a decoder."""

    def retrieve_ps(self, nbytes: int) -> int:
        """One request's rows from the host tier to one rank."""


def chunk_work(computed: int, tokens: int, index_topk: int) -> tuple[int, int]:
    """(pairs, attended) of a chunk of `tokens` tokens after `computed` ones: a token sees all before it and itself, and attends to
    at most `index_topk` of them."""
    pairs = tokens * computed + tokens * (tokens + 1) // 2
    short = max(0, min(tokens, index_topk - computed))  # tokens that see no more than index_topk rows
    return pairs, short * computed + short * (short + 1) // 2 + (tokens - short) * index_topk
