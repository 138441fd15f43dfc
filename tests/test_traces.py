"""Trace readers: what they read, what they refuse and how they say it, and the ideal cache on cases worked by hand."""
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload import synthetic, traces
from minengine.workload.traces import (BESIDE_CHECKOUT, MOONCAKE_BLOCK, SHIPPED, Subagent, TraceError, TraceRequest, find_traces, hit_share,
                                       leading_hits, read_agentx, read_mooncake)

real = pytest.mark.skipif(not traces._has_traces(BESIDE_CHECKOUT), reason="no public traces at ../shared/data; see minengine/workload/traces.py")


def turn(**changes):
    return {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 2.0, "think_time": 0.0, **changes}


def session(*requests, **changes):
    return {"id": "s", "block_size": 64, "requests": list(requests), **changes}


@pytest.fixture
def agentx(tmp_path):
    def write(value, name="trace.json"):
        file = tmp_path / name
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    return write


def requests_of(*prompts, size=64):
    return [TraceRequest(0.0, len(ids) * size, 1, tuple(ids), size) for ids in prompts]


# --- the ideal cache --------------------------------------------------------------------------------------

def test_leading_hits_count_only_an_unbroken_known_start():
    prompts = [[1, 2, 3], [1, 2, 3, 4], [1, 9, 3, 4], [9, 1], [1, 9, 3, 4, 5]]
    # the first knows nothing; the second finds 3; the third stops at 9, although 3 and 4 are known; then 9 and 1 are
    # both known; the last finds 1, 9, 3, 4.
    assert list(leading_hits(requests_of(*prompts))) == [0, 3, 1, 2, 4]


def test_a_request_does_not_hit_its_own_blocks():
    assert list(leading_hits(requests_of([1, 1, 1]))) == [0]


def test_hit_share_pools_blocks_over_groups_that_share_nothing():
    first, second = requests_of([1, 2], [1, 2, 3, 4]), requests_of([1, 2], [1])
    assert hit_share([first, second]) == (2 + 1) / (6 + 3)
    with pytest.raises(ValueError, match="groups: no request has a block"):
        hit_share([[], requests_of([])])


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12))
def test_hits_against_the_definition_read_literally(prompts):
    expected = []
    for i, prompt in enumerate(prompts):
        known = {block for earlier in prompts[:i] for block in earlier}
        expected.append(max(n for n in range(len(prompt) + 1) if set(prompt[:n]) <= known))
    assert list(leading_hits(requests_of(*prompts))) == expected


def test_a_hit_never_covers_more_tokens_than_the_prompt_has():
    partial = TraceRequest(0.0, 600, 1, (0, 1), 512)
    assert [partial.cached_tokens(n) for n in (0, 1, 2)] == [0, 512, 600]


# --- AgentX -----------------------------------------------------------------------------------------------

def test_agentx_reads_a_session_with_nested_subagents_on_one_clock(agentx):
    deepest = {"type": "subagent", "t": 3.0, "duration_ms": 1000, "requests": [turn(t=0.5)]}
    inner = [turn(), turn(t=4.0, think_time=2.0), deepest]
    helper = {"type": "subagent", "subagent_type": "Explore", "t": 20.0, "duration_ms": 8000, "requests": inner}
    file = agentx(session(turn(), helper, turn(t=15.0, type="s", ttft=0.7, think_time=None)))
    (read,) = read_agentx(file)
    assert (read.id, read.block_size) == ("s", 64)
    assert isinstance(read.items[1], Subagent) and (read.items[1].kind, read.items[1].start_s, read.items[1].duration_s) == ("Explore", 12.0, 8.0)
    assert [request.start_s for request in read.requests] == [0.0, 12.0, 14.5, 15.0, 16.0]  # 12 + 3 - 1 + 0.5 = 14.5
    assert [[request.start_s for request in agent] for agent in read.agents] == [[0.0, 15.0], [12.0, 16.0], [14.5]]
    last = read.agents[0][-1]
    assert last == TraceRequest(15.0, 130, 5, (1, 2), 64, api_time_s=2.0, think_time_s=None, ttft_s=0.7)


