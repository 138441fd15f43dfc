"""How rows come to an engine's pool from elsewhere, in virtual time: from a prefill engine, or from a tier in host memory.

A request's rows move as the pieces that the cache's layout cuts them into (`arithmetic.moving`); what they take is the cost model's to say.
Requests do not slow each other down. Copies to the tier take no time and hold nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..arithmetic.copies import GLM_5_3, layer_kinds
from ..arithmetic.moving import taken
from ..arithmetic.rows import bytes_per_token, indexer_bytes, row_bytes
from ..config import ConfigError
from .agenda import Agenda
from .engines import Engine
from .nodes import Chain, NodePool, Table
from .requests import SimRequest
from .work import Costs

__all__ = ["MODELS", "Shape", "Tier", "Wire", "token_bytes"]

MODELS = {"glm-5.3": GLM_5_3}  # whose rows' sizes are known here


def token_bytes(model: str, kv_cache_dtype: str) -> int:
    """Bytes that a token takes in one copy of the cache.

    Raises:
        ConfigError: an unknown model or format.
    """
    if model not in MODELS:
        raise ConfigError(f"model='{model}': the sizes of its rows are not known here; use {', '.join(MODELS)}")
    kinds = layer_kinds(MODELS[model])
    return bytes_per_token(row_bytes(kv_cache_dtype).total, sum(kinds.values()), 1, indexer_bytes(kv_cache_dtype).total, kinds["full"])


@dataclass(frozen=True)
class Shape:
    """What moves when a request's rows go from an engine of topology `held` to one of topology `kept`."""

    held: str
    kept: str
    model: str
    kv_cache_dtype: str
    layout: str
    block_size: int

    def move(self, start: int, tokens: int) -> tuple[int, int]:
        """(pieces, bytes) that one rank reads for tokens `start`, a whole number of blocks, to `tokens`."""
        kinds = layer_kinds(MODELS[self.model])
        found = taken(self.held, self.kept, 0, self.layout, tokens, self.block_size, sum(kinds.values()), row_bytes(self.kv_cache_dtype).total,
                      indexer_planes=kinds["full"], indexer=indexer_bytes(self.kv_cache_dtype).total, start=start)
        return sum(one.pieces for one in found), sum(one.nbytes for one in found)


class Tier:
    """Blocks in host memory, found by content like the device's, least recently used first to go: what is stored or loaded counts as used.

    Args:
        block_bytes: of one block, and of each rank's part of it.
    """

    def __init__(self, capacity_bytes: int, block_size: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.pool = NodePool(max(1, capacity_bytes // block_bytes), block_size)
        self.stored = self.loaded = 0  # blocks

    def find(self, chain: Chain) -> int:
        return len(self.pool.find(chain))

    def store(self, chain: Chain) -> None:
        """What the tier has not room for is left out."""
        pool = self.pool
        found = pool.find(chain)
        pool.share(found)
        n = min(len(chain), len(found) + pool.num_free_blocks)
        table = found + pool.allocate(n - len(found))
        if table.blank:
            pool.offer(table, chain[:n], len(found), b"")
        self.stored += n - len(found)
        pool.release(table)

    def use(self, chain: Chain) -> None:
        found = self.pool.find(chain)
        self.pool.share(found)
        self.pool.release(found)
        self.loaded += len(found)


class Wire:
    """The `KVConnector` of one rank.

    Args:
        shape: of what comes from a prefill engine; None: nothing does.
        tier: None: there is none.
        arrived: told of a request whose rows have come from the engine that held them.
    """

    def __init__(self, agenda: Agenda, costs: Costs, shape: Shape | None, tier: Tier | None, arrived: Callable[[SimRequest], None]) -> None:
        self.agenda, self.costs, self.shape, self.tier, self.arrived = agenda, costs, shape, tier, arrived
        self.engine: Engine
        self.scheduler: Any
        self.moved_pieces = self.moved_bytes = self.moves = 0

    def find(self, hashes: Chain) -> int:
        return self.tier.find(hashes) if self.tier is not None else 0

    def load(self, request: SimRequest, block_ids: Table, num_cached_blocks: int, hashes: Sequence[bytes] | Chain) -> None:
        now, timeline = self.agenda.now, request.timeline
        if request.source is None:
            self.tier.use(hashes)
            timeline.retrieve_start_s = now
            took = self.costs.retrieve_ps(len(hashes) * self.tier.block_bytes)
            self.agenda.news(now + max(1, took), self._retrieved, request, len(hashes))
            return
        timeline.transfer_start_s = now
        size, tokens = self.scheduler.pool.block_size, request.num_tokens - 1  # the last token's row is this engine's to compute
        pieces, nbytes = self.shape.move(min(num_cached_blocks * size, tokens), tokens)
        self.moves, self.moved_pieces, self.moved_bytes = self.moves + 1, self.moved_pieces + pieces, self.moved_bytes + nbytes
        took = self.costs.transfer_ps(pieces, nbytes)
        self.agenda.news(now + max(1, took), self._transferred, request, len(block_ids) - num_cached_blocks)

    def cancel(self, request: SimRequest) -> bool:
        return True

    def store(self, hashes: Chain, block_ids: Table) -> bool:
        if self.tier is not None:
            self.tier.store(hashes)
        return False

    def _retrieved(self, request: SimRequest, num_blocks: int) -> None:
        request.timeline.retrieve_end_s = self.agenda.now
        self.engine.tell(self._landed, request, num_blocks)

    def _transferred(self, request: SimRequest, num_blocks: int) -> None:
        request.timeline.transfer_end_s = self.agenda.now
        self.arrived(request)
        self.engine.tell(self._landed, request, num_blocks)

    def _landed(self, request: SimRequest, num_blocks: int) -> None:
        now = self.agenda.now
        if request.source is None:
            request.timeline.polled_s = request.timeline.handed_off_s = now
            request.loaded = num_blocks * self.scheduler.pool.block_size
        self.scheduler.landed(request, num_blocks, now)
