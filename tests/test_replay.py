"""A replay: what is sent when, what is recorded, and that a failure loses nothing. Against a made-up target and real engines."""
import json
from collections import defaultdict, deque

import pytest
from tiny_models import tiny_model

from minengine.async_llm import AsyncLLM
from minengine.config import ConfigError
from minengine.engine import LLMEngine
from minengine.engine_args import EngineArgs
from minengine.replay.drive import HOPELESS, replay
from minengine.replay.engine import EngineTarget, runs_on_one_thread
from minengine.replay.wall import FrontTarget
from minengine.workload.closed_loop import ClosedLoop
from minengine.workload.report import Record, report
from minengine.workload.sessions import Session, Subagent, TraceError, TraceRequest

TINY = dict(model="llama", device="cpu", num_threads=1, block_size=16, num_gpu_blocks_override=128, max_model_len=512, max_num_batched_tokens=64,
            max_num_seqs=8)


def prompt(start_s, ids, output=4, think=None, rest=3):
    return TraceRequest(start_s, 16 * len(ids) + rest, output, tuple(ids), 16, 0.1, think)


def agent(name, turns=4, think=1.0):
    """Prompts that grow by two blocks a turn."""
    return Session(name, 16, tuple(prompt(float(i), range(2 * i + 2), think=think if i else 0.0) for i in range(turns)))


class Fake:
    """Serves each turn in `service` seconds of a clock of its own; fails those that `fails` picks."""

    label = "fake"

    def __init__(self, service=1.0, fails=lambda turn: False, interrupt_at=float("inf")):
        self.now, self.service, self.fails, self.interrupt_at = 100.0, service, fails, interrupt_at
        self.under_way = deque()
        self.sent, self.closed = [], False

    def clock(self):
        return self.now

    def send(self, turn, due_s):
        assert not self.closed and due_s <= self.now
        record = Record.of(turn, due_s)
        self.sent.append((turn, due_s - 100.0))
        self.under_way.append((self.now + self.service, turn, record))
        return record

    def wait(self, until_s):
        if self.now > self.interrupt_at:
            raise KeyboardInterrupt
        if not self.under_way or self.under_way[0][0] > until_s:
            self.now = max(self.now, until_s)
            return []
        self.now, turn, record = self.under_way.popleft()
        record.end_s = self.now
        if self.fails(turn):
            record.error = "no luck"
        else:
            record.first_token_s, record.output_tokens = self.now, 1
        return [(turn, record)]

    def close(self):
        self.closed = True


# --- the course of it ------------------------------------------------------------------------------------------

def test_turns_go_out_when_they_are_due_and_records_count_from_the_beginning():
    target, told = Fake(), []
    found = replay(ClosedLoop(iter([agent("a")]), concurrency=1), target, 60.0, tell=lambda *seen: told.append(seen))
    assert [(r.number, r.arrival_s, r.end_s) for r in found.records] == [(0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7)]
    assert (found.label, found.seconds, found.stopped, target.closed) == ("fake", 7.0, None, True)
    assert told == [(1.0, 1, 0), (3.0, 2, 0), (5.0, 3, 0), (7.0, 4, 0)]


def test_the_time_ends_it_and_what_is_under_way_has_no_end():
    found = replay(ClosedLoop([agent("a"), agent("b")], concurrency=2), Fake(service=1.5), 8.0)
    assert found.seconds == 8.0 and [r.end_s is None for r in found.records[-2:]] == [True, True] and found.records[-1].arrival_s == 7.5
    assert report(found.records, found.seconds)["requests"] == len(found.records) - 2


def test_so_many_requests_end_it():
    found = replay(ClosedLoop([agent("a")], concurrency=1), Fake(), 1e9, most=6)
    assert len([r for r in found.records if r.end_s is not None]) == 6 and found.records[-1].session == "a#1"


def test_a_request_that_fails_is_recorded_and_its_session_goes_on():
    target = Fake(fails=lambda turn: turn.number == 1)
    found = replay(ClosedLoop(iter([agent("a"), agent("b")]), concurrency=1), target, 60.0)
    assert [(r.session, r.number, r.error) for r in found.records] == [(s, n, "no luck" if n == 1 else None) for s in ("a#0", "b#0") for n in range(4)]
    metrics = report(found.records, found.seconds)
    assert (metrics["requests"], metrics["failed"], found.stopped) == (6, 2, None)