def test_agentx_reads_a_folder_in_order_of_names_and_only_as_far_as_asked(agentx):
    agentx(session(turn(), id="second"), "b.json")
    folder = agentx(session(turn(), id="first"), "a.json").parent
    agentx("{broken", "c.json")
    reader = read_agentx(folder)
    assert [next(reader).id, next(reader).id] == ["first", "second"]
    with pytest.raises(TraceError, match=r"c\.json: is no complete JSON"):
        next(reader)


@pytest.mark.parametrize("broken, field, remedy", [
    (session(turn(), turn(**{"in": None})), r"requests\[1\], field 'in': is missing", "needs it"),
    (session(turn(out=-1)), r"requests\[0\], field 'out': is -1", "0 or more"),
    (session(turn(out=1.5)), r"requests\[0\], field 'out': is 1.5", "whole number"),
    (session(turn(t=True)), r"requests\[0\], field 't': is True", "use a number"),
    (session(turn(api_time="2 s")), r"requests\[0\], field 'api_time'", "use a number"),
    (session(turn(hash_ids=[1])), r"requests\[0\], field 'hash_ids': has 1 ids and 130 tokens in blocks of 64 make 2", "check 'in'"),
    (session(turn(hash_ids=[1, "2"])), r"requests\[0\], field 'hash_ids': is no list of whole numbers", "one id a block"),
    (session(turn(hash_ids=None)), r"requests\[0\], field 'hash_ids': is missing", "one id a block"),
    (session(turn(type="x")), r"requests\[0\], field 'type': is 'x'", "'n', 's' or 'subagent'"),
    (session(turn(), "text"), r"requests\[1\]: is a str", "stated format"),
    (session({"type": "subagent", "t": 1, "duration_ms": 1, "requests": [turn(t=None)]}), r"requests\[0\], requests\[0\], field 't'", "needs it"),
    (session({"type": "subagent", "t": 1, "requests": []}), r"requests\[0\], field 'duration_ms': is missing", "needs it"),
    (session(turn(), block_size=0), "field 'block_size': is 0", "1 or more"),
    (session(), "field 'requests': holds no request", "at least one"),
    ({"id": "s", "block_size": 64}, "field 'requests': is missing", "list the requests"),
    ([], "is a list where an object was expected", "stated format"),
])
def test_agentx_names_file_request_field_and_remedy(agentx, broken, field, remedy):
    file = agentx(broken)
    with pytest.raises(TraceError, match=field) as caught:
        list(read_agentx(file))
    assert str(file) in str(caught.value) and remedy in str(caught.value)


def test_missing_files_say_what_to_do(tmp_path):
    with pytest.raises(TraceError, match="cannot be opened.*MINENGINE_TRACES"):
        list(read_agentx(tmp_path / "none.json"))
    with pytest.raises(TraceError, match="holds no .json file"):
        list(read_agentx(tmp_path))
    with pytest.raises(TraceError, match="holds 0 .jsonl files"):
        list(read_mooncake(tmp_path))


# --- Mooncake ---------------------------------------------------------------------------------------------

LINE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


def test_mooncake_reads_line_by_line(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text(json.dumps(LINE) + "\n\n" + "{broken\n")
    reader = read_mooncake(file)
    assert next(reader) == TraceRequest(1.5, 600, 7, (0, 1), MOONCAKE_BLOCK)
    with pytest.raises(TraceError, match=r"m\.jsonl, line 3: is no complete JSON"):
        next(reader)


@pytest.mark.parametrize("change, field", [
    ({"timestamp": None}, "field 'timestamp': is missing"),
    ({"input_length": 1025}, "field 'hash_ids': has 2 ids and 1025 tokens in blocks of 512 make 3; check 'input_length'"),
    ({"output_length": float("inf")}, "field 'output_length': is inf"),
])
def test_mooncake_names_line_and_field(tmp_path, change, field):
    file = tmp_path / "m.jsonl"
    file.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, **change}) + "\n")
    with pytest.raises(TraceError, match=f"line 2, {field}"):
        list(read_mooncake(file))


