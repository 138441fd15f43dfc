"""Leases: how long a prefill worker keeps blocks for a decoder that may never come, with no clock that both share.

The prefill worker owns a small table of 64-bit words that its peers may read. Holding blocks takes a slot and writes the lease's
id there; ending the lease, for whatever reason, writes 0 BEFORE the blocks may be used again. A reader reads the rows first and
then the one word: if it is still the id, the rows were held all the time; if it is anything else, they may be somebody else's by
now and what was read is thrown away. Neither side compares times with the other. Pure Python, no locks: its owner guards it.
"""
from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from heapq import heappop, heappush

__all__ = ["EARLY_NOTICES", "Lease", "LeaseTable", "OutOfLeases"]

EARLY_NOTICES = 4096  # ids of leases not made yet, whose end has been told already


class OutOfLeases(RuntimeError):
    """Every slot of the table is taken; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Lease:
    id: int  # 1 ... 2**64 - 1, never used twice
    slot: int  # which word of the table
    request_id: str
    expires_s: float  # by the owner's clock
    ended: bool = False  # true where its end was told before it was made: nothing is held, `slot` is of no use


class LeaseTable:
    """The leases of one worker.

    Args:
        clock: seconds, never going back; read by `hold` and `renew` only.
        words: the table that peers read, one word a slot, all zero: a list, or a uint64 array over registered memory.
        first_id: the id of the first lease. By default a random one, so that no word a restarted worker writes can be taken for one
            that it wrote before.
    """

    def __init__(self, clock: Callable[[], float], words: MutableSequence[int], first_id: int | None = None) -> None:
        self._clock = clock
        self._words = words
        self._next_id = self._first_id = first_id or secrets.randbits(62) + 1
        self._held: dict[int, Lease] = {}
        self._free_slots = list(range(len(words)))[::-1]
        self._by_expiry: list[tuple[float, int]] = []  # a heap; a pair is stale where its lease has ended or been renewed
        self._early: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id: int) -> bool:
        return id in self._held

    def of(self, request_id: str) -> list[Lease]:
        """The leases held for that request, oldest first."""
        return [lease for lease in self._held.values() if lease.request_id == request_id]

    @property
    def next_expiry_s(self) -> float | None:
        """When the first of them runs out, None while nothing is held."""
        self._drop_stale()
        return self._by_expiry[0][0] if self._by_expiry else None

    def hold(self, request_id: str, seconds: float, id: int | None = None) -> Lease:
        """Make a lease and write its word.

        Args:
            id: given by a caller that has told it to the reader beforehand, so that the end may be known before the lease is made:
                then the lease that comes back is `ended` and takes no slot.

        Raises:
            OutOfLeases: no slot is free.
            ValueError: the id is held, or was one of this table's own.
        """
        if id is not None and (id in self._held or self._was_ours(id) or not 0 < id < 1 << 64):
            raise ValueError(f"lease id {id} is not a new one")
        expires_s = self._clock() + seconds
        if id in self._early:
            del self._early[id]
            return Lease(id, -1, request_id, expires_s, ended=True)
        if not self._free_slots:
            raise OutOfLeases(f"all {len(self._words)} leases are taken")
        if id is None:
            id, self._next_id = self._next_id, self._next_id + 1
        lease = Lease(id, self._free_slots.pop(), request_id, expires_s)
        self._keep(lease)
        self._words[lease.slot] = id
        return lease

    def renew(self, id: int, seconds: float) -> bool:
        """Let it run for `seconds` from now; False where it has ended, and ended leases stay so."""
        lease = self._held.get(id)
        if lease is None:
            return False
        self._keep(Lease(id, lease.slot, lease.request_id, self._clock() + seconds))
        return True

    def end(self, id: int) -> Lease | None:
        """Zero its word and give the lease back, whose blocks the caller may then release; None where it is not held.

        Twice is harmless. An id that this table has not made may be one that it will be asked to make: it is kept, the oldest of
        4,096 being forgotten for it.
        """
        lease = self._held.pop(id, None)
        if lease is not None:
            self._words[lease.slot] = 0
            self._free_slots.append(lease.slot)
        elif not self._was_ours(id):
            self._early[id] = None
            self._early.move_to_end(id)
            if len(self._early) > EARLY_NOTICES:
                self._early.popitem(last=False)
        return lease

    def expired(self, now_s: float) -> list[Lease]:
        """End those that have run out by `now_s`, whatever the order they were made in; earliest expiry first."""
        found = []
        self._drop_stale()
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            found.append(self.end(self._by_expiry[0][1]))
            self._drop_stale()
        return found

    def _keep(self, lease: Lease) -> None:
        self._held[lease.id] = lease
        heappush(self._by_expiry, (lease.expires_s, lease.id))

    def _was_ours(self, id: int) -> bool:
        return self._first_id <= id < self._next_id

    def _drop_stale(self) -> None:
        while self._by_expiry:
            expires_s, id = self._by_expiry[0]
            if id in self._held and self._held[id].expires_s == expires_s:
                return
            heappop(self._by_expiry)
