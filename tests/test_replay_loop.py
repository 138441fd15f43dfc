"""The closed loop of a replay: what waits for what, and that nothing is lost."""
import heapq
from collections import Counter
from itertools import count, islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.config import ConfigError
from minengine.workload.closed_loop import ClosedLoop
from minengine.workload.traces import BESIDE_CHECKOUT, SHIPPED, Session, Subagent, TraceError, TraceRequest, read_agentx


def request(start_s, api=0.0, think=None):
    return TraceRequest(start_s, 64, 1, (1,), 64, api, think)


def drive(loop, service, until=10**9):
    """Serve a loop's turns; `service`: seconds of a turn. Yields (begin, end, turn) in the order of ends, as long as wanted."""
    events, order = [], count()
    for delay_s, turn in loop.begin():
        heapq.heappush(events, (delay_s, next(order), None, turn))
    while events:
        now, _, begun, turn = heapq.heappop(events)
        if now > until:
            return
        if begun is None:
            heapq.heappush(events, (now + service(turn), next(order), now, turn))
        else:
            for delay_s, following in loop.ended(turn):
                heapq.heappush(events, (now + delay_s, next(order), None, following))
            yield begun, now, turn


def played(session, service=lambda turn: turn.request.api_time_s, **options):
    """One session, once: {(agent, number): (begin, end)}."""
    loop = ClosedLoop(iter([session]), concurrency=1, **options)
    return {(turn.agent, turn.number): (begun, end) for begun, end, turn in drive(loop, service)}


# --- by hand -----------------------------------------------------------------------------------------------

#   own     0─2        (waits)         20─24   think 6   30
#   first      3─5  7──10
#   second     3────────────14
FAMILY = Session("family", 64, (
    request(0.0, 2.0, 0.0),
    Subagent("a", 3.0, 8.0, (request(3.0, 2.0, 0.0), request(7.0, 3.0, 2.0))),
    Subagent("b", 3.0, 12.0, (request(3.0, 11.0, 0.0),)),
    request(20.0, 4.0, 18.0), request(30.0, 1.0, 6.0)))


def test_served_as_recorded_a_session_takes_its_recorded_course():
    assert played(FAMILY) == {(0, 0): (0, 2), (1, 0): (3, 5), (2, 0): (3, 14), (1, 1): (7, 10), (0, 1): (20, 24), (0, 2): (30, 31)}


def test_gaps_run_from_the_last_end_that_was_waited_for_and_are_cut():
    slow = {(2, 0): 100.0}
    seen = played(FAMILY, lambda turn: slow.get((turn.agent, turn.number), turn.request.api_time_s), gap_cap_s=1.5)
    assert seen[1, 0] == seen[2, 0][:1] + (5.0,) == (3.0, 5.0)  # 1 s after the parent's end
    assert seen[1, 1] == (6.5, 9.5)  # a gap of 2 s, cut
    assert seen[0, 1][0] == 103.0 + 1.5  # the slow subagent's end, and 6 s cut to 1.5


def test_a_subagent_that_the_parent_did_not_wait_for_goes_on_beside_it():
    beside = Session("s", 64, (request(0.0, 1.0), Subagent("x", 1.0, 30.0, (request(1.0, 1.0), request(29.0, 1.0, 27.0))), request(5.0, 1.0, 4.0)))
    assert played(beside) == {(0, 0): (0, 1), (1, 0): (1, 2), (0, 1): (5, 6), (1, 1): (29, 30)}


def test_a_nested_subagent_that_outlives_its_parent_is_waited_for_by_the_parents_parent():
    inner = Subagent("inner", 3.0, 9.0, (request(3.0, 8.0),))  # until 12
    outer = Subagent("outer", 1.0, 4.0, (request(1.0, 1.0), inner))  # until 5
    nested = Session("s", 64, (request(0.0, 1.0), outer, request(15.0, 1.0, 14.0)))
    assert played(nested) == {(0, 0): (0, 1), (1, 0): (1, 2), (2, 0): (3, 11), (0, 1): (15, 16)}
    assert played(nested, lambda turn: 50.0 if turn.agent == 2 else 1.0)[0, 1] == (57.0, 58.0)  # 4 s after it


def test_bounded_gaps_are_no_longer_than_the_time_between_two_starts():
    session = Session("s", 64, (request(0.0, 5.0), request(15.0, 0.0, 10.0), request(35.0, 5.0, 30.0)))
    assert played(session)[0, 2][0] == 45.0
    assert played(session, gaps="bounded")[0, 2][0] == 35.0