def test_failures_among_answers_do_not_end_it():
    found = replay(ClosedLoop([agent("a")], concurrency=1), Fake(fails=lambda turn: turn.number != 0), 1e9, most=8 * HOPELESS)
    assert found.stopped is None and sum(r.error is not None for r in found.records) == 6 * HOPELESS


def test_where_nobody_serves_it_does_not_go_on_for_ever():
    found = replay(ClosedLoop([agent("a", think=0.0)], concurrency=2), Fake(service=0.0, fails=lambda turn: True), 1e9)
    assert found.stopped == f"{HOPELESS + 2} requests in a row have failed, the last one with: no luck" and len(found.records) <= HOPELESS + 4


def test_ctrl_c_leaves_what_there_is():
    target = Fake(interrupt_at=104.0)
    found = replay(ClosedLoop([agent("a")], concurrency=1), target, 1e9)
    assert found.stopped == "interrupted" and target.closed and len([r for r in found.records if r.answered]) >= 2


def test_arrivals_from_outside_come_whatever_the_sessions_do():
    loop = ClosedLoop([agent("a")], concurrency=1, cold_per_s=5.0, cold_tokens=50, cold_output_tokens=2, seed=4)
    due = [at for at, _ in zip((at for at, _ in ClosedLoop([agent("a")], concurrency=1, cold_per_s=5.0, cold_tokens=50, cold_output_tokens=2,
                                                           seed=4).cold()), range(20))]
    found = replay(loop, Fake(service=0.001), 3.5)
    cold = [r for r in found.records if r.cold]
    assert [r.arrival_s for r in cold] == pytest.approx([at for at in due if at <= 3.5]) and {r.input_tokens for r in cold} == {50}
    assert len({r.session for r in cold}) == len(cold)


# --- an engine on its own clock -----------------------------------------------------------------------------------

@pytest.fixture
def target():
    made = []

    def open_one(**options):
        made.append(EngineTarget(EngineArgs(**{**TINY, **options}), model=tiny_model("llama")))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def test_the_engine_serves_every_turn_in_full_and_finds_the_past_in_its_cache(target):
    helper = Subagent("x", 0.2, 0.5, (prompt(0.2, range(50, 54)), prompt(0.5, range(50, 56))))
    sessions = [Session(name, 16, (prompt(0.0, range(4)), helper, prompt(1.0, range(8), think=0.9), prompt(2.0, range(10), think=0.9))) for name in "ab"]
    found = replay(ClosedLoop(iter(sessions), concurrency=1), target(), 1e4)
    assert len(found.records) == 10 and all(r.answered for r in found.records)
    requests = {(session.id, a, n): request for session in sessions for a, each in enumerate(session.agents) for n, request in enumerate(each)}
    for r in found.records:
        request = requests[r.session[0], r.agent, r.number]
        assert (r.input_tokens, r.output_tokens) == (request.input_tokens, request.output_tokens)
        assert r.arrival_s <= r.admitted_s <= r.first_token_s <= r.end_s
        assert r.num_hits_by_tier == {"device": r.cached_tokens}
    # Full blocks of the last prompt, within its own copy of the session: b finds nothing of a.
    assert [r.cached_tokens for r in sorted(found.records, key=lambda r: (r.session, r.agent, r.number))] == [0, 64, 128, 0, 64] * 2


def test_hours_of_gaps_are_over_at_once(target):
    found = replay(ClosedLoop(iter([agent("a", think=5000.0)]), concurrency=1, gap_cap_s=1e9), target(), 1e6)
    arrivals = [r.arrival_s for r in found.records]
    assert len(arrivals) == 4 and all(b - a >= 5000.0 for a, b in zip(arrivals, arrivals[1:])) and found.seconds >= 15_000


def test_what_is_under_way_at_the_end_says_how_far_it_has_come(target):
    loop = ClosedLoop(iter([Session("a", 16, (prompt(0.0, range(2), output=400),)), Session("b", 16, (prompt(0.0, range(2), output=1),))]), concurrency=2)
    long, short = replay(loop, target(), 1e4, most=1).records
    assert short.answered and long.end_s is None and long.output_tokens == 0 and 0 <= long.admitted_s <= long.first_token_s <= short.end_s


