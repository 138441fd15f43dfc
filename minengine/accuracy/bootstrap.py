"""Means and paired differences with 95% intervals, where questions about one context are not independent.

Two formats answer the same questions, so their difference is taken question by question: what makes a question hard for both
drops out. The interval comes from drawing contexts, not questions, again with replacement (a cluster bootstrap; Efron 1979,
Field and Welsh 2007): fifty questions about one text share that text's luck.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["Estimate", "Outcomes", "difference", "interval"]

RESAMPLES = 10_000
TAIL = 0.025  # on each side of a 95% interval


@dataclass(frozen=True)
class Outcomes:
    """One number a question, context by context: 1 or 0 for an answer, nats for a token, tokens for a continuation."""

    by_context: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, values: Sequence[float], per_context: int) -> Outcomes:
        """Questions in order, `per_context` of each context."""
        if per_context < 1 or not len(values) or len(values) % per_context:
            raise ValueError(f"per_context={per_context}: must divide the {len(values)} values")
        return cls(tuple(tuple(map(float, values[i: i + per_context])) for i in range(0, len(values), per_context)))

    @cached_property
    def values(self) -> np.ndarray:
        """(n,) all of them, in order."""
        return np.concatenate([np.asarray(one, np.float64) for one in self.by_context])

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.by_context))

    @property
    def contexts(self) -> int:
        return len(self.by_context)

    @property
    def n(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return float(self.values.mean())


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, with its 95% interval."""

    value: float
    low: float
    high: float
    n: int  # questions
    contexts: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g}, {self.n:,} questions of {self.contexts} contexts)"


def interval(outcomes: Outcomes, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """The mean over all questions, and between which means 95% of the resamples fall. A single context has no interval: it is refused."""
    return _estimate(outcomes.values, outcomes.counts, resamples, seed)


def difference(ours: Outcomes, baseline: Outcomes, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Mean of ours - baseline, question by question.

    Where no question differs, a bootstrap has nothing to draw from. Answers (1 or 0) then get the interval in which n independent
    questions without a difference leave their share, 1 - 0.025^(1/n) on both sides: somewhat too narrow if a context's questions hang together.

    Raises:
        ValueError: not the same contexts and questions, or fewer than two contexts.
    """
    if ours.counts != baseline.counts:
        raise ValueError(f"ours and baseline must hold the same questions; got {ours.n} of {ours.contexts} contexts and "
                         f"{baseline.n} of {baseline.contexts}")
    found = _estimate(ours.values - baseline.values, ours.counts, resamples, seed)
    answers = np.isin(ours.values, (0.0, 1.0)).all()
    if answers and np.array_equal(ours.values, baseline.values):
        edge = 1 - TAIL ** (1 / found.n)
        return Estimate(0.0, -edge, edge, found.n, found.contexts)
    return found


def _estimate(values: np.ndarray, counts: Sequence[int], resamples: int,
              seed: int) -> Estimate:
    """values (n,), counts (C,) questions of each context.

    A resample is C contexts drawn with replacement, its mean one over their questions.
    """
    if len(counts) < 2 or min(counts) < 1 or resamples < 1:
        raise ValueError(f"{len(counts)} contexts: use at least two, each with a "
                         "question, and at least one resample")
    counts = np.asarray(counts)
    totals = np.add.reduceat(values, np.cumsum(counts) - counts)  # (C,)
    # Contexts alike in total and count are drawn as one kind: the same resamples,
    # whatever the contexts' order, and far fewer numbers.
    pairs = np.stack((totals, counts), axis=1)  # (C, 2)
    kinds, alike = np.unique(pairs, axis=0, return_counts=True)  # (K, 2), (K,)
    draw = np.random.default_rng(seed)
    drawn = draw.multinomial(len(counts), alike / len(counts), resamples)  # (resamples, K)
    means = (drawn @ kinds[:, 0]) / (drawn @ kinds[:, 1])
    low, high = np.quantile(means, (TAIL, 1 - TAIL))
    return Estimate(float(values.mean()), float(low), float(high), int(counts.sum()),
                    len(counts))
