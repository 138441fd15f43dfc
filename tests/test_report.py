"""Records of a replay and the report of them, against cases worked out by hand."""
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload.closed_loop import Turn
from minengine.workload.metrics import MetricError
from minengine.workload.report import DEFINITIONS, FEW, Record, Slo, few_requests, report, table
from minengine.workload.traces import TraceRequest


def record(arrival_s, first_s, end_s, output, **more):
    return Record(session="s#0", agent=0, number=0, arrival_s=arrival_s, first_token_s=first_s, end_s=end_s, input_tokens=100, output_tokens=output, **more)


# In a window of 10 s: 11 tokens in 4 s, of which 2 s to the first; 10 tokens in 1 s; one that failed; one that is not over.
A = record(0.0, 2.0, 4.0, 11, admitted_s=0.5, cached_tokens=60, num_hits_by_tier={"device": 50, "host": 10})
B = record(5.0, 5.1, 6.0, 10, admitted_s=5.0, cached_tokens=0)
FAILED = record(2.0, None, 7.0, 0, error="the server is busy")
OPEN = record(8.0, 9.0, None, 3)


def test_by_hand():
    found = report([A, B, FAILED, OPEN], 10.0, gpus=2, slo=Slo(ttft_s=1.0, e2e_tok_s=2.0))
    expected = {
        "requests": 2, "failed": 1, "input_tokens_mean": 100, "output_tokens_mean": 10.5,
        "ttft_s_mean": 1.05, "ttft_s_p50": 1.05, "ttft_s_p90": 0.1 + 0.9 * 1.9, "queue_s_mean": 0.25,
        "itl_s_mean": 0.15, "itl_s_p50": 0.15,  # 2 s / 10 gaps, 0.9 s / 9
        "e2e_tok_s_user": (11 / 4 + 10) / 2, "e2e_tok_s_user_pooled": 21 / 5,
        "decode_tok_s_user": (5 + 10) / 2, "decode_tok_s_user_p90": 1 / 0.19, "e2e_interactivity_p90": 1 / (0.1 + 0.9 * (4 / 11 - 0.1)),
        "output_tok_s": 2.1, "output_tok_s_gpu": 1.05, "goodput_req_s": 0.1, "goodput_share": 1 / 3,
        "hit_rate": 0.3, "hit_rate_device": 0.25, "hit_rate_host": 0.05,
        "in_flight_mean": (4 + 1 + 5 + 2) / 10, "in_flight_most": 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert set(found) == set(DEFINITIONS) | {"hit_rate_device", "hit_rate_host"}


def test_a_request_belongs_to_the_window_in_which_it_ends():
    assert [report([A, B], 2.0, start_s=start_s)["requests"] for start_s in (0.0, 2.0, 4.0, 5.0, 6.0)] == [0, 1, 1, 1, 0]
    assert report([A, B], 2.0, start_s=1.0)["in_flight_mean"] == 1.0  # under way though it ends later
    assert report([A], 2.0, start_s=9.0)["in_flight_mean"] == 0.0


def test_what_no_request_has_is_none_and_never_zero():
    nothing = report([], 10.0)
    assert (nothing["requests"], nothing["output_tok_s"], nothing["in_flight_mean"]) == (0, 0.0, 0.0)
    assert all(nothing[name] is None for name in ("ttft_s_p50", "itl_s_mean", "e2e_tok_s_user", "hit_rate", "goodput_share", "queue_s_p99"))
    one_token = report([record(0.0, 1.0, 1.0, 1)], 10.0, slo=Slo(itl_s=0.001))
    assert one_token["itl_s_mean"] is one_token["decode_tok_s_user"] is None and one_token["goodput_share"] == 1.0
    assert report([A], 10.0)["goodput_req_s"] is None


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.integers(1, 99)), min_size=1, max_size=30))
def test_littles_law_on_a_window_that_holds_all(requests):
    """Tokens a second over the pooled speed is the mean in flight, whatever overlaps."""
    found = report([record(at, at + latency / 2, at + latency, n) for at, latency, n in requests], 100.0)
    assert found["output_tok_s"] / found["e2e_tok_s_user_pooled"] == pytest.approx(found["in_flight_mean"])
    assert 1 <= found["in_flight_most"] <= len(requests) and found["in_flight_most"] >= found["in_flight_mean"] - 1e-9


def test_records_go_to_json_and_back_and_begin_with_their_turn():
    for one in (A, B, FAILED, OPEN, replace(A, cold=True)):
        assert Record.from_json(one.to_json()) == one and "\n" not in one.to_json()
    turn = Turn(TraceRequest(0.0, 640, 5, tuple(range(10)), 64), "x#2", 1, 7)
    assert Record.of(turn, 3.0) == Record(session="x#2", agent=1, number=7, arrival_s=3.0, input_tokens=640)


def test_percentiles_of_few_requests_are_told_of():
    assert few_requests({"engine": {"requests": 2}, "server": {"requests": FEW}, "simulator": {"requests": 0}}) == (
        "Few requests (engine 2, simulator 0): the P99 of fewer than 100 is little else than the largest value.")
    assert few_requests({"engine": {"requests": FEW}}) is None


def test_the_table_has_reports_side_by_side_with_their_definitions():
    lines = table({"engine": report([A, B], 10.0), "simulator": report([B], 10.0)}).splitlines()
    assert lines[0].split() == ["metric", "engine", "simulator", "unit", "definition"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows["e2e_tok_s_user"].split()[1:4] == ["6.375", "10", "tok/s"] and "the article's" in rows["e2e_tok_s_user"]
    assert rows["hit_rate_device"].split()[1:3] == ["0.25", "-"] and "device cache" in rows["hit_rate_device"]
    assert list(rows).index("hit_rate_device") == list(rows).index("hit_rate") + 1
    assert "goodput_req_s" not in rows and all(len(line) == len(line.rstrip()) for line in lines)


@pytest.mark.parametrize("call, field", [
    (lambda: report([], 0.0), "duration_s=0.0"), (lambda: report([], 1.0, gpus=0), "gpus=0"), (lambda: Slo(ttft_s=0), "slo ttft_s=0"),
    (lambda: report([record(2.0, 1.0, 3.0, 5)], 10.0), "first_token_s=1.0"), (lambda: report([record(0.0, 2.0, 1.0, 5)], 10.0), "latency_s=1.0"),
])
def test_what_cannot_be_is_an_error(call, field):
    with pytest.raises(MetricError, match=field):
        call()
