"""The cluster's simulator: nothing gets lost, the same run is the same, and steps taken in one go are the steps taken one by one."""
import json
from dataclasses import asdict
from random import Random

import pytest
from hypothesis import given, settings, strategies as st
from sim_scenes import SIZE, StandIn, deployment, sessions

from minengine.config import ConfigError
from minengine.kv.blocks import BlockPool
from minengine.request import Request, SamplingParams
from minengine.schedule import Scheduler
from minengine.simulate import Deployment, simulate
from minengine.simulate.agenda import SECOND, Agenda
from minengine.simulate.engines import work_of
from minengine.simulate.stretch import Span, leader
from minengine.simulate.work import attended
from minengine.workload.closed_loop import ClosedLoop
from minengine.workload.sessions import Session, TraceRequest

KINDS = {
    "one engine": {"topology": "TP1"},
    "one engine, small pool": {"topology": "TP1", "cached_tokens": 36 * SIZE, "max_num_seqs": 8},
    "data ranks": {"topology": "DEP4", "cached_tokens": 40 * SIZE},
    "a tier": {"topology": "TP1", "engines": 2, "cached_tokens": 40 * SIZE, "host_tier_bytes": 10 ** 9},
    "apart": {"prefill": "DEP2", "prefills": 1, "decode": "TP2", "decoders": 2},
    "apart, small pools": {"prefill": "DEP2", "prefills": 2, "decode": "DEP2", "decoders": 2, "cached_tokens": 32 * SIZE, "max_num_seqs": 3},
    "apart, a tier": {"prefill": "TP2", "decode": "TP4+DCP2", "decoders": 1, "prefill_cached_tokens": 33 * SIZE, "host_tier_bytes": 10 ** 8},
}


def run(kind="apart", seed=0, how=None, **options):
    options = {"concurrency": 3, "duration_s": 12.0, "warm_s": 3.0, "gap_cap_s": 1.0, "costs": StandIn, **options}
    return simulate(deployment(**{**KINDS[kind], **(how or {})}), sessions(seed), seed=seed, **options)


def outcome(result):
    """All that a run came to, but how many events the simulator went through."""
    counts = {name: value for name, value in result.counts.items() if name != "events"}
    engines = {name: {what: n for what, n in each.items() if what != "events"} for name, each in result.engines.items()}
    return json.dumps([counts, engines, result.metrics, [asdict(record) for record in result.records], sorted(result.gaps.counts.items()), result.digest])


# --- in one go, and one by one -----------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10 ** 6), admission=st.sampled_from(["poll", "event"]),
       concurrency=st.integers(1, 9), policy=st.sampled_from(["kv_aware", "round_robin", "random"]))
def test_steps_in_one_go_are_the_steps_one_by_one(kind, seed, admission, concurrency, policy):
    how = {"load_admission": admission, "router_policy": policy}
    options = {"concurrency": concurrency, "cold_per_s": 0.3, "cold_tokens": 100, "cold_output_tokens": 20, "start_within_s": 1.0}
    one = run(kind, seed, how, stretch=False, **options)
    several = run(kind, seed, how, **options)
    assert outcome(one) == outcome(several)
    assert several.counts["events"] <= one.counts["events"]


