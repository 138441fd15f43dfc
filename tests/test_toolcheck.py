"""The suite itself: its judge reaches every verdict, its client reads what servers send and survives what they should not, its table adds up."""
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from jsonschema import Draft202012Validator

from minengine.cli import main
from minengine.toolcheck import (CATEGORIES, KINDS, Answer, Case, Client, Expect, NoAnswer, Verdict, all_cases, compare, from_stream, from_whole, judge,
                                 load, rates, run, save, select, table)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
SAVE = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}


def case(choice="required", *, expect=None, text="Save.", **more):
    body = {"messages": [{"role": "user", "content": text}], "tools": [SAVE, OTHER], "tool_choice": choice, **more}
    return Case(id="types/x", category="types", checks="x", body=body, expect=expect or Expect())


def call(name="save", arguments='{"n": 3}', id="call_1", **more):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def answer(*calls, finish="tool_calls", **more):
    return Answer(calls=calls, finish_reason=finish, **more)


NAMED = {"type": "function", "function": {"name": "save"}}
MARK = {"code": "undeclared_tool", "message": "no such tool"}


# --- the cases --------------------------------------------------------------------------------------------------------------


def test_there_are_enough_cases_and_each_is_its_own():
    cases = all_cases()
    counts = Counter(c.category for c in cases)
    assert len(cases) >= 500 and list(counts) == list(CATEGORIES) and min(counts.values()) >= 10
    assert len({c.id for c in cases}) == len({json.dumps([c.category, c.body, c.expect.both], sort_keys=True) for c in cases}) == len(cases)
    assert all(c.id.startswith(c.category + "/") and c.checks and "\n" not in c.checks for c in cases)


def test_most_cases_demand_a_call():
    bodies = [c.body for c in all_cases() if c.category != "bad-requests"]
    assert sum(b.get("tool_choice") == "required" or isinstance(b.get("tool_choice"), dict) for b in bodies) > 0.75 * len(bodies)


def test_the_list_depends_on_the_seed_alone_and_on_it_only_in_sampled_cases():
    assert all_cases(3) == all_cases(3)
    changed = [(a, b) for a, b in zip(all_cases(0), all_cases(1), strict=True) if a != b]
    assert len(changed) > 100
    assert all(replace(a, body=b.body) == b and {**a.body, "seed": 0} == {**b.body, "seed": 0} and a.body["temperature"] == 1 for a, b in changed)
    with pytest.raises(ValueError, match="seed=-1: use"):
        all_cases(-1)


def test_schemas_are_schemas_where_the_request_is_not_meant_to_be_wrong():
    for c in all_cases():
        if c.category != "bad-requests":
            for tool in c.body["tools"]:
                Draft202012Validator.check_schema(tool["function"].get("parameters", {}))


def test_select_keeps_categories_and_spreads_evenly():
    cases = all_cases()
    assert {c.category for c in select(cases, ["enums", "refs"])} == {"enums", "refs"}
    few = select(cases, limit=60)
    assert len(few) == 60 and {c.category for c in few} == set(CATEGORIES)
    assert select(cases, limit=10**6) == cases
    with pytest.raises(ValueError, match="only=colours: is no category; use types"):
        select(cases, ["colours"])
    with pytest.raises(ValueError, match="cases=0: use 1"):
        select(cases, limit=0)


# --- the judge --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice, given", [
    ("required", answer(call())),
    ("required", answer(call(), call("other", "{}", "call_2"))),
    ("required", answer(call(), finish="length")),  # the next call was cut
    ("required", answer(finish="length", content="<tool_call>save<arg_key>")),
    ("required", answer(call("gone", error=MARK))),
    (NAMED, answer(call())),
    (NAMED, answer(call(), finish="stop")),
    ("auto", answer(finish="stop", content="Hello.")),
    ("auto", answer(finish="stop", completion_tokens=3)),
    ("auto", answer(finish="stop", reasoning="hm", completion_tokens=50)),
    ("auto", answer(finish="stop", content='{"name": "save"}')),
    ("auto", answer(finish="stop", content="[1]")),
    ("none", answer(finish="stop", content="<tool_call>")),
])
def test_good_answers_are_ok(choice, given):
    assert judge(case(choice), given) == Verdict(kind="ok", calls=len(given.calls), cut=given.finish_reason == "length")


