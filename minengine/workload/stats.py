"""One definition each of percentile, median and spread, used by every figure of the book."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

__all__ = ["Summary", "mean", "median", "percentile", "summary", "wilson"]


def percentile(values: Iterable[float], q: float) -> float:
    """The value below which q percent of the sorted values lie, with linear interpolation between neighbours.

    With n values, rank = q/100 * (n - 1); a fractional rank mixes the two values around it. This is the default of
    numpy and of most spreadsheets (Hyndman and Fan's type 7): q=0 is the minimum, q=100 the maximum.

    Raises:
        ValueError: no values, or q outside 0..100.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("values: is empty; a percentile needs at least one value")
    if not 0 <= q <= 100:
        raise ValueError(f"q={q}: use 0 to 100")
    rank = q / 100 * (len(ordered) - 1)
    below = min(int(rank), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Iterable[float]) -> float:
    """The 50th percentile: for an even count, halfway between the two middle values."""
    return percentile(values, 50)


def mean(values: Iterable[float]) -> float:
    """Sum over count; the sum is rounded once, so that it is the same in every Python (from 3.12 on `sum` compensates for its roundings).

    Raises:
        ValueError: no values.
    """
    ordered = list(values)
    if not ordered:
        raise ValueError("values: is empty; a mean needs at least one value")
    return math.fsum(ordered) / len(ordered)


@dataclass(frozen=True, slots=True)
class Summary:
    """A repeated measurement in one unit. The spread is the middle half, from the 25th to the 75th percentile."""

    n: int
    median: float
    low: float  # 25th percentile
    high: float  # 75th percentile
    minimum: float
    maximum: float

    def text(self, unit: str = "", scale: float = 1.0, digits: int = 1) -> str:
        """`12.3 ms (n=5, middle half 12.1 to 12.8)`; `scale` turns the values into the unit."""
        shown = [f"{value * scale:,.{digits}f}" for value in (self.median, self.low, self.high)]
        return f"{shown[0]}{' ' + unit if unit else ''} (n={self.n}, middle half {shown[1]} to {shown[2]})"


def summary(values: Iterable[float]) -> Summary:
    """Median and spread of a list of measurements.

    Raises:
        ValueError: no values.
    """
    ordered = sorted(values)
    return Summary(len(ordered), median(ordered), percentile(ordered, 25), percentile(ordered, 75), ordered[0], ordered[-1])


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The interval of a proportion seen as `right` of n independent trials (Wilson, 1927); z = 1.96 gives 95%.

    Unlike the normal approximation it stays within 0..1 and does not shrink to a point when all are right.

    Raises:
        ValueError: no trials, or more right than tried.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"right={right}, n={n}: use 0 <= right <= n with n of at least 1")
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
