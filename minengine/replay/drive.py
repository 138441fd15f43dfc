"""The replay itself: turns from the closed loop go to a target when they are due, and what has ended sets the next ones free."""
from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
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


def replay(loop: ClosedLoop, target: Target, duration_s: float, *, most: int | None = None,
           tell: Callable[[float, int, int], None] = lambda now_s, ended, failed: None) -> Replay:
    """Replay until the time is over, `most` requests have ended, or nothing is left. A request that fails is recorded with its error, and its
    session goes on; what is under way at the end stays without an end. Ctrl-C ends it too, with what there is.

    Args:
        tell: told after each end: seconds since the beginning, requests that have ended, those of them that failed.
    """
    start_s, order = target.clock(), count()
    records: list[Record] = []
    ended = failed = in_a_row = under_way = 0
    cold = loop.cold()
    due = [(start_s + delay_s, next(order), turn) for delay_s, turn in loop.begin()]
    due += [(start_s + at_s, next(order), turn) for at_s, turn in _next(cold)]
    heapq.heapify(due)
    stopped = None
    try:
        while (due or under_way) and (most is None or ended < most):
            now_s = target.clock()
            if now_s >= start_s + duration_s:
                break
            while due and due[0][0] <= now_s:
                due_s, _, turn = heapq.heappop(due)
                records.append(target.send(turn, due_s))
                under_way += 1
                if turn.cold:
                    for at_s, following in _next(cold):
                        heapq.heappush(due, (start_s + at_s, next(order), following))
            for turn, record in target.wait(min([start_s + duration_s, *(at_s for at_s, _, _ in due[:1])])):
                under_way -= 1
                ended += 1
                failed += record.error is not None
                in_a_row = in_a_row + 1 if record.error is not None else 0
                for delay_s, following in loop.ended(turn):
                    heapq.heappush(due, (record.end_s + delay_s, next(order), following))
                tell(record.end_s - start_s, ended, failed)
                if in_a_row >= HOPELESS + loop.live:
                    stopped = f"{in_a_row} requests in a row have failed, the last one with: {record.error}"
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    seconds = min(target.clock() - start_s, duration_s)
    target.close()  # from here on nobody writes to the records
    for record in records:
        for name in ("arrival_s", "admitted_s", "first_token_s", "end_s"):
            if getattr(record, name) is not None:
                setattr(record, name, getattr(record, name) - start_s)
    return Replay(target.label, records, seconds, stopped)


def _next(cold) -> list[tuple[float, Turn]]:
    """The next arrival from outside, if there are any."""
    arrival = next(cold, None)
    return [] if arrival is None else [arrival]
