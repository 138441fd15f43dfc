"""The replay itself: turns from the closed loop go to a target when they are due, and what has ended sets the next ones free."""
from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

from ..workload.closed_loop import ClosedLoop, Turn
from ..workload.report import Record

__all__ = ["Replay", "Target", "replay"]

HOPELESS = 30  # requests in a row that failed, and as many again for each live session: then nobody serves


class Target(Protocol):
    """Who serves the turns. One thread calls all of these."""

    label: str  # what reports call it

    def clock(self) -> float:
        """Seconds; the clock of all records."""

    def send(self, turn: Turn, due_s: float) -> Record:
        """Have a turn served, which was due at a moment that has come. Returns at once; whatever happens to it, `wait` tells its end."""

    def wait(self, until_s: float) -> list[tuple[Turn, Record]]:
        """Turns that have ended, each once, as soon as there is one; none if the clock has come to `until_s` before."""

    def close(self) -> None:
        """Give up what is under way, and end."""


@dataclass
class Replay:
    """What came of it. Times are seconds since the replay began."""

    label: str
    records: list[Record]  # in the order of arrivals
    seconds: float
    stopped: str | None = None  # why it ended before its time
    metrics: dict[str, float | None] | None = None  # where whoever served has them already
    note: str | None = None  # what a reader must know before comparing it

    @property
    def all_failed(self) -> bool:
        """Requests have ended, and none with an answer."""
        ended = [record for record in self.records if record.end_s is not None]
        return bool(ended) and all(record.error is not None for record in ended)


def replay(loop: ClosedLoop, target: Target, duration_s: float, *, most: int | None = None,
           tell: Callable[[float, int, int], None] = lambda now_s, ended, failed: None) -> Replay:
    """Replay until the time is over, `most` requests have ended, or nothing is left. A request that fails is recorded with its error, and its
    session goes on; what is under way at the end stays without an end. Ctrl-C ends it too, with what there is.

    Args:
        tell: told after each end: seconds since the beginning, requests that have ended, those of them that failed.
    """
    try:
        course = _Course(loop, target, duration_s, most, tell)
        try:
            course.run()
        except KeyboardInterrupt:
            course.stopped = "interrupted"
        seconds = min(target.clock() - course.start_s, duration_s)
    finally:
        target.close()  # from here on nobody writes to the records
    for record in course.records:
        for name in ("arrival_s", "admitted_s", "first_token_s", "end_s"):
            if getattr(record, name) is not None:
                setattr(record, name, getattr(record, name) - course.start_s)
    return Replay(target.label, course.records, seconds, course.stopped)


class _Course:
    def __init__(self, loop: ClosedLoop, target: Target, duration_s: float, most: int | None, tell: Callable[[float, int, int], None]) -> None:
        self.loop, self.target, self.most, self.tell = loop, target, most, tell
        self.start_s = target.clock()
        self.end_s = self.start_s + duration_s
        self.records: list[Record] = []
        self.stopped: str | None = None
        self.ended = self.failed = self.in_a_row = self.under_way = 0
        self.due: list[tuple[float, int, Turn]] = []
        self._order, self._cold = count(), loop.cold()
        for delay_s, turn in loop.begin():
            self._at(self.start_s + delay_s, turn)
        self._next_cold()

    def _at(self, due_s: float, turn: Turn) -> None:
        heapq.heappush(self.due, (due_s, next(self._order), turn))

    def _next_cold(self) -> None:
        for at_s, turn in islice(self._cold, 1):
            self._at(self.start_s + at_s, turn)

    def run(self) -> None:
        while (self.due or self.under_way) and (self.most is None or self.ended < self.most) and not self.stopped:
            now_s = self.target.clock()
            if now_s >= self.end_s:
                break
            while self.due and self.due[0][0] <= now_s:
                due_s, _, turn = heapq.heappop(self.due)
                self.records.append(self.target.send(turn, due_s))
                self.under_way += 1
                if turn.cold:
                    self._next_cold()
            for turn, record in self.target.wait(min(self.end_s, self.due[0][0] if self.due else self.end_s)):
                self._end(turn, record)

    def _end(self, turn: Turn, record: Record) -> None:
        self.under_way -= 1
        self.ended += 1
        self.failed += record.error is not None
        self.in_a_row = self.in_a_row + 1 if record.error is not None else 0
        for delay_s, following in self.loop.ended(turn):
            self._at(record.end_s + delay_s, following)
        self.tell(record.end_s - self.start_s, self.ended, self.failed)
        if self.in_a_row >= HOPELESS + self.loop.live:
            self.stopped = f"{self.in_a_row} requests in a row have failed, the last one with: {record.error}"