@pytest.mark.parametrize("kind, words, choice, given", [
    ("malformed", "no JSON", "required", answer(call(arguments='{"n": 3'))),
    ("malformed", "no JSON", "required", answer(call(arguments=""))),
    ("malformed", "a key stands twice", "required", answer(call(arguments='{"n": 3, "n": 3}'))),
    ("malformed", "NaN is no JSON", "required", answer(call(arguments='{"n": NaN}'))),
    ("malformed", "no object", "required", answer(call(arguments="[3]"))),
    ("malformed", "schema at n: '3' is not of type", "required", answer(call(arguments='{"n": "3"}'))),
    ("malformed", "schema at the object: 'n' is a required", "required", answer(call(arguments="{}"))),
    ("malformed", "schema at the object", "required", answer(call("other", '{"n": 3}'))),
    ("malformed", "not declared, without a mark", "required", answer(call("gone"))),
    ("malformed", "has no code and message", "required", answer(call("gone", error={"code": 1}))),
    ("malformed", "marked malformed_arguments", "required", answer(call(error={"code": "malformed_arguments", "message": "x"}))),
    ("malformed", "the choice names 'save'", NAMED, answer(call("other", "{}"))),
    ("malformed", "has id", "required", answer(call(id=""))),
    ("malformed", "has id", "required", answer(call(), call())),
    ("malformed", "has id", "required", answer(call(id=None))),
    ("malformed", "has type 'tool'", "required", answer({**call(), "type": "tool"})),
    ("malformed", "has no function", "required", answer("save")),
    ("malformed", "must have a name", "required", answer(call(name=None))),
    ("malformed", "arguments as text", "required", answer(call(arguments={"n": 3}))),
    ("malformed", "1 calls, and the choice is none", "none", answer(call())),
    ("malformed", "finish_reason is 'stop' beside 1", "required", answer(call(), finish="stop")),
    ("malformed", "finish_reason is None", "auto", answer(finish=None, content="x")),
    ("malformed", "broke", "auto", answer(broken="it broke")),
    ("lost", "demands a call", "required", answer(finish="stop", content="Saved.")),
    ("lost", "demands a call", NAMED, answer(finish="stop")),
    ("lost", "there is no call", "auto", answer(content="x")),
    ("lost", "shows nothing", "auto", answer(finish="stop", completion_tokens=40)),
    ("leaked", "<tool_call> stands", "auto", answer(finish="stop", content="Well: <tool_call>save</tool_call>")),
    ("leaked", "</tool_call> stands", "required", answer(call(), content="</tool_call>")),
    ("leaked", "content is a call", "auto", answer(finish="stop", content=' {"name": "save", "parameters": {"n": 3}}')),
    ("wrong_status", "status 500 instead of 200: oops", "required", Answer(status=500, error={"message": "oops"})),
    ("wrong_status", "no error object", "required", Answer(status=500, broken="the body has no error object")),
])
def test_bad_answers_are_caught_by_their_kind(kind, words, choice, given):
    verdict = judge(case(choice), given)
    assert verdict.kind == kind and words in verdict.detail and verdict.calls == len(given.calls)


def test_two_calls_where_one_is_allowed():
    two = answer(call(), call(id="call_2"))
    assert judge(case(parallel_tool_calls=True), two).kind == "ok"
    assert judge(case(parallel_tool_calls=False), two).detail == "2 calls, and parallel_tool_calls is false"


def test_a_mark_that_the_conversation_speaks_of_is_no_leak():
    said = answer(finish="stop", content="It is <arg_key>.")
    assert judge(case("auto", text="What is <arg_key>?"), said).kind == "ok"
    assert judge(case("auto"), said).kind == "leaked"


def test_a_refusal_must_name_its_field():
    bad = case(expect=Expect(status=(400,), param=("tools",)))

    def refusal(param, message="wrong"):
        return judge(bad, Answer(status=400, error={"message": message, "param": param}))

    assert {refusal(p).kind for p in ("tools", "tools.0.function", "tools[0].function.name")} == {"ok"}
    assert {refusal(p).kind for p in (None, "messages", "toolset")} == {"wrong_status"}
    assert refusal("tools", "").detail == "status 400 without a message"
    assert judge(bad, Answer(status=422, error={"message": "x", "param": "tools"})).kind == "wrong_status"
    assert judge(bad, answer(call())).detail == "status 200 instead of 400: a completion"
    assert judge(bad, Answer(status=400, broken="the body has no error object")).kind == "wrong_status"
    assert judge(case(expect=Expect(status=(200, 400))), answer(call("gone"))).kind == "malformed"


