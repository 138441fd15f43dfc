"""What each worker's cache holds, as its events tell: how much of a prompt lies where.

The blocks' hashes are chained (each stands for all tokens before it too), so a prompt's cached part is the length of the run of known hashes at
its start. One dictionary maps a hash to a bit mask of the workers that have it on their device: one walk finds the run of every worker.
The host and disk tiers of a machine are shared by its workers; they are known by whoever told of a block last.
Pure Python; it knows hashes and names, never tokens or tensors, and it may be wrong: a router that trusts it pays with a slower request only.
"""
from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

from ..kv.events import KVEvent, Medium, Snapshot

__all__ = ["KVIndex", "Overlap"]


class Overlap(NamedTuple):
    """Leading blocks of one prompt that one worker need not compute, by the nearest medium that has them: first the device's, then the tiers'."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


class KVIndex:
    """The contents of several workers' caches, kept by their events."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}  # worker -> its bit
        self._machine: dict[str, str] = {}
        self._device: dict[bytes, int] = {}  # hash -> mask of the workers that have it
        self._own: dict[str, set[bytes]] = {}  # worker -> what stands under its bit
        self._tiers: dict[tuple[str, Medium], dict[bytes, str]] = {}  # (machine, medium) -> hash -> the worker that told of it last
        self._next: dict[str, int | None] = {}  # number of the event that comes next; None: a number was missing

    def add(self, worker: str, machine: str = "") -> None:
        """Know a worker, with nothing on its device; its first event has number 1. Workers of one machine share its tiers.

        Raises:
            ValueError: it is known already.
        """
        if worker in self._bit:
            raise ValueError(f"worker {worker!r} is in the index already")
        used = set(self._bit.values())
        self._bit[worker] = next(bit for bit in (1 << i for i in range(len(used) + 1)) if bit not in used)
        self._machine[worker] = machine
        self._own[worker] = set()
        self._next[worker] = 1

    def remove(self, worker: str) -> None:
        """Forget a worker; what it told of the tiers stays, as their files do."""
        self.restart(worker)
        for known in (self._bit, self._machine, self._own, self._next):
            del known[worker]

    def restart(self, worker: str) -> None:
        """The worker begins anew: an empty device, and its events count from 1. The tiers outlive a process."""
        self._set_device(worker, ())
        self._next[worker] = 1

    # --- events -------------------------------------------------------------------------------------------

    def apply(self, worker: str, events: Iterable[KVEvent]) -> bool:
        """Take in a worker's events. Those with numbers seen before are passed over.

        Returns:
            False: a number is missing, now or since before. What came after it is not taken in, and nothing is until `resync`.
        """
        for event in events:
            expected = self._next[worker]
            if expected is None or event.seq > expected:
                self._next[worker] = None
                break
            if event.seq == expected:
                self._take_in(worker, event)
                self._next[worker] = expected + 1
        return self._next[worker] is not None

    def needs_resync(self, worker: str) -> bool:
        return self._next[worker] is None

    def resync(self, worker: str, snapshot: Snapshot) -> None:
        """Replace all that is known from this worker; events go on after the snapshot's number.

        A snapshot from before what is known already (its answer overtook nothing, it was only slow) changes nothing.
        """
        expected = self._next[worker]
        if expected is not None and snapshot.seq < expected - 1:
            return
        self._set_device(worker, snapshot.hashes.get("device", ()))
        for medium in ("host", "disk"):
            tier, now = self._tier(worker, medium), snapshot.hashes.get(medium, frozenset())
            for h in [h for h, teller in tier.items() if teller == worker and h not in now]:
                del tier[h]
            tier.update(dict.fromkeys(now, worker))
        self._next[worker] = snapshot.seq + 1

    def _take_in(self, worker: str, event: KVEvent) -> None:
        if event.medium != "device":
            tier = self._tier(worker, event.medium)
            if event.kind == "stored":
                tier.update(dict.fromkeys(event.hashes, worker))
            elif event.kind == "removed":
                for h in event.hashes:
                    tier.pop(h, None)  # whoever told of it: the file was everybody's
            else:
                tier.clear()
        elif event.kind == "stored":
            bit, own = self._bit[worker], self._own[worker]
            for h in event.hashes:
                self._device[h] = self._device.get(h, 0) | bit
                own.add(h)
        elif event.kind == "removed":
            self._unset(worker, event.hashes)
        else:
            self._set_device(worker, ())

    def _tier(self, worker: str, medium: Medium) -> dict[bytes, str]:
        return self._tiers.setdefault((self._machine[worker], medium), {})

    def _set_device(self, worker: str, hashes: Iterable[bytes]) -> None:
        own, bit = self._own[worker], self._bit[worker]
        self._unset(worker, list(own))
        for h in hashes:
            self._device[h] = self._device.get(h, 0) | bit
            own.add(h)

    def _unset(self, worker: str, hashes: Iterable[bytes]) -> None:
        own, bit = self._own[worker], self._bit[worker]
        for h in hashes:
            if h in own:
                own.remove(h)
                left = self._device[h] & ~bit
                if left:
                    self._device[h] = left
                else:
                    del self._device[h]

    # --- questions ----------------------------------------------------------------------------------------

    def overlaps(self, hashes: Sequence[bytes], workers: Iterable[str]) -> dict[str, Overlap]:
        """How much of a prompt each of `workers` has: the run on its device, then the run that its machine's tiers go on with.

        That is what a scheduler can use: blocks that lie on the device again after those of a tier are not counted.
        """
        workers = list(workers)
        counts, alive = dict.fromkeys(workers, len(hashes)), 0
        for worker in workers:
            alive |= self._bit[worker]
        for i, h in enumerate(hashes):
            gone = alive & ~self._device.get(h, 0)
            if gone:
                for worker in workers:
                    if gone & self._bit[worker]:
                        counts[worker] = i
                alive &= ~gone
            if not alive:
                break
        runs: dict[tuple[str, int], tuple[int, int]] = {}  # workers of a machine often start from the same block
        for worker, start in counts.items():
            key = (self._machine[worker], start)
            if key not in runs:
                runs[key] = self._tier_run(hashes, *key)
        return {worker: Overlap(start, *runs[self._machine[worker], start]) for worker, start in counts.items()}

    def _tier_run(self, hashes: Sequence[bytes], machine: str, start: int) -> tuple[int, int]:
        host, disk = self._tiers.get((machine, "host"), {}), self._tiers.get((machine, "disk"), {})
        in_host = in_disk = 0
        for i in range(start, len(hashes) if host or disk else start):
            if hashes[i] in host:
                in_host += 1
            elif hashes[i] in disk:
                in_disk += 1
            else:
                break
        return in_host, in_disk

    def known(self, worker: str) -> dict[str, int]:
        """Blocks known by medium; those of the tiers are the whole machine's."""
        machine = self._machine[worker]
        return {"device": len(self._own[worker]), **{medium: len(self._tiers.get((machine, medium), ())) for medium in ("host", "disk")}}
