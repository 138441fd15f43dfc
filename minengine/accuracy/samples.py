"""How many questions a difference of two scores needs, and what a printed score says about its questions. Pure Python.

Normal approximations throughout (Fleiss, Levin and Paik 2003): good where some tens of questions go wrong, a guide elsewhere.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist

__all__ = ["Decoded", "detectable", "noise", "questions", "sample_size"]

MOST_RUNS = 64


@dataclass(frozen=True)
class Decoded:
    """A score in percent as questions answered right."""

    right: float  # mean over the runs
    n: int  # questions of a run
    runs: int | None  # the fewest runs whose mean, rounded as printed, is the score; None: no number up to 64 fits


def questions(score_pct: float, n: int, digits: int = 2) -> Decoded:
    """How many of n questions a score is, and how many runs must have been averaged to give it.

    99.09% of 164 is 162.5: no single run gives it, the mean of two does. A score that one run explains may still be a mean of several.

    Args:
        score_pct: as printed, with `digits` decimals.

    Raises:
        ValueError: a score outside 0..100, or no questions.
    """
    if not 0 <= score_pct <= 100 or n < 1:
        raise ValueError(f"score_pct={score_pct}, n={n}: use 0 to 100 percent of at least 1 question")
    half = 0.5 * 10**-digits + 1e-9  # of the last printed digit
    for runs in range(1, MOST_RUNS + 1):
        right = round(score_pct / 100 * n * runs)
        if abs(100 * right / (n * runs) - score_pct) <= half:
            return Decoded(right / runs, n, runs)
    return Decoded(score_pct / 100 * n, n, None)


def sample_size(p: float, difference: float, *, discordant: float | None = None, power: float = 0.8, alpha: float = 0.05) -> int:
    """Questions that tell p + difference from p: with that power, by a two-sided test at level alpha.

    Args:
        p, difference: as shares, so 0.0135 is 1.35 points.
        discordant: None: two independent sets of n questions each. A share: both answer the same n questions, and this share of them
            comes out right for one and wrong for the other, at least |difference| (McNemar's test; Connor 1987).

    Raises:
        ValueError: no difference, a share outside 0..1, or fewer discordant questions than the difference makes.
    """
    _check(p, discordant, power, alpha)
    if not difference or not 0 <= p + difference <= 1:
        raise ValueError(f"difference={difference}: use one other than 0, with p + difference of 0 to 1")
    if discordant is not None and discordant < abs(difference):
        raise ValueError(f"discordant={discordant}: a difference of {difference} makes at least {abs(difference)} of the questions discordant")
    return ceil(_needed(p, difference, discordant, power, alpha))


def detectable(p: float, n: int, *, discordant: float | None = None, power: float = 0.8, alpha: float = 0.05) -> float | None:
    """The least drop below p that n questions (a side) tell: the inverse of `sample_size`. None: not even a drop as large as there can be.

    Raises:
        ValueError: as `sample_size`.
    """
    _check(p, discordant, power, alpha)
    if n < 1:
        raise ValueError(f"n={n}: use at least 1")
    low, high = 0.0, p if discordant is None else min(p, discordant)
    if high == 0 or _needed(p, -high, discordant, power, alpha) > n:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _needed(p, -middle, discordant, power, alpha) <= n else (middle, high)
    return high


def noise(p: float, n: int, runs: int = 1) -> float:
    """Half the 95% interval of the difference of two scores that are truly alike, each of n questions of its own in `runs` runs.

    Two scores over the same questions scatter less, since a question that is hard for one is hard for the other: of one run each this is
    the most that chance can do. Further runs count as new questions, which is the most that they can be worth.
    """
    _check(p)
    if n < 1 or runs < 1:
        raise ValueError(f"n={n}, runs={runs}: use at least 1")
    return NormalDist().inv_cdf(0.975) * sqrt(2 * p * (1 - p) / (n * runs))


def _needed(p: float, difference: float, discordant: float | None, power: float, alpha: float) -> float:
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    if discordant is not None:
        return ((z_alpha * sqrt(discordant) + z_power * sqrt(discordant - difference**2)) / difference) ** 2
    other, mean = p + difference, p + difference / 2
    return ((z_alpha * sqrt(2 * mean * (1 - mean)) + z_power * sqrt(p * (1 - p) + other * (1 - other))) / difference) ** 2


def _check(p: float, discordant: float | None = None, power: float = 0.8, alpha: float = 0.05) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: use a share of 0 to 1")
    for name, value in (("discordant", discordant), ("power", power), ("alpha", alpha)):
        if value is not None and not 0 < value < 1:
            raise ValueError(f"{name}={value}: use a share between 0 and 1")