def test_another_rank_becomes_the_slowest_in_the_middle_of_a_stretch():
    """One rank has one long answer, another three short ones, which grow faster and overtake it."""
    class Lengths(StandIn):
        def rank_ps(self, works):
            return [10 ** 6 + 1000 * work.context for work in works]

    def turn(tokens, output):
        return Session(f"{tokens}", SIZE, (TraceRequest(0.0, tokens, output, tuple(range(tokens // SIZE)), SIZE),))

    together = [turn(320, 300), turn(48, 300), turn(49, 1), turn(50, 300), turn(51, 1), turn(52, 300)]  # they go to the two ranks in turn
    runs = [simulate(deployment(topology="DEP2", max_num_seqs=8, cached_tokens=4000, max_num_batched_tokens=1000), iter(together), concurrency=6,
                     duration_s=1.0, costs=Lengths, stretch=stretch) for stretch in (False, True)]
    assert outcome(runs[0]) == outcome(runs[1]) and runs[1].counts["events"] * 3 < runs[0].counts["events"]


def test_few_events_for_many_steps():
    one, several = run("one engine", concurrency=1, stretch=False), run("one engine", concurrency=1)
    assert several.counts["events"] * 3 < one.counts["events"] and one.counts["steps"] == several.counts["steps"] > 100


@given(start=st.integers(0, 10 ** 9), first=st.integers(1, 10 ** 6), growth=st.integers(0, 10 ** 4), steps=st.integers(1, 200), data=st.data())
def test_a_span_is_the_sum_of_its_steps(start, first, growth, steps, data):
    span, ends = Span(start, first, growth, steps), [start]
    for i in range(steps):
        ends.append(ends[-1] + first + i * growth)
    assert [span.end(n) for n in range(steps + 1)] == ends
    before = data.draw(st.integers(0, ends[-1] + 10))
    assert span.over(before) == sum(end < before for end in ends[1:steps])
    low = data.draw(st.integers(0, steps))
    counted = {}
    for quotient, count in span.equal(low, steps, 997):
        counted[quotient] = counted.get(quotient, 0) + count
    expected = {}
    for i in range(low, steps):
        expected[span.took(i) // 997] = expected.get(span.took(i) // 997, 0) + 1
    assert counted == expected


@given(st.lists(st.tuples(st.integers(1, 10 ** 6), st.integers(0, 1000)), min_size=1, max_size=8))
def test_the_slowest_rank_is_known_until_another_is_slower(ranks):
    now, growth = zip(*ranks)
    slowest, steps = leader(now, growth)
    for i in (0, 1, steps // 2, steps - 1):
        if i < steps:
            assert now[slowest] + i * growth[slowest] == max(a + i * b for a, b in ranks)
    if steps < 10 ** 6:
        assert now[slowest] + steps * growth[slowest] < max(a + steps * b for a, b in ranks), "it could have gone on"


@given(st.integers(0, 50), st.integers(0, 50), st.one_of(st.none(), st.integers(1, 40)))
def test_rows_attended_to(start, tokens, most):
    assert attended(start, tokens, most) == sum(min(start + i, most or 10 ** 9) for i in range(1, tokens + 1))


# --- the engine ------------------------------------------------------------------------------------------------

@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10 ** 6), concurrency=st.integers(1, 5), blocks=st.integers(40, 80))
def test_one_engine_is_the_engines_scheduler_over_blocks(seed, concurrency, blocks):
    """A loop over `Scheduler` and `BlockPool` with token ids, written out here, has the same stamps as the simulator."""
    result = simulate(deployment(topology="TP1", cached_tokens=blocks * SIZE), sessions(seed), concurrency=concurrency, duration_s=10.0, gap_cap_s=1.0,
                      seed=seed, costs=StandIn)
    expected = by_hand(sessions(seed), concurrency, blocks, 10 * SECOND, seed)
    flights = [(f.turn.session, f.turn.agent, f.turn.number, f.arrival, f.timeline.admitted_s, f.cached, f.timeline.token_s.first, f.ended,
                f.timeline.num_preemptions) for f in result.flights]
    assert sorted(flights) == sorted(expected)


def by_hand(trace, concurrency, blocks, end, seed):
    loop, costs = ClosedLoop(trace, concurrency=concurrency, gap_cap_s=1.0, seed=seed), StandIn("TP1", "both")
    pool = BlockPool(blocks, SIZE)
    pool._reserve = 0
    scheduler = Scheduler(pool, max_num_batched_tokens=64, max_num_seqs=4)
    now, number, known, turns, found = 0, 0, {}, {}, []
    due = [(round(delay_s * 1e12), i, turn) for i, (delay_s, turn) in enumerate(loop.begin())]
    number = len(due)
    while due or scheduler.has_unfinished:
        due.sort(key=lambda item: item[:2])
        while due and (due[0][0] <= now or not scheduler.has_unfinished):
            when, _, turn = due.pop(0)
            if when >= end:
                continue
            now = max(now, when)
            tokens = [known.setdefault((turn.session, tuple(turn.request.hash_ids[: i + 1])), len(known)) for i in range(len(turn.request.hash_ids))]
            ids = [token for token in tokens for _ in range(SIZE)]
            ids += [10 ** 6 + len(turns)] * (turn.request.input_tokens - len(ids))
            request = Request(f"{len(turns)}", ids, SamplingParams(max_tokens=turn.request.output_tokens), max_model_len=10 ** 6)
            turns[request.request_id] = turn, when, request
            scheduler.add(request)
        if not scheduler.has_unfinished:
            continue
        step = scheduler.schedule(now)
        now += max(1, *costs.rank_ps([work_of(step, costs.index_topk)]))
        for request in scheduler.update(step, [10 ** 8 + len(turns)] * len(step.sampled()), now):
            turn, when, _ = turns[request.request_id]
            found.append((turn.session, turn.agent, turn.number, when, request.timeline.admitted_s, request.num_cached_tokens,
                          request.timeline.token_s[0], now, request.timeline.num_preemptions))
            for delay_s, after in loop.ended(turn):
                due.append((now + 1 + round(delay_s * 1e12), number, after))
                number += 1
    return found


def test_data_ranks_step_together_and_idle_ones_take_dummies():
    seen = []
    result = run("data ranks", concurrency=2, stretch=False, watch=lambda *step: seen.append(step))
    assert all(len(works) == 4 for _, _, _, works, _ in seen)
    assert result.counts["dummies"] == sum(not any(work) for _, _, _, works, _ in seen for work in works) > 0
    for _, start, end, works, steps in seen:
        assert steps == 1 and end - start == max(StandIn("DEP4", "both").rank_ps(works)), "the slowest rank decides"
    assert all(a[2] <= b[1] for a, b in zip(seen, seen[1:])), "a step begins before the last one is over"


# --- prefill and decode apart ------------------------------------------------------------------------------------

@pytest.mark.parametrize("admission", ["poll", "event"])
def test_the_way_of_a_request(admission):
    result = run("apart", how={"load_admission": admission})
    several = 0
    for flight in result.flights:
        times, stamps = flight.timeline, flight.timeline.token_s
        assert flight.arrival == times.arrival_s == times.routed_s <= times.admitted_s <= times.prefill_start_s < stamps.first
        assert stamps.count == flight.output_tokens and stamps.last == flight.ended
        if stamps.count > 1:
            assert stamps.first < times.transfer_start_s < times.transfer_end_s <= times.landed_s <= times.decode_admitted_s < stamps.last
            several += 1
        else:
            assert times.transfer_start_s is None, "its first token is its last: nothing is handed over"
    assert result.counts["moves"] == several > 0


def test_a_decoder_fetches_only_what_it_lacks():
    """A session's second turn finds the first one's rows on its decoder."""
    turns = sessions(1, number=1, requests=4, subagents=0)
    pieces = []

    class Counting(StandIn):
        def transfer_ps(self, descriptors, nbytes):
            pieces.append(descriptors)
            return super().transfer_ps(descriptors, nbytes)

    result = simulate(deployment(prefill="TP1", decode="TP1", decoders=1), turns, concurrency=1, duration_s=30.0, gap_cap_s=0.1, costs=Counting)
    known, expected = {}, []
    for flight in result.flights:
        request, seen = flight.turn.request, known.setdefault(flight.turn.session, set())
        if request.output_tokens > 1:
            full = request.input_tokens // SIZE
            # all of a prompt's rows, and none of its answer's: full blocks are findable
            hits = next((i for i in range(full) if request.hash_ids[: i + 1] not in seen), full)
            expected.append(-(-request.input_tokens // SIZE) - hits)  # block-major: a piece a block
            seen.update(request.hash_ids[: i + 1] for i in range(full))
    assert pieces == expected and min(pieces) < max(pieces)


def test_the_prefill_engine_keeps_rows_until_the_decoder_has_them():
    """Its pool holds one prompt or two: who comes next is computed when the rows of those before have moved, in two seconds each."""
    class Slow(StandIn):
        def transfer_ps(self, descriptors, nbytes):
            return 2 * SECOND

    result = run("apart", how={"prefill": "TP1", "prefill_cached_tokens": 26 * SIZE}, concurrency=4, costs=Slow)
    held = sorted((f.timeline.admitted_s, f.timeline.transfer_end_s or f.ended, -(-f.turn.request.input_tokens // SIZE)) for f in result.flights)
    for start, _, _ in held:
        assert sum(blocks for a, b, blocks in held if a <= start < b) <= 26
    assert result.metrics["queue_s_p99"] > 1.5


def test_a_first_token_can_count_from_its_decoder():
    at_prefill, at_decode = run("apart"), run("apart", how={"first_token": "decode"})
    assert at_prefill.digest == at_decode.digest
    assert at_prefill.metrics["ttft_s_mean"] < at_decode.metrics["ttft_s_mean"]


# --- the tier ----------------------------------------------------------------------------------------------------

def test_what_was_evicted_comes_back_from_the_tier():
    result = run("a tier", concurrency=3, duration_s=30.0)
    assert result.counts["prompt_tokens_loaded"] > 0 and result.counts["evictions"] > 0
    assert result.metrics["hit_rate"] == pytest.approx(result.metrics["hit_rate_device"] + result.metrics["hit_rate_host"])
    waited = [f.timeline.wait_parts() for f in result.flights if f.timeline.retrieve_start_s is not None]
    assert waited and all(parts is not None and min(parts) >= 0 for parts in waited)
    without = run("a tier", how={"host_tier_bytes": 0}, concurrency=3, duration_s=30.0)
    assert without.metrics["hit_rate"] < result.metrics["hit_rate"]


# --- the same again, and balances ----------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equal_runs_have_equal_events_and_nothing_is_lost(kind):
    one, other, another = run(kind, 5), run(kind, 5), run(kind, 6)
    assert outcome(one) == outcome(other) and one.digest != another.digest
    counts = one.counts
    assert counts["requests_in"] == counts["requests_out"] > 5
    assert counts["tokens_in"] == counts["tokens_out"] and counts["blocks_in"] == counts["blocks_out"]
    assert counts["prompt_tokens_in"] == sum(counts[f"prompt_tokens_{part}"] for part in ("found", "loaded", "computed"))


def test_news_come_before_boundaries_and_in_their_order():
    agenda, seen = Agenda(), []
    agenda.boundary(5, 1, 1, lambda version: seen.append("boundary 1"))
    agenda.boundary(5, 0, 1, lambda version: seen.append("boundary 0"))
    agenda.news(5, seen.append, "first")
    agenda.news(5, seen.append, "second")
    agenda.news(4, lambda: agenda.news(5, seen.append, "third"))
    while agenda.next():
        pass
    assert seen == ["first", "second", "third", "boundary 0", "boundary 1"] and agenda.now == 5


def test_a_prompt_that_no_pool_can_hold_is_refused_and_its_session_goes_on():
    result = run("one engine", how={"cached_tokens": 12 * SIZE}, concurrency=2)
    refused = [record for record in result.records if record.error]
    assert refused and "need" in refused[0].error and result.metrics["failed"] > 0
    assert any(not record.error for record in result.records)


def test_gaps_are_those_of_the_window():
    result = run("one engine", concurrency=1, stretch=False, watch=None)
    assert sum(result.gaps.counts.values()) < result.counts["tokens_out"]
    assert result.metrics["gap_s_p50"] <= result.metrics["gap_s_p90"] <= result.metrics["gap_s_p99"]


# --- refusals --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, says", [
    ({"prefill": "DP8"}, "topology='DP8'"),
    ({"decoders": 0}, "decoders=0: use a whole number, 1 or more"),
    ({"max_num_batched_tokens": 2}, "at least max_num_seqs"),
    ({"kv_cache_layout": "XYZ"}, "kv_cache_layout='XYZ'"),
    ({"load_admission": "now"}, "use poll or event"),
    ({"transfer": "push_layers"}, "use pull"),
    ({"router_policy": "best"}, "use one of random"),
    ({"router_options": {"lease_s": 3}}, "router_options"),
    ({"model": "smollm2"}, "the sizes of its rows"),
    ({"first_token": "first"}, "use prefill or decode"),
    ({"kv_cache_dtype": "fp5"}, "not a latent row"),
    ({"decode": "TP32+DCP32", "block_size": 16}, "DCP ranks must divide it"),
])
def test_what_is_wrong_with_a_deployment_is_said(changes, says):
    with pytest.raises(ConfigError, match=says.replace("(", "\\(")):
        Deployment(**{"max_num_seqs": 4, **changes})


def test_a_deployment_is_json_and_back():
    one = deployment(topology="TP1", router_options={"sticky": False})
    assert Deployment.of(json.loads(json.dumps(one.mapping()))) == one
    with pytest.raises(ConfigError, match="prefils is unknown; use prefill"):
        Deployment.of({"prefils": 2})


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="warm_s=20"):
        run(warm_s=20.0)
    with pytest.raises(ConfigError, match="divides it, or is a multiple"):
        run("one engine", how={"block_size": 24, "cached_tokens": 4800})


def test_blocks_of_another_size_than_the_traces():
    """Half as many blocks of twice the size, or twice as many of half: hits differ by less than a block."""
    for size in (8, 32):
        result = simulate(deployment(topology="TP1", block_size=size, cached_tokens=2000), sessions(2), concurrency=2, duration_s=10.0, gap_cap_s=1.0,
                          costs=StandIn)
        assert result.metrics["hit_rate"] > 0.2


def test_seeds_are_all_that_is_random():
    assert outcome(run("apart", 3, {"router_policy": "random"})) == outcome(run("apart", 3, {"router_policy": "random"}))
    assert Random(0).random() == 0.8444218515250481
