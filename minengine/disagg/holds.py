"""The blocks that a prefill worker keeps for decoders: one lease a request, ended by the decoder's notice, by the front, or by time."""
from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..request import Request
from .kv_io import KVIO
from .leases import LeaseTable
from .moved import TransferTotals
from .source import KVSource

__all__ = ["Holds"]


class Held(NamedTuple):
    request: Request
    block_ids: tuple[int, ...]


class Holds:
    """Everything here is under the engine's lock, which also orders what a decoder relies on: a lease's word is 0 before its blocks can be
    anybody else's. For that the lease has a reference of its own on each of them, whatever happens to the request."""

    def __init__(self, engine: Any, io: KVIO, lease_s: float, totals: TransferTotals) -> None:
        self.engine, self.io, self.lease_s, self.totals = engine, io, lease_s, totals
        self.table = LeaseTable(engine.clock, io.words)
        self._held: dict[int, Held] = {}  # by lease
        self._next_look_s = math.inf

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str) -> KVSource:
        """Lease the blocks of a request whose prefill is done (Status.HELD) to whoever gets the source.

        Raises:
            KeyError: no such request is held.
            OutOfLeases: too many are held at once; the request is as it was.
        """
        with self.engine.lock:
            request = self.engine.held(request_id)
            if request is None:
                raise KeyError(request_id)
            block_ids = tuple(request.block_ids[: self.engine.pool.blocks_for(request.num_computed_tokens)])
            lease = self.table.hold(request_id, self.lease_s)
            self.engine.scheduler.borrow(block_ids)
            self._held[lease.id] = Held(request, block_ids)
            self._next_look_s = min(self._next_look_s, lease.expires_s)
            self.totals.holds += 1
            return KVSource(self.io.facts, block_ids, request.num_computed_tokens, lease.id, lease.slot)

    def end(self, lease_id: int) -> bool:
        """End a lease and the request that it was for; an unknown or ended one is left alone."""
        with self.engine.lock:
            if self.table.end(lease_id) is None:
                return False
            self._give_back(lease_id)
            return True

    def release(self, request_id: str) -> bool:
        """End what is leased of that request."""
        with self.engine.lock:
            return any([self.end(lease.id) for lease in self.table.of(request_id)])

    def renew(self, request_id: str) -> bool:
        """Let what is leased of that request stay for as long again from now."""
        with self.engine.lock:
            renewed = sum(self.table.renew(lease.id, self.lease_s) for lease in self.table.of(request_id))
            self.totals.renewals += renewed
            return renewed > 0

    def look(self, now_s: float) -> int:
        """End the leases that have run out, and those of requests that ended in another way (an abort); returns how many."""
        over = [id for id, held in list(self._held.items()) if held.request.finished]
        if now_s < self._next_look_s and not over:
            return 0
        with self.engine.lock:
            ended = sum(self.end(id) for id in over)
            for lease in self.table.expired(now_s):
                self._give_back(lease.id)
                self.totals.leases_expired += 1
                ended += 1
            self._next_look_s = math.inf if self.table.next_expiry_s is None else self.table.next_expiry_s
        return ended

    @property
    def next_look_s(self) -> float:
        return self._next_look_s

    def _give_back(self, lease_id: int) -> None:
        request, block_ids = self._held.pop(lease_id)
        self.engine.stored(block_ids)
        if not request.finished:
            self.engine.release_request(request.request_id)