def test_compare_sees_what_a_client_would_and_not_the_ids():
    base = answer(call(), content="a")
    assert compare(base, answer(call(id="call_9"), content="a")) is None
    for other in (answer(call(arguments='{"n":3}'), content="a"), answer(content="a"), answer(call(), content="b"), answer(call(error=MARK), content="a"),
                  answer(call(), content="a", finish="length"), answer(call(), content="a", reasoning="r"), Answer(status=400)):
        assert compare(base, other)


def test_every_kind_of_verdict_has_a_meaning():
    assert all(KINDS.values())
    with pytest.raises(ValueError, match="kind='fine'"):
        Verdict(kind="fine")


# --- answers from their bytes -----------------------------------------------------------------------------------------------


def chunk(finish=None, **delta):
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def part(index, arguments="", **more):
    return {"index": index, "function": {"arguments": arguments, **({"name": more.pop("name")} if "name" in more else {})}, **more}


START = part(0, '{"n"', id="call_1", type="function", name="save")


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


@contextmanager
def double(respond, models=("m",)):
    """A server of canned answers: `respond(text of the body)` gives status, headers and the body's pieces."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send(200, {}, [json.dumps({"data": [{"id": name} for name in models]})])

        def do_POST(self):
            seen.append((self.path, dict(self.headers), text := self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.send(*respond(text))

        def send(self, status, headers, pieces):
            self.send_response(status)
            for item in {"Content-Type": "application/json", "Transfer-Encoding": "chunked", **headers}.items():
                self.send_header(*item)
            self.end_headers()
            for piece in pieces:
                if piece is None:  # cut the connection
                    self.close_connection = True
                    return
                self.wfile.write(f"{len(piece.encode()):x}\r\n".encode() + piece.encode() + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            pass  # clients that give up are the point of some tests

    seen = []
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(*calls, content=None, finish="tool_calls"):
    return json.dumps({"choices": [{"message": {"content": content, "tool_calls": list(calls)}, "finish_reason": finish}], "usage": {"completion_tokens": 9}})


def stream_of(*events):
    return 200, {"Content-Type": "text/event-stream; charset=utf-8"}, [f"data: {event}\r\n\r\n" for event in events]


STREAM = (chunk(role="assistant"), chunk(tool_calls=[START]), chunk(tool_calls=[part(0, ": 3}")]), chunk("tool_calls"), "[DONE]")


def test_the_client_reads_whole_and_streamed_answers_and_sends_its_key():
    def respond(text):
        return stream_of(*STREAM) if json.loads(text).get("stream") else (200, {}, list(completion(call())))  # byte by byte

    with double(respond) as (url, seen):
        client = Client(url.removesuffix("/v1"), api_key="secret")
        assert client.models() == ["m"]
        assert client.chat({"a": "ü"}).calls == client.chat({"stream": True}).calls == (call(),)
    assert seen[0][0] == "/v1/chat/completions" and seen[0][1]["Authorization"] == "Bearer secret" and seen[0][2] == '{"a": "ü"}'


def test_events_that_come_in_odd_pieces():
    pieces = list("".join(f": comment\nevent: x\ndata: {event}\n\n" for event in STREAM))
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
    assert "no call at stake" in table([o for o in outcomes if o.verdict.kind == "wrong_status"])
    with pytest.raises(ValueError, match="outcomes: is empty"):
        table([])


# --- the command ------------------------------------------------------------------------------------------------------------


def test_list_prints_every_case_and_sends_nothing(capsys):
    assert main(["toolcheck", "--list", "--only", "enums"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(c.category == "enums" for c in all_cases()) and lines[0].startswith("enums/words/required: one of three words; required")


def test_the_command_prints_the_table_and_the_failing_requests(capsys, tmp_path):
    with double(lambda text: (200, {}, [completion(call("gone"))])) as (url, seen):
        (tmp_path / "key").write_text("secret\n")
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
    ("is empty; write the key", ["--api-key-file", "/dev/null"]),
    ("No such file", ["--json", "/nowhere/x.json", "--cases", "1"]),
])
def test_options_that_cannot_be_are_refused_in_a_sentence(words, flags, capsys):
    with double(lambda text: (200, {}, [completion(call())])) as (url, _):
        assert main(["toolcheck", "--base-url", url, *flags]) == 2
    assert words in capsys.readouterr().err
