"""What the suite reads from the wire, its client and runner, its table and its command."""
import json
import threading
from collections import Counter
from dataclasses import replace

import pytest
from toolcheck_answers import MARK, START, STREAM, call, case, chunk, completion, double, part, stream_of

from minengine.cli import main
from minengine.results import ResultError, run_facts
from minengine.toolcheck import Case, Client, Expect, NoAnswer, all_cases, from_stream, from_whole, judge, load, rates, run, save, stored, table

# --- answers from their bytes -----------------------------------------------------------------------------------------------


def test_deltas_assemble_to_the_whole():
    events = [chunk(role="assistant", content=""), chunk(content="Hi"), chunk(tool_calls=[START]), chunk(tool_calls=[part(0, ": 3}")]),
              chunk(tool_calls=[part(1, "{}", id="call_2", type="function", name="other", error=MARK)]), chunk("tool_calls"),
              json.dumps({"choices": [], "usage": {"completion_tokens": 7}}), "[DONE]"]
    whole = {"choices": [{"message": {"content": "Hi", "tool_calls": [call(), call("other", "{}", "call_2", error=MARK)]}, "finish_reason": "tool_calls"}],
             "usage": {"completion_tokens": 7}}
    assert from_stream(events) == from_whole(json.dumps(whole))
    assert from_stream(events).calls == (call(), call("other", "{}", "call_2", error=MARK))


@pytest.mark.parametrize("words, events", [
    ("without [DONE]", [chunk("stop", content="x")]),
    ("no choice", ["[DONE]"]),
    ("data after", [chunk("stop"), "[DONE]", "{}"]),
    ("follows its finish_reason", [chunk("stop"), chunk(content="x"), "[DONE]"]),
    ("carries an error", [chunk(content="x"), '{"error": {"message": "oops"}}']),
    ("no chunk", ["{"]),
    ("no chunk", ["[]"]),
    ("has index 1 after 0", [chunk(tool_calls=[{**START, "index": 1}])]),
    ("has index None", [chunk(tool_calls=[{**START, "index": None}])]),
    ("changes its name", [chunk(tool_calls=[START]), chunk(tool_calls=[part(0, name="other")])]),
    ("changes its id", [chunk(tool_calls=[START]), chunk(tool_calls=[part(0, id="call_2")])]),
    ("content is int", [chunk(content=7)]),
])
def test_broken_streams_are_said_to_be(words, events):
    assert words in from_stream(events).broken


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": []}', '{"choices": [{"message": null}]}', '{"choices": [{"message": {"content": 7}}]}',
                                  '{"choices": [{"message": {"tool_calls": {"0": 1}}}]}'])
def test_a_body_that_is_no_completion_is_malformed(text):
    assert judge(case("auto"), from_whole(text)).kind == "malformed"


# --- the client and the runner ----------------------------------------------------------------------------------------------


def test_the_client_reads_whole_and_streamed_answers_and_sends_its_key():
    def respond(text):
        return stream_of(*STREAM) if json.loads(text).get("stream") else (200, {}, list(completion(call())))  # byte by byte

    with double(respond) as (url, seen):
        client = Client(url.removesuffix("/v1"), api_key="secret")
        assert client.models() == ["m"]
        assert client.chat({"a": "ü"}).calls == client.chat({"stream": True}).calls == (call(),)
    assert seen[0][0] == "/v1/chat/completions" and seen[0][1]["Authorization"] == "Bearer secret" and seen[0][2] == '{"a": "ü"}'


def test_events_that_come_in_odd_pieces():
    pieces = list("".join(f": a ping\n\nevent: x\ndata: {event}\n\n" for event in STREAM).rstrip())  # the last event ends with the connection
    with double(lambda text: (200, {"Content-Type": "text/event-stream"}, pieces)) as (url, _):
        assert Client(url).chat({}).calls == (call(),)


def test_a_busy_server_is_asked_again():
    replies = [(429, {"Retry-After": "0"}, ["{}"]), (429, {"Retry-After": "0"}, ["{}"]), (200, {}, [completion(call())])]
    with double(lambda text: replies.pop(0)) as (url, seen):
        assert Client(url).chat({}).calls == (call(),) and len(seen) == 3
    with double(lambda text: (429, {"Retry-After": "0"}, ["{}"])) as (url, seen), pytest.raises(NoAnswer, match="busy: 5 answers of 429; use a smaller"):
        Client(url).chat({})


