"""Between rank 0 of a worker and the transfers of its other ranks: short messages on a Unix socket of the group's own folder.

    rank 0  -> a rank    Fetch, StopFetch      read your share of a request's rows; begin no more of it        (ranks that split every step)
                         ReleaseHeld, RenewHeld  of what is kept for a decoder                                  (ranks with requests of their own)
                         Met, Gone             a pool that rows may come from; a process that has ended
    a rank  -> rank 0    Fetched               it is over, one way or another, and nothing is being read any more
                         RankState             of a rank with requests of its own, when it has changed

A rank that ends closes its link; what becomes of the worker then is the group's to say (parallel/group.py).
"""
from __future__ import annotations

import itertools
import pickle
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any, NamedTuple

from .agents import TransferError
from .moved import RankMoved
from .source import KVSource, PoolFacts

__all__ = ["Fetch", "Fetched", "Fetching", "Gone", "Link", "Links", "Met", "RankState", "ReleaseHeld", "RenewHeld", "StopFetch", "connect_link"]

NAME = "transfers"  # of the socket in the group's folder
START_S, LOOK_S = 60.0, 0.2  # for the other ranks to come; until somebody looks whether they are still there


class Fetch(NamedTuple):
    number: int
    source: KVSource
    block_ids: tuple[int, ...]
    start: int  # tokens before it are there already


class StopFetch(NamedTuple):
    number: int


class ReleaseHeld(NamedTuple):
    request_id: str


class RenewHeld(NamedTuple):
    request_id: str


class Met(NamedTuple):
    pool: PoolFacts


class Gone(NamedTuple):
    agent: str


class Fetched(NamedTuple):
    number: int
    moved: RankMoved | None  # None: it came to nothing
    error: str = ""


class RankState(NamedTuple):
    may_step: bool  # rows have come, or blocks are free: there may be something to compute
    num_free_blocks: int
    transfers: dict[str, float]  # counts and seconds of the rank's connector since its start


class Link:
    """One end. `send` is for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = Connection(connection.detach()), Lock()

    def send(self, message: Any) -> None:
        """Nothing, if the other end has gone: whoever needs it hears that from the group."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            pass

    def read(self, heard: Callable[[Any], None], name: str) -> None:
        """Have a thread call `heard` with every message, until the other end has gone."""
        Thread(target=self._read, args=(heard,), name=name, daemon=True).start()

    def _read(self, heard: Callable[[Any], None]) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return
            heard(message)


def connect_link(folder: str) -> Link:
    """A rank's end."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(folder) / NAME))
    return Link(connection)


class Fetching:
    """What the other ranks read of one request. They answer once, when nothing of it is under way any more."""

    def __init__(self, number: int, links: Links) -> None:
        self.number, self._links = number, links
        self._waiting = links.size - 1
        self._stopped = False
        self._error = ""
        self._moved: list[RankMoved] = []

    def done(self) -> bool:
        """All rows are there.

        Raises:
            TransferError: one rank's are not, and will not be.
        """
        over = not self._waiting  # first: an error is there before that is so
        if self._error:
            raise TransferError(self._error)
        return over

    @property
    def moved(self) -> list[RankMoved]:
        """Of those that have theirs, in the order of ranks."""
        return sorted(self._moved, key=lambda moved: moved.rank)

    def stop(self) -> bool:
        """Let them begin no more; True: nothing is under way."""
        if self._waiting and not self._stopped:
            self._stopped = True
            self._links.tell(StopFetch(self.number))
        return not self._waiting

    def heard(self, fetched: Fetched) -> None:
        if fetched.moved is not None:
            self._moved.append(fetched.moved)
        self._error = self._error or fetched.error
        self._waiting -= 1


class Links:
    """Rank 0's ends. Made before the others `connect_link`; then `accept`.

    Attributes:
        states: of ranks with requests of their own, by rank.
        on_state: called with one that has changed; by any thread.
    """

    def __init__(self, folder: str, size: int) -> None:
        self.size = size
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(Path(folder) / NAME))
        self._listening.listen(size)
        self._listening.settimeout(LOOK_S)
        self._links: list[Link] = []
        self._numbers = itertools.count()
        self._fetching: dict[int, Fetching] = {}
        self._lock = Lock()
        self.states: dict[int, RankState] = {}
        self.on_state: Callable[[RankState], None] = lambda state: None

    def accept(self, check: Callable[[], None]) -> None:
        """
        Args:
            check: raises if a rank has ended.

        Raises:
            TimeoutError: not all have come in time.
        """
        until = monotonic() + START_S
        while len(self._links) < self.size - 1:
            try:
                self._links.append(Link(self._listening.accept()[0]))
            except TimeoutError:
                check()
                if monotonic() >= until:
                    raise TimeoutError(f"not all ranks have opened their transfers within {START_S:g} s") from None
        self._listening.close()

    def listen(self) -> None:
        for number, link in enumerate(self._links):
            link.read(lambda message, number=number: self._heard(number, message), "link to a rank")

    def tell(self, message: Any) -> None:
        """All other ranks."""
        for link in self._links:
            link.send(message)

    def fetch(self, source: KVSource, block_ids: Sequence[int], start: int) -> Fetching:
        """Have each rank read what it keeps of this source's tokens from `start` on into these blocks."""
        fetching = Fetching(next(self._numbers), self)
        with self._lock:
            self._fetching[fetching.number] = fetching
        self.tell(Fetch(fetching.number, source, tuple(block_ids), start))
        return fetching

    def _heard(self, number: int, message: Any) -> None:
        if isinstance(message, Fetched):
            with self._lock:
                fetching = self._fetching[message.number]
                fetching.heard(message)
                if not fetching._waiting:
                    del self._fetching[message.number]
        else:
            self.states[number] = message
            self.on_state(message)