def test_a_replay_that_starts_anywhere_leaves_out_what_came_before():
    starts = Counter()
    for seed in range(400):
        seen = played(FAMILY, start_at="anywhere", seed=seed)
        first = min(number for agent, number in seen if agent == 0)
        starts[first] += 1
        assert seen[0, first][0] == 0 and {n for n in seen if n[0] == 0} == {(0, i) for i in range(first, 3)}
        assert (1, 0) in seen or first  # the subagents have ended before the later ones begin
        assert ((1, 0) in seen) == ((2, 0) in seen) == (first == 0)
    # 2 s, a gap of 6 s (after the subagents), 4 s, a gap of 6 s, 1 s: the last one to have begun was the first for 8 of 19 s
    assert set(starts) == {0, 1, 2} and abs(starts[0] - 400 * 8 / 19) < 4 * (400 * 8 / 19 * 11 / 19) ** 0.5


def test_started_anywhere_a_subagent_under_way_goes_on_when_it_did():
    beside = Session("s", 64, (request(0.0, 1.0), Subagent("x", 1.0, 30.0, (request(1.0, 1.0), request(29.0, 1.0, 27.0))), request(5.0, 10.0, 4.0)))
    courses = [played(beside, start_at="anywhere", seed=seed) for seed in range(20)]
    assert {(0, 1): (0.0, 10.0), (1, 1): (24.0, 25.0)} in courses  # from 5 s on


def test_cold_arrivals_are_counted_in_whole_milliseconds_and_free_nobody():
    loop = ClosedLoop([FAMILY], concurrency=1, cold_per_s=2.0, cold_tokens=640, cold_output_tokens=5)
    cold = list(islice(loop.cold(), 2000))
    moments = [at for at, _ in cold]
    assert moments == sorted(moments) and all(at * 1000 == pytest.approx(round(at * 1000), abs=1e-6) for at in moments)
    assert 950 < moments[-1] < 1050  # 2,000 of 2 a second: four standard deviations are 89 s
    turn = cold[7][1]
    assert turn.cold and (turn.request.input_tokens, turn.request.output_tokens, len(turn.request.hash_ids)) == (640, 5, 10)
    assert len({turn.session for _, turn in cold}) == 2000 and loop.ended(turn) == []
    assert list(ClosedLoop([FAMILY], concurrency=1).cold()) == []


# --- for any session -----------------------------------------------------------------------------------------

times = st.integers(0, 40).map(float)  # small, so that equal moments are frequent
turns = st.builds(request, times, st.none() | times, st.none() | times)
items = st.recursive(st.lists(turns, max_size=5),
                     lambda inner: st.lists(turns | st.builds(Subagent, st.just("x"), times, times, inner.map(tuple)), max_size=5), max_leaves=12)
sessions = st.lists(st.tuples(turns, items).map(lambda both: (both[0], *both[1])), min_size=1, max_size=4).map(
    lambda all_items: [Session(f"s{i}", 64, session) for i, session in enumerate(all_items)])


@given(sessions, st.integers(1, 5), st.sampled_from((0.0, 3.0, 1e9)), st.sampled_from(("recorded", "bounded")), st.integers(0, 99))
def test_every_request_of_every_session_once_in_order_and_n_live(sessions, n, cap, gaps, seed):
    loop, rng, seen, last_end = ClosedLoop(sessions, concurrency=n, gap_cap_s=cap, gaps=gaps, seed=seed), Random(seed), {}, {}
    for begun, end, turn in drive(loop, lambda _: float(int(rng.random() * 9))):
        assert loop.live == n
        agents = seen.setdefault(turn.session, {})
        assert agents.get(turn.agent, 0) == turn.number  # each once, and in order
        assert begun >= last_end.get((turn.session, turn.agent), 0)
        agents[turn.agent], last_end[turn.session, turn.agent] = turn.number + 1, end
        if loop.sessions_ended > 2 * len(sessions) + n:
            break
    named = {session.id: [len(agent) for agent in session.agents] for session in sessions}
    whole = [name for name, agents in seen.items() if [agents.get(i, 0) for i in range(len(named[name.split("#")[0]]))] == named[name.split("#")[0]]]
    assert len(whole) == loop.sessions_ended and len(seen) <= loop.sessions_begun == loop.sessions_ended + n
    begun_copies = Counter(name.split("#")[0] for name in seen)
    assert max(begun_copies.values()) <= loop.sessions_begun / len(sessions) + 1  # a new pass only when the last one is over