def test_what_does_not_answer_is_said_in_a_sentence():
    with double(lambda text: (200, {}, [])) as (url, _):
        pass
    with pytest.raises(NoAnswer, match="the connection failed .*; see that the server runs"):
        Client(url).models()
    with double(lambda text: (200, {}, []), models=()) as (url, _), pytest.raises(NoAnswer, match="lists no model; give"):
        Client(url).models()
    for url in ("ftp://x", "http://", "http://127.0.0.1:0/v1", "http://127.0.0.1:99999/v1"):
        with pytest.raises(ValueError, match=f"base_url={url}: is no address; use"):
            Client(url)
    with pytest.raises(ValueError, match="timeout=0: use"):
        Client("http://127.0.0.1:1", timeout_s=0)


def test_a_cut_connection_and_a_silent_server():
    held = threading.Event()
    with double(lambda text: (200, {}, ['{"choices"', None])) as (url, _), pytest.raises(NoAnswer, match="the connection failed"):
        Client(url).chat({})
    with double(lambda text: (held.wait(), (200, {}, []))[1]) as (url, _):
        try:
            with pytest.raises(NoAnswer, match="no whole answer within 0.05 s"):
                Client(url, timeout_s=0.05).chat({})
        finally:
            held.set()


def outcomes_of(cases, respond, **more):
    with double(respond, **more) as (url, seen):
        return run(cases, Client(url), "m", max_tokens=33, concurrency=4), seen


def test_the_runner_fills_in_the_model_and_keeps_the_order():
    cases = [replace(case(), id=f"types/{i}") for i in range(20)] + [case(max_tokens=5)]
    outcomes, seen = outcomes_of(cases, lambda text: (200, {}, [completion(call())]))
    assert [o.id for o in outcomes] == [c.id for c in cases] and {o.verdict.kind for o in outcomes} == {"ok"}
    bodies = [json.loads(text) for _, _, text in seen]
    assert {b["model"] for b in bodies} == {"m"} and Counter(b["max_tokens"] for b in bodies) == {33: 20, 5: 1}
    assert all(o.request is None and o.answer is None for o in outcomes)
    for name in ("max_tokens", "concurrency"):
        with pytest.raises(ValueError, match=f"{name}=0: use 1"):
            run(cases, Client("http://127.0.0.1:1"), "m", **{name: 0})


@pytest.mark.parametrize("kind, wholes", [("ok", [3]), ("mismatch", [4, 4]), ("ok", [4, 5])])
def test_twins_that_differ_are_a_mismatch_unless_the_whole_answer_changes_by_itself(kind, wholes):
    def respond(text):
        return stream_of(*STREAM) if json.loads(text).get("stream") else (200, {}, [completion(call(arguments=f'{{"n": {wholes.pop(0)}}}'))])

    (outcome,), _ = outcomes_of([case(expect=Expect(both=True))], respond)
    assert outcome.verdict.kind == kind and not wholes


def test_a_streamed_twin_is_judged_as_well():
    def respond(text):
        return stream_of(chunk("stop", content="Saved."), "[DONE]") if json.loads(text).get("stream") else (200, {}, [completion(call())])

    (outcome,), _ = outcomes_of([case(expect=Expect(both=True))], respond)
    assert outcome.verdict.kind == "lost" and outcome.verdict.detail.startswith("streamed: the choice demands")


def test_no_answer_is_a_verdict_and_a_raw_body_is_sent_as_it_is():
    bad = Case(id="bad-requests/x", category="bad-requests", checks="x", body="{'", expect=Expect(status=(400,)))
    (outcome,), seen = outcomes_of([bad], lambda text: (400, {}, ['{"error": {"message": "no JSON"}}']))
    assert outcome.verdict.kind == "ok" and seen[0][2] == "{'"
    (outcome,), _ = outcomes_of([case()], lambda text: (200, {}, [None]))
    assert outcome.verdict.kind == "no_answer" and outcome.request["model"] == "m" and outcome.answer is None
    (outcome,), _ = outcomes_of([bad], lambda text: (400, {}, ['{"error": {"message": "no JSON"}}']), models=())
    assert outcome.verdict.kind == "no_answer" and outcome.verdict.detail.startswith("after the answer: ")


