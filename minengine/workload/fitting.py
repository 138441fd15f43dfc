"""Prices of measured work: what each kind of it costs, so that the sums come close to what was measured."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["relative_errors", "relative_fit"]

ROUNDS = 10  # of fitting again: the weights have settled long before


def relative_fit(work: Sequence[Sequence[float]], measured: Sequence[float], *, nonnegative: bool = False, of_fitted: bool = False) -> list[float]:
    """Least squares of the relative errors: prices p with `work @ p` near `measured`, where a small measurement counts as much as a large one.

    Args:
        work: (samples, kinds) amounts.
        measured: (samples,) more than 0.
        nonnegative: a kind that would get a negative price gets 0, and the others are fitted again, the most negative one first.
        of_fitted: errors are fractions of what is fitted, not of what was measured: with noisy measurements the fit then meets their mean, where
            it lies below it otherwise, since a measurement that came out small weighs more. Found by fitting again with the last fit's weights.

    Raises:
        ValueError: fewer samples than kinds, lists of different lengths, or a measurement that is not above 0.
    """
    amounts, values = np.asarray(work, dtype=float), np.asarray(measured, dtype=float)
    if amounts.ndim != 2 or len(amounts) != len(values) or len(amounts) < amounts.shape[1]:
        raise ValueError(f"work: has the shape {amounts.shape} for {len(values)} measurements; give one row each, and at least as many as kinds")
    if not (values > 0).all():
        raise ValueError("measured: a relative error needs values above 0")
    scale = np.where(amounts.max(axis=0) > 0, amounts.max(axis=0), 1.0)  # seconds a byte beside seconds a step: else nothing small survives
    prices = _solve(amounts, scale, values, values, nonnegative)
    if of_fitted:
        for _ in range(ROUNDS):
            fitted = amounts @ prices
            if not (fitted > 0).all():
                raise ValueError("work: some of it would cost nothing; fit with fractions of what was measured")
            prices = _solve(amounts, scale, values, fitted, nonnegative)
    return prices.tolist()


def _solve(amounts: np.ndarray, scale: np.ndarray, values: np.ndarray, over: np.ndarray, nonnegative: bool) -> np.ndarray:
    """Prices with the least sum of ((amounts @ prices - values) / over)^2."""
    kinds, prices = list(range(amounts.shape[1])), np.zeros(amounts.shape[1])
    while kinds:
        solved = np.linalg.lstsq(amounts[:, kinds] / scale[kinds] / over[:, None], values / over, rcond=None)[0]
        if not nonnegative or solved.min() >= 0:
            prices[kinds] = solved / scale[kinds]
            break
        kinds.pop(int(solved.argmin()))
    return prices


def relative_errors(work: Sequence[Sequence[float]], measured: Sequence[float], prices: Sequence[float]) -> list[float]:
    """How far each sum of priced work lies from what was measured, as a fraction of it."""
    return (np.asarray(work, dtype=float) @ np.asarray(prices, dtype=float) / np.asarray(measured, dtype=float) - 1).tolist()
