"""What happens when, in whole picoseconds and in an order that hangs on nothing but the times and on who it happens to."""
from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Callable

__all__ = ["SECOND", "Agenda"]

SECOND = 10 ** 12  # picoseconds


class Agenda:
    """Two kinds of events. *News* reach somebody: a request comes, rows have landed. *Boundaries* are where an engine's step ends and the next begins.

    Of those at the same picosecond, all news happen before all boundaries; news in the order in which they were planned, boundaries in that of
    their engines. What a boundary causes elsewhere is news a picosecond later at least. So it makes no difference when a boundary was planned,
    and an engine that takes a thousand steps in one go is overtaken by nobody.
    """

    def __init__(self) -> None:
        self.now = 0
        self.num_events = 0
        self._queue: list[tuple[Any, ...]] = []
        self._planned = 0

    def seconds(self) -> float:
        """The clock of a router."""
        return self.now / SECOND

    def news(self, when: int, action: Callable[..., None], *args: Any) -> None:
        self._planned += 1
        heappush(self._queue, (when, 0, self._planned, action, args))

    def boundary(self, when: int, engine: int, version: int, action: Callable[[int], None]) -> None:
        """`action(version)` of engine number `engine`. A version is planned once."""
        heappush(self._queue, (when, 1, engine, version, action))

    def next(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._queue:
            return False
        when, kind, _, what, how = heappop(self._queue)
        if when < self.now:
            raise AssertionError(f"an event of {when} ps comes at {self.now} ps")
        self.now = when
        self.num_events += 1
        if kind:
            how(what)
        else:
            what(*how)
        return True
