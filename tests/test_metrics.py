"""Metrics and statistics, each against a case worked out by hand."""
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload import traces
from minengine.workload.metrics import (MetricError, decode_tok_s, e2e_tok_s, e2e_tok_s_user, in_flight_share, interactivity_q, itl_s,
                                        output_tok_s_gpu, ttft_s)
from minengine.workload.stats import mean, median, percentile, summary
from minengine.workload.traces import BESIDE_CHECKOUT, Session, Subagent, TraceRequest, read_agentx

real = pytest.mark.skipif(not traces._has_traces(BESIDE_CHECKOUT), reason="no public traces at ../shared/data; see minengine/workload/traces.py")
numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


# --- statistics -------------------------------------------------------------------------------------------

@given(numbers, st.floats(0, 100))
def test_percentile_is_numpys_default(values, q):
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


@given(numbers)
def test_median_is_the_standard_librarys(values):
    assert median(values) == pytest.approx(statistics.median(values), abs=1e-6)


def test_percentile_by_hand():
    assert [percentile([10, 20, 40], q) for q in (0, 25, 50, 75, 100)] == [10, 15, 20, 30, 40]
    assert percentile([7], 90) == 7
    for values, q in (([], 50), ([1], 101), ([1], -1)):
        with pytest.raises(ValueError):
            percentile(values, q)


def test_summary_says_median_count_and_middle_half():
    s = summary([0.010, 0.030, 0.020, 0.050, 0.040])
    assert (s.n, s.median, s.low, s.high, s.minimum, s.maximum) == (5, 0.030, 0.020, 0.040, 0.010, 0.050)
    assert s.text("ms", 1000) == "30.0 ms (n=5, middle half 20.0 to 40.0)"
    with pytest.raises(ValueError, match="at least one value"):
        mean([])


# --- one request ------------------------------------------------------------------------------------------

def test_one_request_by_hand():
    # first token after 2 s, 11 tokens in 4 s: 10 gaps in 2 s
    assert ttft_s(100.0, 102.0) == 2.0
    assert itl_s(4.0, 2.0, 11) == pytest.approx(0.2)
    assert decode_tok_s(itl_s(4.0, 2.0, 11)) == pytest.approx(5.0)
    assert e2e_tok_s(4.0, 11) == pytest.approx(2.75)


@pytest.mark.parametrize("call, field", [
    (lambda: ttft_s(2.0, 1.0), "first_token_s"), (lambda: itl_s(4.0, 2.0, 1), "output_tokens=1"), (lambda: itl_s(1.0, 2.0, 5), "latency_s"),
    (lambda: decode_tok_s(0.0), "itl"), (lambda: e2e_tok_s(0.0, 5), "latency_s"), (lambda: output_tok_s_gpu(5, 1.0, 0), "gpus=0"),
    (lambda: e2e_tok_s_user([], []), "at least one request"), (lambda: e2e_tok_s_user([1.0], [1, 2]), "1 and 2 entries"),
    (lambda: e2e_tok_s_user([1.0], [1], how="best"), "how='best'"), (lambda: interactivity_q([1.0, 1.0], [1, 0]), "without output"),
    (lambda: in_flight_share([], 10), "neither service time"), (lambda: in_flight_share([], -1), "gap_cap_s=-1"),
    (lambda: in_flight_share([], 1, 0), "tok_s=0"), (lambda: in_flight_share([], 1, gaps="guess"), "gaps='guess'"),
])
def test_a_metric_that_does_not_exist_is_an_error(call, field):
    with pytest.raises(MetricError, match=field):
        call()


# --- many requests ----------------------------------------------------------------------------------------

def test_two_means_of_the_same_requests():
    # 10 tokens in 1 s and 10 tokens in 9 s: the mean of 10 and 10/9 tok/s, but 20 tokens in 10 s of flight
    assert e2e_tok_s_user([1.0, 9.0], [10, 10]) == pytest.approx((10 + 10 / 9) / 2)
    assert e2e_tok_s_user([1.0, 9.0], [10, 10], how="pooled") == pytest.approx(2.0)


def test_interactivity_takes_the_percentile_before_it_inverts():
    latencies, outputs = [1.0, 2.0, 3.0, 4.0, 10.0], [10] * 5  # 0.1, 0.2, 0.3, 0.4, 1.0 s a token
    assert interactivity_q(latencies, outputs, 50) == pytest.approx(1 / 0.3)
    assert interactivity_q(latencies, outputs) == pytest.approx(1 / (0.4 + 0.6 * 0.6))  # P90 lies 0.6 of the way from 0.4 to 1.0
    assert interactivity_q(latencies, outputs) < min(10.0, 5.0)  # the slow tail, not the fast one


def test_output_per_gpu_counts_every_gpu():
    assert output_tok_s_gpu(24_000, 10.0, 24) == pytest.approx(100.0)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 1000)), min_size=1, max_size=30))
def test_throughput_over_pooled_speed_is_the_mean_in_flight(requests):
    """Little's law, on requests laid one after the other with any gaps: busy time over the whole time."""
    latencies, outputs = [latency for latency, _ in requests], [n for _, n in requests]
    whole = sum(latencies) * 3
    throughput = sum(outputs) / whole
    assert throughput / e2e_tok_s_user(latencies, outputs, how="pooled") == pytest.approx(sum(latencies) / whole)


# --- in flight --------------------------------------------------------------------------------------------

def request(start_s, output, api=None, think=None):
    return TraceRequest(start_s, 64, output, (1,), 64, api, think)


def test_in_flight_share_by_hand():
    helper = Subagent("x", 1.0, 3.0, (request(1.0, 100, 3.0, 0.0),))
    own = request(0.0, 200, 5.0, 0.0), request(25.0, 100, 2.0, 20.0)
    sessions = [Session("a", 64, (*own, helper)), Session("b", 64, (request(0.0, 0, None, None),))]
    assert in_flight_share(sessions, math.inf) == pytest.approx(10 / (10 + 20))
    assert in_flight_share(sessions, 10) == pytest.approx(10 / (10 + 10))
    assert in_flight_share(sessions, 10, tok_s=100) == pytest.approx(4 / (4 + 10))
    assert in_flight_share(sessions, 0) == 1.0


def test_bounded_gaps_fit_between_the_two_starts():
    # the second request has no api_time, so the third's think time is counted from the first one's end
    agent = (request(0.0, 1, 5.0, 0.0), request(15.0, 1, None, 10.0), request(35.0, 1, 5.0, 30.0))
    sessions = [Session("a", 64, agent)]
    assert in_flight_share(sessions, math.inf) == pytest.approx(10 / (10 + 40))
    assert in_flight_share(sessions, math.inf, gaps="bounded") == pytest.approx(10 / (10 + 10 + 20))


@real
def test_in_flight_share_of_the_public_sessions_at_the_two_caps():
    sessions = list(read_agentx(BESIDE_CHECKOUT / "agentx"))
    assert round(in_flight_share(sessions, 10, tok_s=101), 2) == 0.39
    assert round(in_flight_share(sessions, 300, tok_s=101), 2) == 0.09