def test_what_the_client_does_takes_no_time_of_the_engine(target):
    one = target()
    before_s = one.clock()
    sum(i * i for i in range(2_000_000))  # a session is read, say: a tenth of a second or so of this thread's
    assert one.clock() == before_s
    assert one.wait(before_s + 0.001) == [] and one.clock() < before_s + 0.05


def test_a_trace_that_cannot_be_read_on_leaves_nothing_running():
    def breaks():
        yield agent("a", turns=1)
        raise TraceError("line 2: is no complete JSON")

    target = Fake()
    with pytest.raises(TraceError, match="line 2"):
        replay(ClosedLoop(breaks(), concurrency=1), target, 60.0)
    assert target.closed


def test_a_prompt_that_the_engine_refuses_fails_alone(target):
    session = Session("a", 16, (prompt(0.0, range(2)), prompt(1.0, range(60), think=1.0), prompt(2.0, range(4), think=1.0)))
    found = replay(ClosedLoop(iter([session]), concurrency=1), target(), 1e4)
    assert [r.error is None for r in found.records] == [True, False, True]
    assert "963 tokens and max_model_len is 512" in found.records[1].error and found.records[1].end_s is not None
    assert found.records[2].cached_tokens == 32  # the session goes on, with what is cached


def test_what_comes_from_the_host_tier_is_counted_apart(target, tmp_path):
    one = target(host_tier_bytes=1 << 22, tier_path=str(tmp_path))
    loop = ClosedLoop(iter([Session("a", 16, tuple(prompt(float(i), range(24), think=1.0) for i in range(3)))]), concurrency=1)

    def serve(turn):
        one.send(turn, one.clock())
        ended = []
        while not ended:
            ended = one.wait(one.clock() + 1e3)
        return ended[0][1].num_hits_by_tier

    ((_, turn),) = loop.begin()
    assert serve(turn) == {"device": 0, "host": 0} and one._connector.tier.wait_idle(60)
    ((_, turn),) = loop.ended(turn)
    assert serve(turn) == {"device": 384, "host": 0}
    one.engine.reset_prefix_cache()
    ((_, turn),) = loop.ended(turn)
    assert serve(turn) == {"device": 0, "host": 384}


def test_only_one_rank_with_one_thread_on_a_cpu_has_a_clock_of_its_own():
    assert runs_on_one_thread(EngineArgs(**TINY))
    assert not runs_on_one_thread(EngineArgs(**{**TINY, "num_threads": 2})) and not runs_on_one_thread(EngineArgs(**{**TINY, "topology": "TP2"}))


# --- an engine in a thread, by the wall's clock ---------------------------------------------------------------------

def test_an_engine_in_a_thread_gives_the_same_records():
    sessions = [agent("a", think=0.0), agent("b", think=0.0)]
    front = AsyncLLM(LLMEngine(EngineArgs(**TINY), model=tiny_model("llama")))
    found = replay(ClosedLoop(iter(sessions), concurrency=2), FrontTarget(front), 600.0)
    by_turn = defaultdict(dict)
    for r in found.records:
        assert r.answered and r.output_tokens == 4 and r.arrival_s <= r.admitted_s <= r.first_token_s <= r.end_s
        by_turn[r.session][r.number] = r.cached_tokens
    assert dict(by_turn) == {name: {0: 0, 1: 32, 2: 64, 3: 96} for name in ("a#0", "b#0")}


def test_an_engine_that_dies_ends_the_replay_and_says_why():
    engine = LLMEngine(EngineArgs(**TINY), model=tiny_model("llama"))
    step, steps = engine.step, []

    def breaks():
        steps.append(1)
        if len(steps) > 6:
            raise RuntimeError("out of luck")
        return step()

    engine.step = breaks
    found = replay(ClosedLoop([agent("a", think=0.0)], concurrency=2), FrontTarget(AsyncLLM(engine)), 600.0)
    assert found.stopped is not None and "out of luck" in found.stopped
    assert any(r.answered for r in found.records) and all(json.loads(r.to_json()) for r in found.records)


def test_a_front_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="an LLMEngine is one rank"):
        EngineTarget(EngineArgs(**{**TINY, "topology": "TP2"}))
