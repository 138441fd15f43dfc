"""A circuit breaker: a worker that keeps failing gets nothing for a while, then one request to prove itself.

    closed     it gets requests; failures are counted
    open       it gets none, until its cool-off is over
    half_open  it gets one, its trial: that ends well -> closed; it fails -> open again, for twice as long
"""
from __future__ import annotations

from collections import deque
from math import inf
from typing import Callable, Literal

__all__ = ["Breaker", "State"]

State = Literal["closed", "open", "half_open"]


class Breaker:
    """One worker's. `clock` gives seconds; the state follows from it and from what was told."""

    def __init__(self, clock: Callable[[], float], failure_threshold: int = 3, failure_window_s: float = 30.0, cool_off_s: float = 5.0,
                 max_cool_off_s: float = 60.0) -> None:
        self._clock = clock
        self.failure_threshold, self.failure_window_s = failure_threshold, failure_window_s
        self.cool_off_s, self.max_cool_off_s = cool_off_s, max(cool_off_s, max_cool_off_s)
        self._failures: deque[float] = deque()  # when, oldest first
        self._open_until_s: float | None = None  # None: closed; `inf`: until somebody says that the worker is well
        self._next_cool_off_s = cool_off_s
        self.trial: str | None = None  # the request that is it

    @property
    def state(self) -> State:
        if self._open_until_s is None:
            return "closed"
        return "half_open" if self._clock() >= self._open_until_s else "open"

    @property
    def lets_through(self) -> bool:
        """Whether the worker may get a request now."""
        return self.state == "closed" or self.needs_trial

    @property
    def needs_trial(self) -> bool:
        return self.state == "half_open" and self.trial is None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until a trial may start; 0 when requests pass; None: nobody knows (sick, or a trial is under way)."""
        if self.lets_through:
            return 0.0
        if self._open_until_s == inf or self.trial is not None:
            return None
        return max(0.0, self._open_until_s - self._clock())

    def sent(self, request_id: str) -> bool:
        """A request goes to the worker. True: it is the trial."""
        if self.needs_trial:
            self.trial = request_id
            return True
        return False

    def succeeded(self, request_id: str) -> None:
        """A request did well. Only the trial closes an open breaker: what was sent before it opened proves nothing."""
        if self.trial == request_id:
            self.trial = self._open_until_s = None
            self._failures.clear()
            self._next_cool_off_s = self.cool_off_s

    def dropped(self, request_id: str) -> None:
        """A request ended and says nothing of the worker; if it was the trial, another may be it."""
        if self.trial == request_id:
            self.trial = None

    def failed(self, request_id: str | None = None) -> None:
        """The worker failed, with this request or by itself."""
        now_s = self._clock()
        self._failures.append(now_s)
        while self._failures[0] < now_s - self.failure_window_s:
            self._failures.popleft()
        if self._open_until_s is None:
            if len(self._failures) >= self.failure_threshold:
                self._open(now_s)
        elif request_id is None or self.trial == request_id:  # late failures of what was sent before it opened prolong nothing
            if self.state == "half_open":
                self._open(now_s)

    def sick(self) -> None:
        """Open at once and until `well`: it does not answer at all."""
        self.trial, self._open_until_s = None, inf

    def well(self) -> None:
        """A sick worker answers again: it may have its trial now. Says nothing of one that is open for its failures."""
        if self._open_until_s == inf:
            self._open_until_s = self._clock()

    def _open(self, now_s: float) -> None:
        self.trial, self._open_until_s = None, now_s + self._next_cool_off_s
        self._next_cool_off_s = min(self.max_cool_off_s, 2 * self._next_cool_off_s)
        self._failures.clear()