def test_rates_and_table_add_up_and_survive_a_file(tmp_path):
    replies = {"Save 1": (200, {}, [completion(call())]), "Save 2": (200, {}, [completion(call(arguments="{"))]),
               "Save 3": (200, {}, [completion(finish="stop")]), "Save 4": (500, {}, ["{}"]), "Save 5": (200, {}, [completion(finish="length")])}
    cases = [replace(case(text=text), id=f"{category}/{text}", category=category) for category in ("types", "enums") for text in replies]
    outcomes, _ = outcomes_of(cases, lambda text: replies[json.loads(text)["messages"][0]["content"]])
    types, enums, total = rates(outcomes)
    assert (types.category, enums.category, total.category) == ("types", "enums", "all")
    assert (total.cases, total.called, total.calls, total.cut, total.at_stake, total.call_faults) == (10, 4, 4, 2, 6, 4)
    assert total.faults == {"malformed": 2, "lost": 2, "leaked": 0, "mismatch": 0, "wrong_status": 2, "no_answer": 0}
    assert total.interval[0] < 4 / 6 < total.interval[1]
    text = table(outcomes)
    assert "Malformed or lost calls: 4 of 6 cases in which a call was at stake, 66.7% (95% interval 30.0 to 90.3)." in text
    assert "Faults of any kind: 6 of 10 cases, 60.0%" in text and text.count("\n| ") == 3
    save(tmp_path / "x.json", outcomes, model="m")
    assert load(tmp_path / "x.json") == outcomes and json.loads((tmp_path / "x.json").read_text())["model"] == "m"
    (kept,) = keep(tmp_path, outcomes)
    assert kept.outcomes == outcomes and kept.flags == ["--num-threads", "1"] and kept.date and kept.machine and kept.command == "minengine toolcheck"
    refused = [o for o in outcomes if o.verdict.kind == "wrong_status"]
    assert "no call at stake" in table(refused) and rates(refused)[-1].interval == (0, 1)
    with pytest.raises(ValueError, match="outcomes: is empty"):
        table([])


def keep(folder, outcomes):
    save(folder / "toolcheck-x.json", outcomes, model="m", flags=["--num-threads", "1"], seed=0, max_tokens=160, **run_facts("minengine toolcheck"))
    return stored(folder)


def test_kept_runs_are_those_of_the_command_or_an_error():
    assert all(run.outcomes and run.commit for run in stored())


@pytest.mark.parametrize("text, words", [("{", "toolcheck-a.json"), ("{}", "toolcheck-a.json"), ('{"outcomes": [{}]}', "toolcheck-a.json")])
def test_a_kept_run_that_is_none_is_named(tmp_path, text, words):
    (tmp_path / "toolcheck-a.json").write_text(text)
    with pytest.raises(ResultError, match=words):
        stored(tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------------


def test_list_prints_every_case_and_sends_nothing(capsys):
    assert main(["toolcheck", "--list", "--only", "enums"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(c.category == "enums" for c in all_cases()) and lines[0].startswith("enums/words/required: one of three words; required")


def test_the_command_prints_the_table_and_the_failing_requests(capsys, tmp_path):
    with double(lambda text: (200, {}, [completion(call("gone"))])) as (url, seen):
        (tmp_path / "key").write_text("# of Ann\nsecret\nother\n", encoding="utf-8-sig")
        files = ["--api-key-file", str(tmp_path / "key"), "--json", str(tmp_path / "out.json")]
        code = main(["toolcheck", "--base-url", url, "--only", "enums", "--cases", "12", *files])
    out = capsys.readouterr().out
    assert code == 1
    assert "Malformed or lost calls: 12 of 12" in out and "malformed: enums/words/required (one of three words" in out
    assert "'gone', which is not declared" in out and 'request: {"model": "m", "max_tokens": 160' in out and "and 2 more; --json FILE writes all" in out
    assert seen[0][1]["Authorization"] == "Bearer secret" and len(load(tmp_path / "out.json")) == 12


@pytest.mark.parametrize("words, flags", [
    ("only=colours: is no category", ["--only", "colours"]),
    ("cases=0: use 1", ["--cases", "0"]),
    ("seed=-1: use 0", ["--seed", "-1"]),
    ("model=x: the server lists m; use", ["--model", "x"]),
    ("concurrency=0: use 1", ["--concurrency", "0"]),
    ("timeout=0.0: use", ["--timeout", "0"]),
    ("are of a server that it starts", ["--tool-call-parser", "glm"]),
    ("holds no key; write one a line", ["--api-key-file", "/dev/null"]),
    ("No such file", ["--json", "/nowhere/x.json", "--cases", "1"]),
])
def test_options_that_cannot_be_are_refused_in_a_sentence(words, flags, capsys):
    with double(lambda text: (200, {}, [completion(call())])) as (url, _):
        assert main(["toolcheck", "--base-url", url, *flags]) == 2
    assert words in capsys.readouterr().err
