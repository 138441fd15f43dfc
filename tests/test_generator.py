"""Invented agents: what is drawn is what was fitted, the same everywhere, and nothing is kept."""
import json
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload.agent_fit import QUANTITIES, compare, fit
from minengine.workload.closed_loop import waits
from minengine.workload.generator import AgentModel, Spread
from minengine.workload.stats import mean, percentile
from minengine.workload.traces import BESIDE_CHECKOUT, SHIPPED, Session, Subagent, TraceError, TraceRequest, leading_hits, read_agentx, write_agentx

real = pytest.mark.skipif(not (BESIDE_CHECKOUT / "agentx").is_dir(), reason="no public traces at ../shared/data")


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=80))
def test_a_spread_keeps_the_mean_and_stays_within_what_was_seen(values):
    spread = Spread.of(values, parts=max(1, len(values) // 3))
    if len(values) % len(spread.parts) == 0:
        assert spread.mean == pytest.approx(mean(values), abs=1e-3)
    rng = Random(0)
    drawn = [spread.draw(rng) for _ in range(50)]
    assert min(values) - 1e-5 <= min(drawn) and max(drawn) <= max(values) + 1e-5


def test_what_is_drawn_from_a_spread_has_its_mean_and_its_quantiles():
    rng = Random(1)
    values = [rng.random() ** 4 * 1000 for _ in range(2000)]  # most are small, a few are large
    spread, rng = Spread.of(values), Random(2)
    drawn = [spread.draw(rng) for _ in range(100_000)]
    deviation = (sum((x - spread.mean) ** 2 for x in drawn) / len(drawn) / len(drawn)) ** 0.5
    assert abs(mean(drawn) - mean(values)) < 5 * deviation
    for q in (10, 50, 90, 95):
        assert percentile(drawn, q) == pytest.approx(percentile(values, q), rel=0.1, abs=0.5)
    with pytest.raises(TraceError, match="no values"):
        Spread.of([])


def test_sessions_are_drawn_one_by_one_and_are_the_same_whatever_was_asked_before():
    model = AgentModel.shipped()
    sessions = model.sessions(1000, seed=3)
    assert len(sessions) == 1000 and sessions[7] == model.sessions(8, seed=3)[7] and sessions[7].id == "agent-3-7"
    assert sessions[-1] == sessions[999] and sessions[7] != sessions[8] != model.sessions(10, seed=4)[8]
    with pytest.raises(IndexError):
        sessions[1000]
    assert sessions[5:9:3] == [sessions[5], sessions[8]]


def test_the_same_seed_gives_the_same_numbers_on_every_machine():
    session = AgentModel.shipped().sessions(5, seed=0)[2]
    requests = session.requests
    tokens = (sum(r.input_tokens for r in requests), sum(r.output_tokens for r in requests))
    assert (len(requests), *tokens, requests[-1].start_s) == (73, 9394751, 34919, 3390.624)


@pytest.mark.parametrize("i", range(12))
def test_a_generated_session_is_one_that_a_trace_could_have_held(i, tmp_path):
    session = AgentModel.shipped().sessions(12, seed=5)[i]
    write_agentx(tmp_path / "one.jsonl", [session])  # ids fit the lengths
    (again,) = read_agentx(tmp_path / "one.jsonl")
    assert [(r.input_tokens, r.hash_ids) for r in again.requests] == [(r.input_tokens, r.hash_ids) for r in session.requests]
    for agent in session.agents:
        for before, after in zip(agent, agent[1:]):
            assert after.start_s >= before.start_s + before.api_time_s and after.think_time_s >= 0
    for (agent, number), wait in waits(session).items():  # subagents are waited for
        assert wait.gap_s >= 0 and wait.ends == (0 if (agent, number) == (0, 0) else 1) or agent == 0
    for item in session.items:
        if isinstance(item, Subagent):
            assert any(r.start_s >= item.start_s + item.duration_s for r in session.agents[0])


def test_a_model_goes_to_json_and_back():
    model = AgentModel.shipped()
    assert AgentModel.from_mapping(json.loads(json.dumps(model.mapping()))) == model == AgentModel.from_mapping(model.mapping())
    for broken in ({}, {**model.mapping(), "groups_of": 1}, {**model.mapping(), "launch_s": [[["x", 1, 2]]]}, {**model.mapping(), "session": 5}):
        with pytest.raises(TraceError, match="agent model: .*AgentModel.mapping"):
            AgentModel.from_mapping(broken)


@pytest.mark.parametrize("field, value", [("groups", "x"), ("groups", -1.0), ("block_size", 0), ("block_size", 1.5), ("group_sizes", [0]), ("answer_s", [1.0]),
                                          ("answer_s", [1.0, -1.0]), ("group_sizes", []), ("subagent", None), ("launch_s", None), ("join_s", None)])
def test_a_model_that_cannot_be_is_refused(field, value):
    with pytest.raises(TraceError, match=f"^agent model: {field}="):
        AgentModel.from_mapping({**AgentModel.shipped().mapping(), field: value})


@pytest.mark.parametrize("n, seed, complaint", [(-1, 0, "n=-1"), ("x", 0, "n='x'"), (True, 0, "n=True"), (3, "a", "seed='a'"), (3, -1, "seed=-1")])
def test_numbers_of_sessions_that_cannot_be_are_refused(n, seed, complaint):
    with pytest.raises(TraceError, match=f"sessions: {complaint}: use a whole number, 0 or more"):
        AgentModel.shipped().sessions(n, seed)


def test_fitted_to_its_own_sessions_a_model_comes_out_alike():
    model = AgentModel.shipped()
    again = fit(model.sessions(150, seed=8))
    for mine, theirs in ((model.session, again.session), (model.subagent, again.subagent)):
        for name in ("turns", "first_tokens", "output_tokens"):
            assert getattr(theirs, name).mean == pytest.approx(getattr(mine, name).mean, rel=0.25), name
        for part in (1, 5, 10, 15, 18):  # the mean hangs on a few gaps of hours
            assert theirs.gap_s.parts[part][1] == pytest.approx(mine.gap_s.parts[part][1], rel=0.25)
        assert theirs.new_tokens.mean == pytest.approx(mine.new_tokens.mean, rel=0.35)
    assert again.groups == pytest.approx(model.groups, rel=0.5) and set(again.group_sizes) == set(model.group_sizes)
    assert again.answer_s == pytest.approx(model.answer_s, rel=0.25)


def test_by_hand():
    requests = (TraceRequest(0.0, 640, 10, tuple(range(10)), 64, 2.0, 0.0), TraceRequest(5.0, 700, 20, tuple(range(10)), 64, 3.0, 3.0),
                TraceRequest(12.0, 320, 30, (0, 90, 91, 92, 93), 64, 4.0, 4.0))
    model = fit([Session("s", 64, requests)], "by hand")
    kind = model.session
    assert [spread.mean for spread in (kind.turns, kind.first_tokens, kind.output_tokens, kind.gap_s)] == [3, 640, 20, 3.5]
    assert (kind.new_tokens.mean, kind.anew_kept.mean, kind.anew_length.mean) == (50, 0.1, pytest.approx(320 / 700, abs=1e-6))
    assert kind.anew == ((640, 0.0), (700, 1.0)) and model.answer_s == (1.0, 0.1) and model.answer_ratio.mean == pytest.approx(1)
    assert (model.subagent, model.groups, model.group_sizes, model.launch_s, model.fitted) == (None, 0.0, (), None, "by hand")
    found = compare(one=[Session("s", 64, requests)])
    assert found["new_tokens"]["one"]["mean"] == pytest.approx((640 + 60 + 256) / 3) and found["ideal_hit"]["one"]["mean"] == pytest.approx(1 - 956 / 1660)
    assert found["in_flight_share_10s"]["one"] == {"mean": pytest.approx(9 / 16)} and found["gap_s"]["one"]["p50"] == 3.5
    assert set(QUANTITIES) <= set(found)


def test_what_tells_nothing_is_refused():
    alone = Session("s", 64, (TraceRequest(0.0, 64, 1, (1,), 64, 1.0, 0.0),))
    for sessions in ([], [alone]):
        with pytest.raises(TraceError, match="fit: no session has a second request"):
            fit(sessions)
    with pytest.raises(TraceError, match="none: has no sessions"):
        compare(none=[])


@real
def test_the_shipped_model_is_what_the_public_sample_gives():
    fresh = fit(read_agentx(BESIDE_CHECKOUT / "agentx"), AgentModel.shipped().fitted)
    assert json.loads(json.dumps(fresh.mapping())) == json.loads((SHIPPED.parent / "agents.json").read_text())


@real
def test_generated_agents_are_like_the_public_ones_in_what_was_fitted():
    """And in what was not: prompts grow longer in the generator, which knows of no busy and no lazy sessions."""
    found = compare(public=read_agentx(BESIDE_CHECKOUT / "agentx"), generated=AgentModel.shipped().sessions(200, seed=1))
    for name in ("output_tokens", "gap_s", "answer_s"):
        assert found[name]["generated"]["p50"] == pytest.approx(found[name]["public"]["p50"], rel=0.1), name
    assert found["turns"]["generated"]["mean"] == pytest.approx(found["turns"]["public"]["mean"], rel=0.2)
    assert found["input_tokens"]["generated"]["p50"] == pytest.approx(found["input_tokens"]["public"]["p50"], rel=0.2)
    assert found["ideal_hit"]["generated"]["mean"] == pytest.approx(found["ideal_hit"]["public"]["mean"], abs=0.03)
    assert found["in_flight_share_10s"]["generated"]["mean"] == pytest.approx(found["in_flight_share_10s"]["public"]["mean"], abs=0.06)


def test_a_hundred_sessions_pass_through_the_memory_of_a_few():
    tracemalloc.start()
    try:
        sessions = AgentModel.shipped().sessions(1 << 40, seed=2)
        ids = sum(len(r.hash_ids) for i in range(100) for r in sessions[i].requests[-1:])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ids > 100_000 and most < 30e6


def test_what_an_ideal_cache_finds_is_the_past():
    for session in AgentModel.shipped().sessions(5, seed=6):
        requests = session.agents[0]
        hits = list(leading_hits(requests))
        assert hits[0] == 0 and sum(hits) / sum(len(r.hash_ids) for r in requests) > 0.5