@given(sessions, st.integers(0, 99))
def test_started_anywhere_a_session_still_ends_and_skips_only_what_came_before(sessions, seed):
    for session in sessions:
        seen = played(session, lambda turn: 1.0, start_at="anywhere", seed=seed)
        first = min(number for agent, number in seen if agent == 0)
        assert {number for agent, number in seen if agent == 0} == set(range(first, len(session.agents[0])))
        begin_s = session.agents[0][first].start_s
        for i, agent in enumerate(session.agents[1:], 1):
            kept = [number for a, number in seen if a == i]
            assert kept == list(range(len(agent) - len(kept), len(agent)))  # the last ones, in order
            assert all(request.start_s < begin_s for request in agent[:len(agent) - len(kept)])


@given(sessions, st.integers(0, 9))
def test_the_same_seed_gives_the_same_replay(sessions, seed):
    def course():
        loop = ClosedLoop(sessions, concurrency=3, seed=seed, start_within_s=20.0, start_at="anywhere")
        return [(begun, end, turn.session, turn.agent, turn.number) for begun, end, turn in islice(drive(loop, lambda _: 1.0), 60)]

    assert course() == course()


# --- its ends --------------------------------------------------------------------------------------------------

def test_a_turn_that_is_not_under_way_cannot_end():
    loop = ClosedLoop([FAMILY], concurrency=1)
    ((_, turn),) = loop.begin()
    loop.ended(turn)
    with pytest.raises(ValueError, match="family#0, agent 0, request 0: is not under way"):
        loop.ended(turn)


@pytest.mark.parametrize("options, field", [
    ({"concurrency": 0}, "concurrency=0"), ({"gap_cap_s": -1}, "gap_cap_s=-1"), ({"gaps": "guess"}, "gaps='guess'"),
    ({"start_at": "end"}, "start_at='end'"), ({"start_within_s": float("inf")}, "start_within_s=inf"),
    ({"cold_per_s": -1}, "cold_per_s=-1"), ({"cold_per_s": 1}, "cold_tokens=0"), ({"cold_per_s": 1e9, "cold_tokens": 1, "cold_output_tokens": 1}, "0 to 1000"),
    ({"concurrency": True}, "concurrency=True"), ({"seed": "a"}, "seed='a'"), ({"seed": -1}, "seed=-1"), ({"gap_cap_s": None}, "gap_cap_s=None"),
    ({"cold_per_s": "q"}, "cold_per_s='q'"), ({"start_within_s": "x"}, "start_within_s='x'"), ({"cold_tokens": 1.5}, "cold_tokens=1.5"),
    ({"cold_per_s": 1, "cold_tokens": 10**12, "cold_output_tokens": 1}, "cold_tokens=1000000000000"),
])
def test_what_is_not_possible_is_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        ClosedLoop([FAMILY], **{"concurrency": 1, **options})


def test_no_sessions_and_empty_sessions_are_refused():
    for none in ([], iter([])):
        with pytest.raises(ConfigError, match="sessions: is empty"):
            ClosedLoop(none, concurrency=1).begin()
    with pytest.raises(TraceError, match="session s: holds no request"):
        ClosedLoop([Session("s", 64, ())], concurrency=1).begin()


def test_a_sequence_is_shuffled_a_reader_is_taken_in_its_order_and_an_iterator_runs_dry():
    short = [Session(f"s{i}", 64, (request(0.0),)) for i in range(20)]

    def order(given, n):
        return [turn.session for _, _, turn in islice(drive(ClosedLoop(given, concurrency=1, seed=3), lambda _: 1.0), n)]

    shuffled = order(short, 40)
    assert sorted(shuffled) == sorted(f"s{i}#{k}" for i in range(20) for k in range(2))
    assert shuffled[:20] != [f"s{i}#0" for i in range(20)] and [s.split("#")[0] for s in shuffled[:20]] != [s.split("#")[0] for s in shuffled[20:]]
    assert order(iter(short), 40) == [f"s{i}#0" for i in range(20)]

    class Reader:
        def __iter__(self):
            return iter(short)

    assert order(Reader(), 25) == [f"s{i}#0" for i in range(20)] + [f"s{i}#1" for i in range(5)]


@pytest.mark.parametrize("folder", [SHIPPED, pytest.param(BESIDE_CHECKOUT, marks=pytest.mark.skipif(
    not (BESIDE_CHECKOUT / "agentx").is_dir(), reason="no public traces at ../shared/data"))])
def test_served_as_recorded_no_request_of_the_traces_begins_later_than_recorded(folder):
    """But for rounding: in the public traces stamps and think times are whole seconds, which adds up to at most one a request before it."""
    for session in read_agentx(folder / "agentx"):
        seen = played(session, lambda turn: turn.request.api_time_s or 0.0, gap_cap_s=float("inf"), gaps="bounded")
        assert len(seen) == len(session.requests)
        for (agent, number), (begun, _) in seen.items():
            start_s = session.agents[agent][number].start_s
            assert begun <= start_s + sum(request.start_s <= start_s for request in session.requests)
