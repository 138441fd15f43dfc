"""Which deployment wins at a bar, and what its tokens cost."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.arithmetic import at_bar, frontier, gpu_hours_per_million, gpus, total_tok_s

AMOUNT = st.floats(0.1, 1000)
CURVE = st.lists(st.tuples(st.integers(1, 500), AMOUNT, AMOUNT), max_size=12, unique_by=lambda point: point[0]).map(sorted)


def test_the_article_s_point_in_gpu_hours():
    tokens_an_hour = 3600 * total_tok_s(100, gpus("DEP8", "TP4", 4))
    assert gpu_hours_per_million(100) == pytest.approx(24 * 1e6 / tokens_an_hour) == pytest.approx(2.7778, abs=1e-4)


def test_two_prefill_engines_count_twice():
    assert gpus("DEP8", "TP4", 7, prefills=2) == 44


def test_between_two_points_a_curve_is_a_straight_line():
    curve = [(32, 120.0, 60.0), (64, 104.0, 90.0), (96, 96.0, 110.0)]
    assert at_bar(curve, 100) == (80, 100, False)
    assert at_bar(curve, 104) == (64, 90, False)  # a point that meets the bar exactly is the last that does
    assert at_bar(curve, 96) == (96, 110, True)
    assert at_bar(curve, 121) is None and at_bar([], 1) is None


@given(CURVE, AMOUNT)
def test_what_a_curve_carries_lies_on_it_and_meets_the_bar(curve, bar):
    found = at_bar(curve, bar)
    assert (found is None) == all(user < bar for _, user, _ in curve)
    if found is None:
        return
    at, last = next((i, point) for i, point in reversed(list(enumerate(curve))) if point[1] >= bar)
    assert found.open == (at == len(curve) - 1)
    after = curve[at] if found.open else curve[at + 1]
    for value, ends in ((found.sessions, (last[0], after[0])), (found.tok_s_gpu, (last[2], after[2]))):
        assert min(ends) - 1e-9 <= value <= max(ends) + 1e-9
    if not found.open:  # on the straight line, where that is as fast as the bar
        way = (found.sessions - last[0]) / (after[0] - last[0])
        assert last[1] + way * (after[1] - last[1]) == pytest.approx(bar)


@given(st.lists(st.tuples(AMOUNT, AMOUNT), max_size=20))
def test_no_point_beats_one_of_the_frontier_and_each_other_one_is_beaten(points):
    best = frontier(points)
    assert [points[i] for i in best] == sorted((points[i] for i in best), key=lambda point: -point[0])

    def beaten(i):
        return any(points[j][0] >= points[i][0] and points[j][1] >= points[i][1] and points[j] != points[i] for j in range(len(points)))

    assert not any(map(beaten, best))
    assert {points[i] for i in range(len(points)) if not beaten(i)} == {points[i] for i in best} and len(set(best)) == len(best)
