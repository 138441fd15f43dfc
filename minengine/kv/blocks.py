"""The block pool: who holds which block, which blocks can be found again by content, which go first.

A block is a number. It is in exactly one of three states:
  held    reference count > 0: in the table of one or more requests
  cached  reference count 0, content known by hash: can be found again, or evicted
  free    reference count 0, content unknown
What moves a request's cache moves fewer and larger pieces where its blocks are neighbours, so blocks are handed out in runs (`Runs`, best
fit). Strict LRU leaves no choice of blocks, and runs of one: so a pool that evicts keeps its RESERVE least recently used cached blocks beside
the free ones, and evicts whichever of them fit. They can be found and shared until then. Nothing younger is ever evicted before them.
Pure Python, no tensors: the engine, the simulator and the book's pages run this same file.
"""
from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import sha256
from typing import Iterable, Sequence

from .events import EventLog
from .runs import Runs

__all__ = ["BlockPool", "OutOfBlocks", "block_hash", "block_hashes", "root_hash"]

RESERVE = 1 / 64  # of the pool: with more, runs are longer and what is evicted is younger (`python -m bench churn` measures both)
UNSALTED_ROOT = sha256(b"minengine:root:none").digest()


class OutOfBlocks(RuntimeError):
    """Asked for more blocks than can be freed; nothing was changed."""


def root_hash(cache_salt: str | None = None) -> bytes:
    """The parent of a prompt's first block. Tenants with different salts can never find each other's blocks.

    The tag keeps "no salt" apart from every salt, the empty one included.
    """
    return UNSALTED_ROOT if cache_salt is None else sha256(b"minengine:root:salt:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 of a full block: its tokens AND all that came before it (through `parent`)."""
    return sha256(b"minengine:block:" + parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str | None = None) -> list[bytes]:
    """The hash chain of all full blocks."""
    chain, parent = [], root_hash(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start: start + block_size])
        chain.append(parent)
    return chain


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts and a content index."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: the pool needs at least one block")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self._reserve = int(num_blocks * RESERVE)
        self._ready = Runs(num_blocks)  # free blocks, and the cached ones that go next
        self._ready.add_run(0, num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # the other cached ones, oldest first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.num_evictions = 0
        self._events: EventLog | None = None

    @property
    def events(self) -> EventLog | None:
        """Told what becomes findable and what no longer is; a log that is set later is told first what is there."""
        return self._events

    @events.setter
    def events(self, log: EventLog | None) -> None:
        self._events = log
        if log is not None:
            for h in self._block_of:
                log.stored(h)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones that nobody holds."""
        return self._ready.count + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by content, held or not."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Take `n` blocks with unknown content, each held once, in few ascending runs. Evicts cached blocks if free ones are lacking.

        `after`: the last block of the table that they go on, held: its neighbours come first.

        Raises:
            OutOfBlocks: fewer than `n` can be handed out; nothing is taken.
        """
        if n > self.num_free_blocks:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} of {self.num_blocks} can be handed out")
        ready = self._ready
        if ready.count < n or (self.num_evictions and ready.count < n + self._reserve // 2):  # a pool that never evicted uses its free ones up
            self._age(n + self._reserve - ready.count)
        taken = ready.take(n, after)
        for block in taken:
            self.ref_counts[block] = 1
            if self._hash_of[block] is not None:
                self._forget(block)
                self.num_evictions += 1
        return taken

    def _age(self, n: int) -> None:
        """Make the `n` least recently used cached blocks ready to be evicted, or all if they are fewer."""
        oldest = [self._cached.popitem(last=False)[0] for _ in range(min(n, len(self._cached)))]
        self._ready.add(oldest)

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold cached blocks once more (a prefix hit)."""
        for block in block_ids:
            if self.ref_counts[block] == 0:
                if block not in self._cached and self._hash_of[block] is not None:
                    self._ready.remove(block)
                else:
                    del self._cached[block]  # KeyError: a free block has no content to share
            self.ref_counts[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of a request's blocks. The last block goes first in line for eviction, so prefixes live longest.

        Raises:
            ValueError: a block that nobody holds; nothing is changed.
        """
        for block in block_ids:
            if self.ref_counts[block] <= 0:
                raise ValueError(f"block {block} is released and nobody holds it")
        free = []
        for block in reversed(block_ids):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self._hash_of[block] is None:
                    free.append(block)
                else:
                    self._cached[block] = None
        if free:
            self._ready.add(free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a hash chain; holds nothing."""
        found: list[int] = []
        for h in hashes:
            block = self._block_of.get(h)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody holds: sharing them takes that many out of `num_free_blocks`."""
        return sum(self.ref_counts[block] == 0 for block in block_ids)

    def register(self, block: int, h: bytes, parent: bytes | None = None) -> None:
        """Make a held, fully computed block findable. The first block with a given content stays the known one.

        `parent`, the hash that `h` was made with, is for those who listen to `events` only.
        """
        if self.enable_prefix_caching and h not in self._block_of and self._hash_of[block] is None:
            self._block_of[h] = block
            self._hash_of[block] = h
            if self._events is not None:
                self._events.stored(h, parent)

    def offer(self, table: Sequence[int], hashes: Sequence[bytes], first: int, root: bytes) -> None:
        """`register` a table's blocks from number `first` to the end of its hash chain, which grows from `root`."""
        parent = hashes[first - 1] if first else root
        for block, h in zip(table[first: len(hashes)], hashes[first:]):
            self.register(block, h, parent)
            parent = h

    def reset_prefix_cache(self) -> None:
        """Forget all contents. Held blocks stay held; they just cannot be found any more."""
        self._ready.add(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        if self._events is not None:
            self._events.cleared()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless ready + cached + held is the whole pool and counts equal the tables' references."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block in table:
                held[block] += 1
        assert held == self.ref_counts, "reference counts differ from the requests' block tables"
        self._ready.check()
        ready, cached = {block for block in range(self.num_blocks) if block in self._ready}, set(self._cached)
        in_use = {block for block, count in enumerate(held) if count}
        assert not (ready & cached or ready & in_use or cached & in_use), "a block is in two states"
        assert len(ready) + len(cached) + len(in_use) == self.num_blocks, (
            f"blocks leaked: ready {len(ready)} + cached {len(cached)} + held {len(in_use)} != {self.num_blocks}")
        assert all(self._hash_of[block] == h for h, block in self._block_of.items()), "the content index is inconsistent"
        assert sum(h is not None for h in self._hash_of) == len(self._block_of), "a hash has no entry in the index"
        assert all(self._hash_of[block] is not None for block in cached), "a cached block has no content"

    def _forget(self, block: int) -> None:
        h = self._hash_of[block]
        if h is not None:
            del self._block_of[h]
            self._hash_of[block] = None
            if self._events is not None:
                self._events.removed(h)
