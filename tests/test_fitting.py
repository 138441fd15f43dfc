"""Prices from measured work."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload.fitting import relative_errors, relative_fit

WORK = [[1, a, b] for a, b in ((0, 0), (1, 10_000), (7, 300), (40, 5_000_000), (3, 0), (12, 80_000))]


@given(st.tuples(*[st.floats(1e-3, 10)] * 3))
def test_exact_work_gives_its_prices_back(prices):
    measured = [sum(price * amount for price, amount in zip(prices, row)) for row in WORK]
    assert relative_fit(WORK, measured) == pytest.approx(list(prices), rel=1e-5)
    assert relative_errors(WORK, measured, prices) == pytest.approx([0] * len(WORK), abs=1e-12)


def test_errors_are_relative_a_small_measurement_counts_as_much_as_a_large_one():
    [price] = relative_fit([[1], [1000]], [1.0, 2000.0])
    # The sum of (p - 1)^2 and (p / 2 - 1)^2 is least at p = 1.2; that of the plain squares is at 2.
    assert price == pytest.approx(1.2)


def test_fractions_of_the_fitted_meet_the_mean_of_noisy_measurements():
    noisy, work = [0.5, 1.5] * 20, [[1]] * 40
    assert relative_fit(work, noisy) == pytest.approx([0.6])  # (1/0.5 + 1/1.5) / (1/0.25 + 1/2.25)
    assert relative_fit(work, noisy, of_fitted=True) == pytest.approx([1.0])
    with pytest.raises(ValueError, match="cost nothing"):
        relative_fit([[1, 0], [0, 0]], [1.0, 1.0], of_fitted=True)


def test_a_negative_price_becomes_none_and_the_others_are_fitted_without_it():
    work, measured = [[1, 0], [1, 1], [1, 2]], [4.0, 3.0, 2.0]
    assert relative_fit(work, measured) == pytest.approx([4, -1])
    [alone] = relative_fit([[1]] * 3, measured)
    assert relative_fit(work, measured, nonnegative=True) == pytest.approx([alone, 0])


@pytest.mark.parametrize("work, measured, words", [
    ([[1, 2]], [1.0], "at least as many"),
    ([[1], [2]], [1.0], "one row each"),
    ([[1], [2]], [1.0, 0.0], "above 0"),
])
def test_what_cannot_be_fitted_is_refused(work, measured, words):
    with pytest.raises(ValueError, match=words):
        relative_fit(work, measured)
