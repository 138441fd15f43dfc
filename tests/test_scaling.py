"""Sessions made shorter: lengths, common beginnings, and the tokens that stand for them."""
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.config import ConfigError
from minengine.workload.closed_loop import Turn
from minengine.workload.scaling import PromptTokens, scaled, scaled_sessions
from minengine.workload.sessions import MOST_TOKENS
from minengine.workload.traces import SHIPPED, Session, Subagent, TraceRequest, hit_share, read_agentx


def common(a, b):
    """Leading elements that two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def prompt(ids, size, rest=0):
    return TraceRequest(0.0, len(ids) * size + rest, 100, tuple(ids), size)


@st.composite
def sessions(draw):
    """Prompts whose ids are chained, as a trace's are: equal ids stand behind equal ids."""
    size = draw(st.sampled_from((1, 3, 16, 64)))
    paths = draw(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6))
    names = {}
    chained = [[names.setdefault(tuple(path[:i + 1]), len(names)) for i in range(len(path))] for path in paths]
    requests = [prompt(ids, size, draw(st.integers(0, size - 1))) for ids in chained]
    return Session("s", size, (*requests[:2], Subagent("x", 0.0, 1.0, tuple(requests[2:]))))


@given(sessions(), st.sampled_from((0.02, 0.1, 0.37, 1.0, 2.5)), st.sampled_from((1, 2, 16, 64)))
def test_lengths_are_multiplied_and_prompts_begin_alike_as_far_as_they_did(session, scale, size):
    small = scaled(session, scale, size)
    before, after = [r for agent in session.agents for r in agent], [r for agent in small.agents for r in agent]
    assert [len(agent) for agent in small.agents] == [len(agent) for agent in session.agents]
    for old, new in zip(before, after):
        assert new.input_tokens == max(1, round(old.input_tokens * scale)) and new.output_tokens == max(1, round(100 * scale))
        assert (new.block_size, len(new.hash_ids)) == (size, new.input_tokens // size)
    for (old_a, new_a), (old_b, new_b) in combinations(zip(before, after), 2):
        shared = common(old_a.hash_ids, old_b.hash_ids) * session.block_size * scale / size  # blocks of the engine, and a part of one
        limit = min(len(new_a.hash_ids), len(new_b.hash_ids))
        assert min(int(shared + 1e-9), limit) - 1 <= common(new_a.hash_ids, new_b.hash_ids) <= min(shared + 1e-9, limit)


def test_at_scale_one_and_the_same_block_size_nothing_but_names_changes():
    for session in read_agentx(SHIPPED / "agentx"):
        same = scaled(session, 1.0, session.block_size)
        assert [(r.input_tokens, r.output_tokens, r.start_s, r.think_time_s) for r in same.requests] == [
            (r.input_tokens, r.output_tokens, r.start_s, r.think_time_s) for r in session.requests]
        assert hit_share([same.requests]) == hit_share([session.requests])
        assert isinstance(same.items[3], type(session.items[3])) and len(same.agents) == len(session.agents)


def test_answers_may_have_a_factor_of_their_own():
    session = Session("s", 64, (prompt(range(100), 64),))
    assert [(r.input_tokens, r.output_tokens) for r in scaled(session, 0.1, 16, 0.5).requests] == [(640, 50)]
    assert [r.output_tokens for r in scaled(session, 0.001, 16).requests] == [1]


@pytest.mark.parametrize("factors, complaint", [((1e300,), "scale=1e.300: makes 6.4e.303 tokens of 6,400"), ((1.0, 1e308), "output_scale=1e.308: makes inf tokens of 100")])
def test_a_factor_that_makes_lengths_without_end_is_refused(factors, complaint):
    session = Session("s", 64, (prompt(range(100), 64),))
    with pytest.raises(ConfigError, match=complaint):
        scaled(session, factors[0], 16, *factors[1:])
    assert scaled(session, MOST_TOKENS / 6400, 1024, 1.0).requests[0].input_tokens == MOST_TOKENS


def test_a_sequence_is_shortened_when_it_is_asked_for():
    class Counted(list):
        asked = 0

        def __getitem__(self, i):
            Counted.asked += 1
            return super().__getitem__(i)

    lazy = scaled_sessions(Counted(Session(f"s{i}", 64, (prompt(range(4), 64),)) for i in range(10)), 0.5, 16)
    assert len(lazy) == 10 and Counted.asked == 0
    assert (lazy[3].id, lazy[3].requests[0].input_tokens, Counted.asked) == ("s3", 128, 2)
    for many in (lazy, scaled_sessions(dict.fromkeys(lazy).keys(), 0.5, 16)):
        assert [session.id for session in many] == [session.id for session in many] == [f"s{i}" for i in range(10)]


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 15))
def test_tokens_are_equal_where_ids_are_and_nowhere_else(a, b, rest):
    tokens = PromptTokens(17, 40_000)
    one, other = tokens(Turn(prompt(a, 16, rest), "s#0", 0, 0)), tokens(Turn(prompt(b, 16, rest), "s#0", 0, 1))
    assert len(one) == 16 * len(a) + rest and all(17 <= t <= 40_000 for t in one)
    assert common(one, other) // 16 == common(a, b)
    if a:
        copy = tokens(Turn(prompt(a, 16, rest), "s#1", 0, 0))
        assert common(one, copy) < 3  # copies of a session share nothing
    assert one == tokens(Turn(prompt(a, 16, rest), "s#0", 0, 0))


def test_tokens_are_the_same_on_every_machine():
    assert PromptTokens(17, 49_151)(Turn(prompt([5], 4, 2), "s#0", 0, 0)) == [26750, 38844, 28068, 29134, 47010, 7839]


@pytest.mark.parametrize("call, field", [
    (lambda: scaled_sessions([], 0.0, 16), "scale=0.0"), (lambda: scaled_sessions([], 1.0, 0), "block_size=0"),
    (lambda: scaled_sessions([], 1.0, 16, float("inf")), "output_scale=inf"), (lambda: PromptTokens(5, 5), "first=5, last=5"),
])
def test_what_is_not_possible_is_refused(call, field):
    with pytest.raises(ConfigError, match=field):
        call()
