"""Blocks whose content comes from elsewhere, or is being copied there: who may touch them, and when they are free again.

    find       what the pool, a tier or another engine has of a request
    start      blocks for all its tokens; the connector brings what the pool lacks
    finish     it has landed, or failed, or nobody wants it any more
    store      blocks that are computed go out; held until they are copied

A block that somebody may still be writing to is in no request's table and in quarantine: nobody gets it until that is over.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Sequence

from .kv.blocks import BlockPool
from .kv.connector import KVConnector
from .request import Request

__all__ = ["Found", "Loads", "cached_prefix", "take_blocks"]


class Found(NamedTuple):
    """What there is of a request before it is computed."""

    cached: list[int]  # blocks of the pool, its first ones
    hashes: list[bytes]  # of the blocks after them that a tier has; empty for a request with a source, which has them all


class Loads:
    def __init__(self, pool: BlockPool, connector: KVConnector | None) -> None:
        self.pool = pool
        self.connector = connector
        self.loading: dict[str, Request] = {}
        self.quarantine: dict[Request, list[int]] = {}  # blocks that a load which is over may still write to
        self.storing: Counter[int] = Counter()  # blocks that are being copied out, and how many times

    def find(self, request: Request) -> Found | None:
        """None if there is nothing to load for it."""
        if self.connector is None or not request.may_load:
            return None
        cached = cached_prefix(self.pool, request)
        if request.source is not None:
            return Found(cached, [])
        hashes = _hashes_before_last(self.pool, request)[len(cached):]
        num_blocks = self.connector.find(hashes) if hashes else 0
        return Found(cached, hashes[:num_blocks]) if num_blocks else None

    def start(self, request: Request, found: Found, spare: int) -> bool:
        """False, and nothing is changed, if its blocks do not fit now with `spare` free ones left."""
        if not take_blocks(self.pool, request, found.cached, spare):
            return False
        self.loading[request.request_id] = request
        self.connector.load(request, request.block_ids, len(found.cached), found.hashes)
        return True

    def finish(self, request: Request) -> bool:
        """Take a request out; False if it is not loading."""
        if self.loading.get(request.request_id) is not request:
            return False
        del self.loading[request.request_id]
        return True

    def isolate(self, request: Request) -> None:
        """Take its blocks out of its table; they come back by `settled`."""
        self.quarantine[request] = request.block_ids
        request.block_ids = []

    def settled(self, request: Request) -> None:
        """Nothing writes to the blocks of this request's former load any more; once more is harmless."""
        self.pool.release(self.quarantine.pop(request, []))

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self.borrow(block_ids)
        if self.connector.store(hashes, block_ids) is False:
            self.stored(block_ids)

    def borrow(self, block_ids: Sequence[int]) -> None:
        """Keep held blocks as they are for somebody who reads them, whatever becomes of their request; given back by `stored`."""
        self.pool.share(block_ids)
        self.storing.update(block_ids)

    def stored(self, block_ids: Sequence[int]) -> None:
        """
        Raises:
            ValueError: a block that is not being stored; nothing is changed.
        """
        count = Counter(block_ids)
        if not count <= self.storing:
            raise ValueError(f"blocks {sorted(count - self.storing)} are given back and nobody stores them")
        self.storing -= count
        self.pool.release(block_ids)

    def tables(self) -> Iterator[Sequence[int]]:
        """All references to blocks that are kept here."""
        for request in self.loading.values():
            yield request.block_ids
        yield from self.quarantine.values()
        for block in self.storing.elements():
            yield (block,)


def cached_prefix(pool: BlockPool, request: Request) -> list[int]:
    """The pool's blocks that a request can begin with. Capped one token short: the last token is computed even if all is cached, for its
    logits."""
    return pool.find(_hashes_before_last(pool, request)) if pool.enable_prefix_caching else []


def take_blocks(pool: BlockPool, request: Request, cached: list[int], spare: int = 0) -> bool:
    """Give a request blocks for all its tokens, cached ones first; False, and nothing is changed, if they do not fit now with `spare` left."""
    need = pool.blocks_for(request.num_tokens) - len(cached)
    if need + spare > pool.num_free_blocks - pool.num_idle(cached):
        return False
    pool.share(cached)
    request.block_ids = cached + pool.allocate(need, cached[-1] if cached else None)
    request.capacity = len(request.block_ids) * pool.block_size
    request.num_computed_tokens = len(cached) * pool.block_size
    request.num_hashed_blocks = len(cached)
    return True


def _hashes_before_last(pool: BlockPool, request: Request) -> list[bytes]:
    if not pool.enable_prefix_caching:
        return []
    return request.hashes((request.num_tokens - 1) // pool.block_size, pool.block_size)
