"""Traces in and out: what is written is read again, malformed parts are counted, and nothing is kept that has been read."""
import gc
import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload.closed_loop import ClosedLoop
from minengine.workload.scaling import scaled_sessions
from minengine.workload.sessions import MOST_TOKENS
from minengine.workload.traces import (BESIDE_CHECKOUT, MOONCAKE_BLOCK, SHIPPED, AgentXFiles, Session, Skipped, Subagent, TraceError, TraceRequest,
                                       conversations, read_agentx, read_csv, read_mooncake, write_agentx, write_mooncake)

real = pytest.mark.skipif(not (BESIDE_CHECKOUT / "agentx").is_dir(), reason="no public traces at ../shared/data")
GOOD = {"id": "good", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2]}]}
BAD = {"id": "bad", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": 130, "out": -5, "hash_ids": [1, 2]}]}

# --- there and back -------------------------------------------------------------------------------------------

seconds = st.integers(0, 10**9).map(lambda micro: micro / 10**6)
maybe = st.none() | seconds


@st.composite
def written_turns(draw):
    tokens = draw(st.integers(0, 200))
    ids = draw(st.lists(st.integers(0, 9), min_size=tokens // 16, max_size=tokens // 16))
    turn = {"t": draw(seconds), "type": "n", "in": tokens, "out": draw(st.integers(0, 99)), "hash_ids": ids}
    turn.update({name: value for name in ("api_time", "think_time", "ttft") if (value := draw(maybe)) is not None})
    return turn


def subagents(inner):
    return st.builds(lambda kind, start, duration, requests: {"t": round(start + duration, 6), "type": "subagent", "subagent_type": kind,
                                                              "duration_ms": round(duration * 1000, 3), "requests": requests},
                     st.text(max_size=3), seconds, seconds, inner)


documents = st.recursive(st.lists(written_turns(), max_size=3), lambda inner: st.lists(written_turns() | subagents(inner), max_size=4), max_leaves=8)


@given(st.lists(st.tuples(written_turns(), documents), min_size=1, max_size=3))
def test_sessions_that_are_read_are_the_same_when_written_and_read_again(tmp_path_factory, all_requests):
    folder = tmp_path_factory.mktemp("agentx")
    given_ones = [{"id": f"s{i}", "block_size": 16, "requests": [first, *others]} for i, (first, others) in enumerate(all_requests)]
    for one in given_ones:
        (folder / f"{one['id']}.json").write_text(json.dumps(one))
    sessions = list(read_agentx(folder))
    for path in (folder / "again", folder / "again.jsonl"):
        assert write_agentx(path, iter(sessions)) == len(sessions)
        assert list(read_agentx(path)) == sessions == list(AgentXFiles(path))
    again = [json.loads(line) for line in (folder / "again.jsonl").read_text().splitlines()]
    assert [stamps(one["requests"]) for one in again] == [stamps(one["requests"]) for one in given_ones]


def stamps(requests):
    """All times, as they stand in a file."""
    return [[r["t"], r.get("duration_ms"), *(r.get(name) for name in ("api_time", "think_time", "ttft")), stamps(r.get("requests", ()))] for r in requests]


@given(st.lists(st.builds(lambda ms, tokens, out: TraceRequest(ms / 1000, tokens, out, tuple(range(-(-tokens // 512))), 512),
                          st.integers(0, 10**7), st.integers(0, 5000), st.integers(0, 99)), max_size=8))
def test_requests_that_are_written_are_read_again(tmp_path_factory, requests):
    file = tmp_path_factory.mktemp("mooncake") / "m.jsonl"
    assert write_mooncake(file, iter(requests)) == len(requests)
    assert list(read_mooncake(file)) == requests


def test_the_shipped_traces_go_there_and_back(tmp_path):
    sessions, requests = list(read_agentx(SHIPPED / "agentx")), list(read_mooncake(SHIPPED / "mooncake"))
    write_agentx(tmp_path / "agentx", sessions)
    write_mooncake(tmp_path / "m.jsonl", requests)
    assert list(read_agentx(tmp_path / "agentx")) == sessions and list(read_mooncake(tmp_path / "m.jsonl")) == requests
    assert any(isinstance(item, Subagent) for session in sessions for item in session.items)


@real
def test_the_public_traces_go_there_and_back(tmp_path):
    for session in read_agentx(BESIDE_CHECKOUT / "agentx"):
        write_agentx(tmp_path / "one.jsonl", [session])
        assert list(read_agentx(tmp_path / "one.jsonl")) == [session]


def test_what_the_format_cannot_say_is_not_written(tmp_path):
    short = Session("s", 64, (TraceRequest(0.0, 130, 1, (1,), 64),))
    with pytest.raises(TraceError, match="session s: a prompt of 130 tokens has 1 ids of 64 tokens; give one for each full block of 64"):
        write_agentx(tmp_path / "x.jsonl", [short])
    with pytest.raises(TraceError, match="request 1: a prompt of 130 tokens has 1 ids of 64 tokens"):
        write_mooncake(tmp_path / "m.jsonl", short.requests)
    good = Session("s", 64, (TraceRequest(0.0, 64, 1, (1,), 64),))
    with pytest.raises(TraceError, match="'s': comes twice; write a .jsonl"):
        write_agentx(tmp_path / "folder", [good, good])
    with pytest.raises(TraceError, match="'../s': is no file name"):
        write_agentx(tmp_path / "folder", [replace(good, id="../s")])


# --- malformed parts --------------------------------------------------------------------------------------------

def test_malformed_lines_are_named_or_counted(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text("\n".join([json.dumps(GOOD), "{broken", json.dumps(BAD), "", json.dumps({**GOOD, "id": "last"}), "[1]"]) + "\n")
    with pytest.raises(TraceError, match=r"s\.jsonl, line 2: is no complete JSON"):
        list(read_agentx(file))
    skipped = Skipped()
    assert [session.id for session in read_agentx(file, skip_bad=skipped)] == ["good", "last"]
    assert skipped.count == 3 and "line 2" in skipped.first[0] and "line 3, requests[0], field 'out': is -5; use a number, 0 or more" in skipped.first[1]
    again = Skipped()
    files = AgentXFiles(file, skip_bad=again)
    assert [session.id for session in files] == ["good", "last"] == [files[i].id for i in range(len(files))] and again.count == 3
    assert again.first == skipped.first
    with pytest.raises(TraceError, match="is no complete JSON"):
        list(AgentXFiles(file))


def test_malformed_files_of_a_folder_are_named_or_counted(tmp_path):
    for name, value in {"a": "{", "b": json.dumps(GOOD), "c": json.dumps(BAD)}.items():
        (tmp_path / f"{name}.json").write_text(value)
    skipped = Skipped()
    assert [session.id for session in read_agentx(tmp_path, skip_bad=skipped)] == ["good"] and skipped.count == 2
    assert len(AgentXFiles(tmp_path, skip_bad=Skipped())) == 1
    (tmp_path / "b.json").unlink()
    with pytest.raises(TraceError, match=r"holds no session that can be read; the first complaint: .*a\.json"):
        AgentXFiles(tmp_path, skip_bad=Skipped())


def test_only_the_first_few_complaints_are_kept(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text("{\n" * 1000)
    skipped = Skipped()
    assert list(read_mooncake(file, skip_bad=skipped)) == [] and skipped.count == 1000 and len(skipped.first) == Skipped.KEPT


def test_what_is_no_text_is_refused(tmp_path):
    for name, read in (("a.json", read_agentx), ("m.jsonl", read_mooncake), ("t.csv", read_csv)):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00{")
        with pytest.raises(TraceError, match="is no UTF-8 text"):
            list(read(tmp_path / name))
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="nested too deeply|is no complete JSON"):
        list(read_agentx(tmp_path / "a.json"))


# --- comma-separated values ---------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-17 00:00:00,64,1\n"


def test_splitwise_is_read_as_seconds_since_its_first_line(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    first, second, third = read_csv(tmp_path / "t.csv")
    assert (first.start_s, first.input_tokens, first.output_tokens, len(first.hash_ids)) == (0.0, 374, 44, 5)
    assert second.start_s == pytest.approx(4.314579) and third.start_s == pytest.approx(20653.31941)
    assert not set(first.hash_ids) & set(second.hash_ids)  # nobody knows what they share
    (tmp_path / "z.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 02:00:01+02:00,1,2\n")
    assert [r.start_s for r in read_csv(tmp_path / "z.csv")] == [0.0, 0.5]


@pytest.mark.parametrize("header", ["arrival_timestamp,prompt_size,token_size,more", "more,arrived_at,num_prefill_tokens,num_decode_tokens"])
def test_other_known_columns(tmp_path, header):
    row = {"arrival_timestamp": "2.5", "arrived_at": "2.5", "more": "x", "prompt_size": "7", "num_prefill_tokens": "7"}
    (tmp_path / "t.csv").write_text(header + "\r\n" + ",".join(row.get(name, "9.0") for name in header.split(",")) + "\r\n")
    assert list(read_csv(tmp_path / "t.csv")) == [TraceRequest(0.0, 7, 9, (), 64)]


def test_columns_may_be_named_and_must_be_there(tmp_path):
    (tmp_path / "t.csv").write_text("when, in ,out\n0.5,100,3\n")
    assert next(read_csv(tmp_path / "t.csv", ("when", "in", "out"))).input_tokens == 100
    with pytest.raises(TraceError, match="line 1: has the columns when, in, out, and TIMESTAMP, ContextTokens, GeneratedTokens or .* are needed"):
        list(read_csv(tmp_path / "t.csv"))
    with pytest.raises(TraceError, match="when, in, out, and t, in, out are needed; rename those of time"):
        list(read_csv(tmp_path / "t.csv", ("t", "in", "out")))
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(TraceError, match="has the columns none"):
        list(read_csv(tmp_path / "e.csv"))


@pytest.mark.parametrize("line, complaint", [
    ("soon,1,2", "field 'TIMESTAMP': is 'soon'; use seconds"), ("5,1.5,2", "field 'ContextTokens': is '1.5'; use a whole number"),
    ("5,1", "field 'GeneratedTokens': is ''"), ("5,-1,2", "'-1'"), ("5,1,1e999", "'1e999'"), ("-5,1,2", "'-5'"), ("nan,1,2", "'nan'"),
    ("1,1,2", "lies 2 s before the line before"), (f"5,{MOST_TOKENS + 1},2", f"'{MOST_TOKENS + 1}'; use a whole number, 0 to {MOST_TOKENS}"), ("5,1,1e11", "'1e11'"),
])
def test_csv_names_line_field_and_remedy(tmp_path, line, complaint):
    (tmp_path / "t.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n3,4,5\n{line}\n9,4,5\n")
    with pytest.raises(TraceError, match=f"line 3, .*{complaint}"):
        list(read_csv(tmp_path / "t.csv"))
    skipped = Skipped()
    assert len(list(read_csv(tmp_path / "t.csv", skip_bad=skipped))) == 2 and skipped.count == 1


def test_csv_is_in_the_order_of_its_lines(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n3,4,5\n9,4,5\n8,4,5\n9,4,5\n")
    with pytest.raises(TraceError, match="line 4, field 'TIMESTAMP': lies 1 s before the line before"):
        list(read_csv(tmp_path / "t.csv"))
    skipped = Skipped()
    assert [r.start_s for r in read_csv(tmp_path / "t.csv", skip_bad=skipped)] == [0, 6, 6] and skipped.count == 1


# --- sequences and paths ---------------------------------------------------------------------------------------------

def test_a_slice_of_the_sessions_is_a_list_of_them():
    files = AgentXFiles(SHIPPED / "agentx")
    ids = [session.id for session in files]
    for sessions in (files, scaled_sessions(files, 0.5, 64)):
        assert [session.id for session in sessions[1:-1:2]] == ids[1:-1:2] and sessions[-1].id == ids[-1] and sessions[len(ids):] == []
        with pytest.raises(IndexError):
            sessions[len(ids)]


@pytest.mark.parametrize("read", [read_agentx, read_mooncake, read_csv, AgentXFiles])
@pytest.mark.parametrize("given", [5, None])
def test_what_is_no_path_is_refused(read, given):
    with pytest.raises(TraceError, match=f"path={given}: use the path of a file or folder"):
        list(read(given))


def test_an_answer_of_any_length_is_not_believed(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 10**11, "hash_ids": [1]}))
    with pytest.raises(TraceError, match=f"'output_length': is 100000000000; use a whole number, 0 or more and at most {MOST_TOKENS}"):
        list(read_mooncake(tmp_path / "m.jsonl"))


# --- conversations --------------------------------------------------------------------------------------------------

def arrival(start_s, ids, tokens=None):
    return TraceRequest(start_s, len(ids) * 512 if tokens is None else tokens, 9, tuple(ids), MOONCAKE_BLOCK)


def test_a_conversation_is_what_goes_on_from_a_prompt():
    first = arrival(0.0, [0, 1, 2, 3], tokens=3 * 512 + 5)  # the last block is a part of one, which comes back under another id
    other = arrival(1.0, [0, 7, 8])
    more = arrival(30.0, [0, 1, 2, 4, 5])
    system_only = arrival(31.0, [0])
    stranger = arrival(32.0, [0, 6])
    back = arrival(905.0, [0, 6, 10])
    late = arrival(2000.0, [0, 7, 8, 9])  # its conversation is over
    found = {session.id: session for session in conversations(iter([first, other, more, system_only, stranger, back, late]))}
    assert {name: len(session.items) for name, session in found.items()} == {"request-1": 2, "request-2": 1, "request-4": 1, "request-5": 2, "request-7": 1}
    assert [(r.start_s, r.think_time_s, r.hash_ids, r.input_tokens) for r in found["request-1"].items] == [
        (0.0, 0.0, (0, 1, 2), 1541), (30.0, 30.0, (0, 1, 2, 4, 5), 2560)]
    assert all(len(r.hash_ids) == r.input_tokens // 512 for session in found.values() for r in session.items)


@given(st.lists(st.tuples(st.integers(0, 300), st.lists(st.integers(0, 2), max_size=5)), max_size=25), st.sampled_from((10.0, 200.0)))
def test_conversations_hold_every_request_once_and_only_what_grows(moments, idle_s):
    requests = [arrival(float(at), ids) for at, ids in sorted(moments)]
    found = list(conversations(iter(requests), idle_s))
    begins = {int(session.id.partition("-")[2]): session for session in found}
    assert sorted((requests[number - 1].start_s + r.start_s, r.hash_ids) for number, s in begins.items() for r in s.items) == sorted(
        (r.start_s, r.hash_ids) for r in requests)
    for session in found:
        for before, after in zip(session.items, session.items[1:]):
            assert after.hash_ids[:len(before.hash_ids)] == before.hash_ids and after.start_s - before.start_s == after.think_time_s <= idle_s


def test_shipped_conversations_have_several_turns():
    found = list(conversations(read_mooncake(SHIPPED / "mooncake")))
    assert sum(len(session.items) for session in found) == 240 and max(len(session.items) for session in found) > 2


# --- memory ------------------------------------------------------------------------------------------------------------

def long_session(i):
    return Session(f"s{i}", 64, tuple(TraceRequest(float(k), 64 * 1000, 5, tuple(range(10**12 + k, 10**12 + k + 1000)), 64, 1.0, 1.0) for k in range(4)))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """560 sessions in more than 30 MB."""
    file = tmp_path_factory.mktemp("large") / "large.jsonl"
    write_agentx(file, map(long_session, range(560)))
    assert file.stat().st_size > 30e6
    return file


def most_bytes(work):
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_file_is_never_in_memory_when_read(large):
    assert most_bytes(lambda: sum(1 for _ in read_agentx(large))) < 3e6


def test_a_large_file_is_never_in_memory_when_replayed(large):
    """Eight live sessions of 56 kB of text each, in any order."""
    def replay():
        loop = ClosedLoop(AgentXFiles(large), concurrency=8)
        under_way = [turn for _, turn in loop.begin()]
        while loop.sessions_ended < 60:
            under_way += [turn for _, turn in loop.ended(under_way.pop(0))]

    assert most_bytes(replay) < 10e6


def test_a_generator_of_sessions_is_written_as_it_comes(tmp_path):
    assert most_bytes(lambda: write_agentx(tmp_path / "x.jsonl", map(long_session, range(200)))) < 3e6
