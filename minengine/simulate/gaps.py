"""Gaps between neighbouring tokens of all answers, counted by length: what no mean of a request shows."""
from __future__ import annotations

from collections import Counter

from .agenda import SECOND

__all__ = ["Gaps"]

WIDTH = SECOND // 100_000  # 10 microseconds


class Gaps:
    """How many gaps of each length, to 10 microseconds."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, gap: int, times: int = 1) -> None:
        self.counts[gap // WIDTH] += times

    def copy(self) -> Gaps:
        found = Gaps()
        found.counts.update(self.counts)
        return found

    def percentile_s(self, q: float) -> float | None:
        """The shortest length that q percent of the gaps do not exceed, rounded down to 10 microseconds; None if there is no gap."""
        wanted, seen = q / 100 * sum(self.counts.values()), 0
        for length, count in sorted(self.counts.items()):
            seen += count
            if seen >= wanted:
                return length * WIDTH / SECOND
        return None
