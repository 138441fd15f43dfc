"""A worker's memory as its peers may read and write it: the pool, a few lease words, and what the I/O thread does with them.

Every method but `fence` is for the I/O thread, and none is called under the engine's lock: they may take as long as the agent does.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arithmetic.moving import takes
from .agents import Agent, PeerGone, Transfer
from .pieces import Pieces, pieces, shared_pieces
from .source import KVSource, KVTarget, Notice, PoolFacts, check_pools

__all__ = ["KVIO", "Part"]

NUM_WORDS = 1024  # leases that a worker can have at once
NUM_CHECKS = 64  # words of others that it can be reading at once
PART_BYTES = 64 << 20  # read at a time: some milliseconds of copying, after which time limits, leases and notices get their turn


class Part(NamedTuple):
    """What is read at a time."""

    source: int  # the rank of a source's pool that it is read from
    pieces: Pieces


class KVIO:
    """
    Args:
        agent: moves bytes between processes. Everything that may be moved is registered here, the pool's storage too.
        kv: the engine's KVCache.
        model: fingerprint of the weights.
        kv_heads: of the whole model; None: all that this pool has.
        topology, rank: of the ranks that have the pool together, and which of them this is.

    Attributes:
        facts: what other workers need to know of this pool; of a rank other than 0, as far as this rank goes.
        words: (NUM_WORDS,) uint64, the lease words that others read.
        known: connected peers' metadata by name.
        checks: (NUM_CHECKS,) uint64, where words of others are read to.
    """

    def __init__(self, agent: Agent, kv: Any, model: str, *, kv_heads: int | None = None, topology: str = "TP1", rank: int = 0) -> None:
        self.agent, self.storage, self.layout, self.rank = agent, kv.storage, kv.kv_layout, rank
        address = agent.register(self.storage)
        words, self._checks = (agent.allocate(8 * count) for count in (NUM_WORDS, NUM_CHECKS))
        self.words, self.checks = _as_words(words), _as_words(self._checks)
        self.free_checks = list(range(NUM_CHECKS))
        self.facts = PoolFacts(agent.name, agent.metadata(), address, self.layout, kv.kv_cache_dtype, model, words.data_ptr(), topology,
                               kv_heads=kv_heads or self.layout.num_heads)
        self.block_size = self.facts.block_size
        self.known: dict[str, bytes] = {}
        self._fitting: dict[str, PoolFacts] = {}  # of those whose pools rows can come from and go to
        self._dead: set[bytes] = set()  # metadata of processes that have ended

    # --- peers ---

    def connect(self, metadata: bytes) -> str:
        """The name of the agent that this metadata is of; connected if it was not.

        Raises:
            TransferError: it cannot be, or is gone.
        """
        if metadata in self._dead:
            raise PeerGone("this worker's process has ended")
        name = next((name for name, known in self.known.items() if known == metadata), None)
        if name is None:
            name = self.agent.connect(metadata)
            self.known[name] = metadata
        return name

    def meet(self, pool: PoolFacts) -> str:
        """Connect to the worker of this pool, once; returns its agent's name.

        Raises:
            ConfigError: rows cannot move between the two pools.
            TransferError: it cannot be reached.
        """
        name = self.connect(pool.metadata)
        if self._fitting.get(name) != pool:
            check_pools(self.facts, pool)
            self._fitting[name] = pool
        return name

    def part(self, name: str) -> None:
        """A peer's process has ended: its transfers fail from now on, and are soon quiet."""
        if name in self.known:
            self._dead.add(self.known.pop(name))
            self._fitting.pop(name, None)
            self.agent.disconnect(name, dead=True)

    def tell(self, pool: PoolFacts, notice: Notice) -> None:
        """
        Raises:
            ConfigError, TransferError: as `meet`.
        """
        self.agent.notify(self.meet(pool), notice.encode())

    # --- rows ---

    def rows_of(self, source: KVSource, block_ids: Sequence[int], start: int) -> list[Part]:
        """What this rank keeps of the tokens `start` ... of a source in these blocks, in parts: an agent may copy all of a part while it is asked
        to begin."""
        pool, parts = source.pool, []
        for take in takes(pool.topology, self.facts.topology, self.rank, pool.kv_heads):
            found = shared_pieces(pool.side(take.source, source.block_ids), self.facts.side(self.rank, block_ids), take, start=start, stop=source.num_tokens)
            parts += [Part(take.source, part) for part in found.split(PART_BYTES)]
        return parts

    def read_rows(self, source: KVSource, part: Part) -> Transfer:
        """Begin to read a part of a source's rows."""
        rank = source.pool.ranks[part.source]
        return self.agent.read(self.connect(rank.metadata), rank.address, part.pieces, local=self.storage)

    def connect_sources(self, pool: PoolFacts) -> None:
        """Get to know the ranks of a pool that this one would read from.

        Raises:
            TransferError: one cannot be reached.
        """
        for take in takes(pool.topology, self.facts.topology, self.rank, pool.kv_heads):
            self.connect(pool.ranks[take.source].metadata)

    def read_word(self, source: KVSource, slot: int) -> Transfer:
        """Begin to read a source's lease word into check number `slot`."""
        self.checks[slot] = 0
        return self.agent.read(self.meet(source.pool), source.word_address, Pieces.one(8, dst=8 * slot), local=self._checks)

    def write_rows(self, target: KVTarget, block_ids: Sequence[int], start: int, stop: int, layers: Sequence[int] | None = None,
                   indexer_layers: Sequence[int] = ()) -> Transfer:
        """Begin to write the rows of tokens `start` to `stop` from these blocks into a target's; of some layers, or of all."""
        parts = pieces(self.layout, block_ids, target.pool.layout, target.block_ids, start=start, stop=stop, layers=layers, indexer_layers=indexer_layers)
        return self.agent.write(self.meet(target.pool), target.pool.address, parts, local=self.storage)

    def fence(self) -> Any:
        """A mark behind all that the GPU has been asked to do so far; None where there is no GPU. For any thread."""
        if self.storage.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.storage.device))
        return event


def _as_words(memory: Tensor) -> np.ndarray:
    """(8 * n,) uint8 -> (n,) uint64, the same memory; aligned, as all that is allocated is."""
    return memory.numpy().view(np.uint64)
