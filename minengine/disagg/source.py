"""What one worker tells another about rows: whose pool, which blocks, until when. Plain values that travel between processes.

    PoolFacts   a worker's pool: how to reach it, how its bytes lie, whose rows they are; it may be spread over the worker's ranks (RankFacts)
    KVSource    "the rows of this request lie there, and stay there while this lease stands": a decoder reads them (pull)
    Reserve     "keep room for the rows that this worker will write" (push): what a request brings to the decoder
    KVTarget    "write them there": the decoder's answer, for the worker that computes them
    Notice      the few bytes that workers send each other beside the rows
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..arithmetic.copies import topology
from ..arithmetic.sharding import rank_share
from ..config import ConfigError
from ..kv.layout import KVLayout

if TYPE_CHECKING:
    from .pieces import Side

__all__ = ["KVSource", "KVTarget", "Notice", "PoolFacts", "RankFacts", "Reserve", "check_pools"]


@dataclass(frozen=True)
class RankFacts:
    """One rank's part of a pool, or its copy of it."""

    agent: str  # the name of its transfer agent
    metadata: bytes  # what another agent needs to connect to it
    address: int  # of its first byte, in that process


@dataclass(frozen=True)
class PoolFacts:
    """A worker's pool, as others see it. A worker that is started again has other metadata, so facts never go stale unnoticed.

    Ranks that split every step have a pool together, with the same block ids on each of them. Those that have requests of their own (data
    parallelism) have a pool each.
    """

    agent: str  # of rank 0: see RankFacts
    metadata: bytes
    address: int
    layout: KVLayout  # of one rank
    kv_cache_dtype: str
    model: str  # fingerprint of the weights: equal geometry does not make equal rows
    words_address: int  # of its lease words, uint64 each, at rank 0; always in main memory
    topology: str = "TP1"  # of the ranks that have the pool together
    others: tuple[RankFacts, ...] = ()  # ranks 1, 2, ...
    kv_heads: int = 1  # of the model; 1 where the rows are latents

    @property
    def block_size(self) -> int:
        """Tokens of a block: as many as its rows on one rank, or with DCP on some of them."""
        return self.layout.block_size * topology(self.topology).context

    @property
    def ranks(self) -> tuple[RankFacts, ...]:
        return RankFacts(self.agent, self.metadata, self.address), *self.others

    def side(self, rank: int, block_ids: Sequence[int]) -> Side:
        """What that rank has of a request in these blocks."""
        from .pieces import Side

        shape = topology(self.topology)
        return Side(self.layout, block_ids, shape.context, rank_share(self.kv_heads, shape.tensor, rank) if self.kv_heads > 1 else range(1))


@dataclass(frozen=True)
class KVSource:
    """Rows of the first `num_tokens` tokens of a request, in `block_ids` of that pool."""

    pool: PoolFacts
    block_ids: tuple[int, ...]
    num_tokens: int
    lease_id: int  # what the lease's word holds for as long as the rows stay; anything else: they are gone
    lease_slot: int  # which word

    @property
    def word_address(self) -> int:
        return self.pool.words_address + 8 * self.lease_slot


@dataclass(frozen=True)
class Reserve:
    """Rows that `pool`'s worker will write into the blocks of the request that brings this."""

    pool: PoolFacts


@dataclass(frozen=True)
class KVTarget:
    """Blocks that wait for the rows of tokens `start` to `num_tokens`; those before `start` are there already."""

    pool: PoolFacts
    reservation: int  # unique among those of that agent
    block_ids: tuple[int, ...]
    start: int
    num_tokens: int


class Notice(NamedTuple):
    """A message of one worker to another, beside the rows.

    fetch  P <- D   the rows under this lease have been read, or are not wanted: let them go
    push   D <- P   all rows of this reservation are written
    fail   D <- P   they will not be; nothing is being written any more
    stop   P <- D   write no more of this reservation; `text` is D's metadata, for the answer, since P may not know D yet
    """

    kind: str
    number: int  # a lease or a reservation
    text: bytes = b""

    def encode(self) -> bytes:
        return struct.pack("<8sQ", self.kind.encode(), self.number) + self.text

    @classmethod
    def decode(cls, message: bytes) -> Notice | None:
        """None if it is no notice: another version's, or a stranger's."""
        if len(message) < 16:
            return None
        kind, number = struct.unpack("<8sQ", message[:16])
        name = kind.rstrip(b"\0").decode("ascii", "replace")
        return cls(name, number, message[16:]) if name in ("fetch", "push", "fail", "stop") else None


def check_pools(mine: PoolFacts, other: PoolFacts) -> None:
    """Refuse, before the first request, two pools between which rows cannot move. Topologies may differ.

    Raises:
        ConfigError: another model, or rows of another format; one sentence that says what to change.
    """
    from .pieces import check_pair

    if mine.model != other.model:
        raise ConfigError(f"worker '{other.agent}' runs another model than '{mine.agent}' (weights {other.model} and {mine.model}), so its rows mean "
                          "something else; start both with the same model")
    if mine.kv_cache_dtype != other.kv_cache_dtype:
        raise ConfigError(f"kv_cache_dtype: worker '{other.agent}' keeps rows as '{other.kv_cache_dtype}' and '{mine.agent}' as "
                          f"'{mine.kv_cache_dtype}'; use one for both")
    check_pair(*(replace(pool.layout, num_heads=pool.kv_heads) for pool in (other, mine)))