# --- where they are ---------------------------------------------------------------------------------------

def test_the_variable_comes_first_then_the_neighbour_then_the_shipped_ones(tmp_path, monkeypatch):
    synthetic.write_agentx(tmp_path / "agentx", sessions=1)
    synthetic.write_mooncake(tmp_path / "mooncake" / "x.jsonl", requests=3)
    monkeypatch.setenv("MINENGINE_TRACES", str(tmp_path))
    found = find_traces()
    assert found.agentx == tmp_path / "agentx" and not found.synthetic and "MINENGINE_TRACES" in found.name
    assert len(list(read_mooncake(found.mooncake))) == 3

    monkeypatch.delenv("MINENGINE_TRACES")
    monkeypatch.setattr(traces, "BESIDE_CHECKOUT", tmp_path)
    assert find_traces().agentx == tmp_path / "agentx"
    monkeypatch.setattr(traces, "BESIDE_CHECKOUT", tmp_path / "nowhere")
    shipped = find_traces()
    assert shipped.synthetic and shipped.agentx == SHIPPED / "agentx" and "synthetic" in shipped.name


def test_a_wrong_variable_is_an_error_not_a_fallback(tmp_path, monkeypatch):
    monkeypatch.setenv("MINENGINE_TRACES", str(tmp_path))
    with pytest.raises(TraceError, match="MINENGINE_TRACES=.*unset it"):
        find_traces()


def test_the_shipped_traces_are_what_their_seed_gives(tmp_path):
    synthetic.write_agentx(tmp_path / "agentx")
    synthetic.write_mooncake(tmp_path / "mooncake" / "requests.jsonl")
    made = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    shipped = {file.relative_to(SHIPPED): file.read_bytes() for file in SHIPPED.rglob("*.json*")}
    assert made == shipped
    assert sum(map(len, shipped.values())) < 100_000


def test_the_shipped_traces_have_what_a_reader_of_traces_meets():
    sessions = list(read_agentx(SHIPPED / "agentx"))
    assert any(len(s.agents) > 1 for s in sessions)
    requests = [request for s in sessions for request in s.requests]
    assert max(request.input_tokens for request in requests) < 8192  # smollm2 can replay them
    assert any(request.think_time_s > 10 for request in requests)
    broken = [a.hash_ids[: len(b.hash_ids)] != b.hash_ids[: len(a.hash_ids)] for s in sessions for a, b in zip(s.agents[0], s.agents[0][1:])]
    assert any(broken)  # somewhere a history was compacted, so the prefix match stops early
    assert 0.5 < hit_share(s.requests for s in sessions) < 1
    chat = list(read_mooncake(SHIPPED / "mooncake"))
    assert [r.start_s for r in chat] == sorted(r.start_s for r in chat) and chat[0].start_s == 0
    assert 0.1 < hit_share([chat]) < 0.9


# --- the public traces: figures known from elsewhere ------------------------------------------------------

@real
def test_mooncake_conversations_have_the_known_size_and_ideal_hit():
    requests = list(read_mooncake(BESIDE_CHECKOUT / "mooncake" / "conversation_trace.jsonl"))
    assert len(requests) == 12_031
    assert round(hit_share([requests]), 3) == 0.366


@real
def test_agentx_sessions_have_the_known_size_and_ideal_hit():
    sessions = list(read_agentx(BESIDE_CHECKOUT / "agentx"))
    requests = [request for s in sessions for request in s.requests]
    assert (len(sessions), len(requests)) == (23, 1372)
    assert round(sum(r.input_tokens for r in requests) / len(requests), -3) == 89_000
    assert 0.93 < hit_share(s.requests for s in sessions) < 0.96
    for s in sessions:  # the reading of a subagent's clock: none starts before what it was started by
        assert all(item.start_s >= 0 for item in s.items) and Path(s.id).name == s.id
