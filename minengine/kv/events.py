"""What can be found in a worker's cache, told as events: a router that reads them knows the contents without asking.

    stored   blocks can now be found by these hashes
    removed  they no longer can
    cleared  nothing can

Events carry sequence numbers from 1, one more each. A reader that sees a number missing takes a `snapshot`, which says what is there after
the event of its number, and goes on from there; what it has already seen, it may be told again. Pure Python; a pool without a log pays nothing.
"""
from __future__ import annotations

from threading import Lock
from typing import Iterable, Literal, NamedTuple

__all__ = ["MEDIA", "EventLog", "KVEvent", "Medium", "Snapshot"]

Medium = Literal["device", "host", "disk"]
MEDIA: tuple[Medium, ...] = ("device", "host", "disk")  # nearest first


class KVEvent(NamedTuple):
    """One change of what a worker's cache holds on one medium."""

    seq: int
    kind: Literal["stored", "removed", "cleared"]
    hashes: tuple[bytes, ...]  # in the order in which it happened; empty for "cleared"
    medium: Medium = "device"
    parent: bytes | None = None  # of "stored": the hash before the first, and each is the child of the one before it. None: nothing is said of that


class Snapshot(NamedTuple):
    """What is there after the event `seq` (0: before the first one), by medium; each medium has its key."""

    seq: int
    hashes: dict[Medium, frozenset[bytes]]


class EventLog:
    """Collects the events of one worker, whatever the medium, until its one reader takes them. Any thread may record and take.

    Neighbours of a kind share an event. A log that nobody reads holds `max_pending` changes at most: then it drops them, and the reader sees
    by the numbers that some are gone.
    """

    def __init__(self, max_pending: int = 1 << 20) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending}: use at least 1")
        self.max_pending = max_pending
        self.seq = 0  # of the last event
        self._contents: dict[Medium, set[bytes]] = {medium: set() for medium in MEDIA}
        self._events: list[KVEvent] = []  # that can no longer grow
        self._kind, self._medium, self._parent = "", "device", None  # of the one that may; "": there is none
        self._hashes: list[bytes] = []
        self._pending = 0  # hashes to be taken
        self._lock = Lock()

    def stored(self, h: bytes, parent: bytes | None = None, medium: Medium = "device") -> None:
        """A block became findable; `parent` is the hash before it in its chain, the root's for a first block. Twice is harmless."""
        with self._lock:
            if h not in self._contents[medium]:
                self._contents[medium].add(h)
                grows = self._kind == "stored" and self._medium == medium and (
                    parent is None if self._parent is None else parent == self._hashes[-1])
                self._record("stored", medium, h, parent, grows)

    def removed(self, h: bytes, medium: Medium = "device") -> None:
        """A block can no longer be found; harmless if it could not before."""
        with self._lock:
            if h in self._contents[medium]:
                self._contents[medium].remove(h)
                self._record("removed", medium, h, None, self._kind == "removed" and self._medium == medium)

    def cleared(self, medium: Medium = "device") -> None:
        """Nothing can be found on this medium any more."""
        with self._lock:
            self._contents[medium].clear()
            self._record("cleared", medium, None, None, False)

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        with self._lock:
            self._close()
            events, self._events, self._pending = self._events, [], 0
        return events

    def snapshot(self) -> Snapshot:
        """What is there now. Events that are still to be taken and have happened before keep their numbers, up to the snapshot's."""
        with self._lock:
            self._close()  # what comes next has a number of its own
            return Snapshot(self.seq, {medium: frozenset(found) for medium, found in self._contents.items()})

    def _record(self, kind: str, medium: Medium, h: bytes | None, parent: bytes | None, grows: bool) -> None:
        if self._pending >= self.max_pending:
            self._kind, self._events, self._hashes, self._pending, grows = "", [], [], 0, False
        if not grows:
            self._close()
            self.seq += 1
            self._kind, self._medium, self._parent = kind, medium, parent
        if h is not None:
            self._hashes.append(h)
        self._pending += 1

    def _close(self) -> None:
        if self._kind:
            self._events.append(KVEvent(self.seq, self._kind, tuple(self._hashes), self._medium, self._parent))
            self._kind, self._hashes = "", []
