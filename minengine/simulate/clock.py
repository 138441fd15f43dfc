"""Virtual time."""
from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """A clock that moves when it is told to; called, it gives seconds, as an engine's `clock` must.

    It counts whole nanoseconds: their sums are exact, so equal runs have equal stamps whatever order times are added in.
    """

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> float:
        return self.now_ns / 1e9

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, to the nearest nanosecond.

        Raises:
            ValueError: time would run backwards.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: a clock only goes forward")
        self.now_ns += round(seconds * 1e9)
