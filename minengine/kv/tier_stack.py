"""The tiers of one worker, beside its step loop: one thread that moves blocks between the pool and them.

Loads go before stores and stores before copies from tier to tier, block by block: a load waits for the block in hand at most. What is stored goes to
the first tier (host memory), whose file is then copied to the next (disk), so the pool's block is needed for a moment only; what is found on disk is
loaded, and its file copied up afterwards. One thread, since a second would take a core from the model and gain nothing: reading and checking a
block let every other thread run.
"""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import Any, Callable, Iterator, Sequence

from minengine.kv.events import EventLog, Medium
from minengine.kv.tier import Found, Tier, stamp_now
from minengine.kv.tier_blocks import BlockBytes
from minengine.kv.tier_jobs import Copy, Job

__all__ = ["TierStack"]

PINNED = 256  # files that one load holds open ahead of its reading
MAX_PENDING_BLOCKS = 256  # that wait to be stored, and as many to be copied up; a cache may drop what is more
OPEN_COPIES = 8  # open files of blocks that are still to be copied: those evicted meanwhile take room beyond their tier's capacity
RESCAN_S = 10.0  # how often an idle worker looks at what others have stored and evicted, for its events

log = logging.getLogger(__name__)


class TierStack:
    """`tiers` nearest first. No call waits for a tier, but `close`."""

    def __init__(self, tiers: Sequence[Tier], blocks: BlockBytes, *, events: EventLog | None = None, rescan_s: float = RESCAN_S,
                 max_pending_blocks: int = MAX_PENDING_BLOCKS) -> None:
        if any(tier.nbytes != blocks.nbytes for tier in tiers):
            raise ValueError(f"the pool's blocks have {blocks.nbytes} bytes, the tiers' {[tier.nbytes for tier in tiers]}")
        self.tiers, self.blocks, self.events = list(tiers), blocks, events
        for tier in self.tiers:
            tier.events = events
        self.rescan_s, self.max_pending_blocks = rescan_s, max_pending_blocks
        self.dropped_blocks = 0  # not stored or copied, because too many waited
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._down: deque[Copy] = deque()  # to be kept on the next tier too; their files are open, so that none is evicted before
        self._up: deque[Copy] = deque()  # found on a farther tier, to be had nearer the next time
        self._storing = 0  # blocks in `_stores`
        self._current: Job | None = None
        self._closed = self._ended = False
        self._wake = threading.Condition()
        self._buffer = blocks.buffer(1 if blocks.direct else max(tier.io.batch for tier in tiers))
        self._next_scan_s = time.monotonic()  # at once: what is there from before
        wake = self._wake
        self._ref = weakref.ref(self, lambda ref: _notify(wake))
        self._thread = threading.Thread(target=_serve, args=(self._ref, wake), name="tiers", daemon=True)
        self._thread.start()

    # --- called by anyone, never waiting ---------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks some tier has; one look at a name for each and tier, and it may be stale at once."""
        n = 0
        for h in hashes:
            if not any(tier.has(h) for tier in self.tiers):
                break
            n += 1
        return n

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], done: Callable[[Job], None]) -> Job:
        """Fill the pool's blocks; `done(job)` is called once, by the tiers' thread, with `job.num_blocks` leading ones right."""
        return self._add(Job(self, "load", hashes, block_ids, done), self._loads)

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int], done: Callable[[Job], None] | None = None) -> Job:
        """Keep blocks, parents before their children; `done(job)` is called once, when the pool's blocks are no longer looked at."""
        return self._add(Job(self, "store", hashes, block_ids, done), self._stores)

    def close(self) -> None:
        """End the thread after the block in hand. What waits is not done; its `done` is called. Twice is harmless."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for tier in self.tiers:
            tier.close()

    def snapshot(self) -> dict[Medium, list[bytes]]:
        """All blocks of this geometry by medium, as the folders have them now."""
        return {tier.medium: tier.folder.hashes() for tier in self.tiers}

    def stats(self) -> dict[str, dict[str, int]]:
        return {tier.medium: {**vars(tier.counts), "used_bytes": tier.folder.used_bytes, "capacity_bytes": tier.capacity_bytes} for tier in self.tiers}

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is moved."""
        with self._wake:
            return not (self._loads or self._stores or self._down or self._up or self._current is not None)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until it is `idle`; for tests and measurements."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._loads or self._stores or self._down or self._up or self._current is not None), timeout_s)

    def _add(self, job: Job, queue: deque[Job]) -> Job:
        with self._wake:
            if job.kind == "store" and self._storing and self._storing + len(job.hashes) > self.max_pending_blocks:
                job.dropped = True
                self.dropped_blocks += len(job.hashes)
                job.hashes, job.block_ids = [], []
            self._storing += len(job.hashes) if job.kind == "store" else 0
            queue.append(job)  # a dropped one too: its `done` is called by the thread, not by the caller, who may hold locks
            ended = self._ended
            self._wake.notify_all()
        if ended:
            self._drain()
        return job

    def _cancel(self, job: Job) -> bool:
        with self._wake:
            if job.ended:
                return True
            job.cancelled = True
            if job is self._current:
                return False
            (self._loads if job.kind == "load" else self._stores).remove(job)
            work, job._work = job._work, None
            self._forget(job)
        if work is not None:
            work.close()
        return True

    def _forget(self, job: Job) -> None:
        job.ended = True
        if job.kind == "store":
            self._storing -= len(job.hashes)

    # --- the thread ------------------------------------------------------------------------------------------

    def _next(self) -> Callable[[], None] | float | None:
        """Under `_wake`: what to do now, or how long nothing is to be done (None: until somebody comes)."""
        job = self._loads[0] if self._loads else self._stores[0] if self._stores else None
        self._current = job or _BUSY
        if job is not None:
            return partial(self._advance, job)
        if self._down or self._up:
            return partial(self._copy, (self._down or self._up).popleft())
        if self.events is not None and time.monotonic() >= self._next_scan_s:
            return self._rescan
        self._current = None
        self._wake.notify_all()  # whoever waits for it to be idle
        return None if self.events is None else max(0.0, self._next_scan_s - time.monotonic())

    def _advance(self, job: Job) -> None:
        """Move the next piece of a job, and end it after its last."""
        if job._work is None:
            job.start_s = time.perf_counter()
            job._work = self._load(job) if job.kind == "load" else self._store(job)
        more = False
        try:
            more = next(job._work, None) is not None
        except Exception:
            log.exception("a %s of %d blocks", job.kind, len(job.hashes))
        with self._wake:
            if more and not job.cancelled:
                return
            (self._loads if job.kind == "load" else self._stores).remove(job)
            job.end_s = time.perf_counter()
            self._forget(job)
        job._work.close()
        self._call(job)

    def _call(self, job: Job) -> None:
        if job._done is not None:
            try:
                job._done(job)
            except Exception:
                log.exception("what follows a %s", job.kind)

    def _drain(self) -> None:
        """After the end: whoever waits hears of it."""
        while True:
            with self._wake:
                job = self._loads.popleft() if self._loads else self._stores.popleft() if self._stores else None
                if job is None:
                    while self._down:
                        self._down.popleft().found.close()
                    self._up.clear()
                    self._ended = True
                    return
                job.cancelled, job.end_s = True, time.perf_counter()
                self._forget(job)
            if job._work is not None:
                job._work.close()
            self._call(job)

    def _load(self, job: Job) -> Iterator[bool]:
        """One step a read. All files are touched first, so that nobody evicts them now, and opened, so that it would not matter."""
        # Of one chain the first block is the youngest: its end is evicted first, as in the pool.
        stamp, pinned, wanted = stamp_now(), deque(), deque(enumerate(job.hashes))

        def pin() -> None:
            while wanted and len(pinned) < PINNED:
                i, h = wanted.popleft()
                found = self._open(h, stamp - i)
                if found is None:
                    wanted.clear()  # blocks behind a missing one are of no use
                else:
                    found.prefetch()
                    pinned.append(found)

        try:
            pin()
            while pinned and job.num_blocks < len(job.hashes):
                batch = [pinned.popleft()]
                while pinned and len(batch) < batch[0].tier.io.batch and pinned[0].tier is batch[0].tier:
                    batch.append(pinned.popleft())
                right = 0
                try:
                    right = self._read(batch, job.block_ids[job.num_blocks :])
                    for i, found in enumerate(batch[:right], job.num_blocks):
                        job.media[found.tier.medium] = job.media.get(found.tier.medium, 0) + 1
                        for nearer in self.tiers[: self.tiers.index(found.tier)]:
                            self._up.append(Copy(found.h, job.hashes[i - 1] if i else None, stamp - i, found.tier, nearer, None))
                finally:
                    for found in batch[: right + 1]:
                        found.close()
                    pinned.extendleft(reversed(batch[right + 1 :]))
                job.num_blocks += right
                job.num_bytes += right * self.blocks.nbytes
                while len(self._up) > self.max_pending_blocks:
                    self._up.popleft()
                    self.dropped_blocks += 1
                if right < len(batch):
                    bad = batch[right]
                    second = next((found for tier in self._beyond(bad.tier) if (found := tier.open(bad.h)) is not None), None)
                    if second is None:
                        return self._check(job.hashes[job.num_blocks + 1 :])
                    pinned.appendleft(second)
                pin()
                yield True
        finally:
            for found in pinned:
                found.close()

    def _beyond(self, tier: Tier) -> list[Tier]:
        return self.tiers[self.tiers.index(tier) + 1 :]

    def _check(self, hashes: Sequence[bytes]) -> None:
        """Where one block is damaged its neighbours may be: have those go that are, or each would cost a load of its own, since what is computed
        anew is not stored over what is there."""
        for h in hashes:
            for tier in self.tiers:
                tier.load_into(h, self._buffer[0])

    def _open(self, h: bytes, stamp_ns: int) -> Found | None:
        for tier in self.tiers:
            tier.touch(h, stamp_ns)  # in all of them: what is used in memory must not grow old on the disk
        return next((found for tier in self.tiers if (found := tier.open(h)) is not None), None)

    def _read(self, batch: list[Found], block_ids: list[int]) -> int:
        places = [self.blocks.place(b) for b in block_ids[: len(batch)]] if self.blocks.direct else list(self._buffer[: len(batch)])
        right = batch[0].tier.read(batch, places)
        if not self.blocks.direct:
            for i in range(right):
                self.blocks.write(block_ids[i], places[i])
        return right

    def _store(self, job: Job) -> Iterator[bool]:
        """One step a block."""
        stamp = stamp_now()
        for i, (h, block) in enumerate(zip(job.hashes, job.block_ids)):
            parent = job.hashes[i - 1] if i else None
            lacking = [tier for tier in self.tiers if not tier.touch(h, stamp - i)]
            if self.tiers[0] in lacking:
                data = self.blocks.place(block) if self.blocks.direct else self._buffer[0]
                if not self.blocks.direct:
                    self.blocks.read(block, data)
                while lacking and not lacking.pop(0).store_from(h, data, parent, stamp - i):
                    pass
            holder = next((tier for tier in self.tiers if tier.has(h)), None)
            if holder is not None:
                job.num_blocks += 1
                job.num_bytes += self.blocks.nbytes
                for tier in lacking:
                    found = holder.open(h)
                    if found is not None:
                        self._down.append(Copy(h, parent, stamp - i, holder, tier, found))
                while len(self._down) > OPEN_COPIES:
                    self._copy(self._down.popleft())
            yield True

    def _copy(self, copy: Copy) -> None:
        found = copy.found or copy.source.open(copy.h)
        if found is not None:
            try:
                if not copy.target.has(copy.h):
                    copy.target.copy_from(found, copy.parent, copy.stamp_ns)
            finally:
                found.close()

    # --- events of what others do ----------------------------------------------------------------------------

    def _rescan(self) -> None:
        """Tell what other processes have stored and evicted since the last look."""
        self._next_scan_s = time.monotonic() + self.rescan_s
        known = self.events.snapshot().hashes
        for tier in self.tiers:
            there = set(tier.folder.hashes())
            for h in there - known[tier.medium]:
                self.events.stored(h, None, tier.medium)
            for h in known[tier.medium] - there:
                self.events.removed(h, tier.medium)


_BUSY: Any = object()  # at work for no job


def _serve(ref: weakref.ref[TierStack], wake: threading.Condition) -> None:
    """The thread. It holds the stack, and with it the pool, only while there is something to do: one that nobody has any more ends by itself."""
    while True:
        with wake:
            stack = ref()
            if stack is None:
                return
            if stack._closed:
                break
            work = stack._next()
            if not callable(work):
                del stack
                wake.wait(work)
                continue
        try:
            work()
        except Exception:  # a job's own errors are its end; anything else must not stop the thread
            log.exception("a tier's thread")
        finally:
            with wake:
                stack._current = None
            del stack, work
    stack._drain()


def _notify(wake: threading.Condition) -> None:
    with wake:
        wake.notify_all()
