"""The suite itself: there are enough cases, and its judge reaches every verdict."""
import json
from collections import Counter
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from toolcheck_answers import MARK, NAMED, answer, call, case

from minengine.toolcheck import CATEGORIES, KINDS, Answer, Expect, Verdict, all_cases, compare, judge, select

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


def test_a_schema_that_was_not_promised_is_not_held_against_a_call():
    loose = case(expect=Expect(loose=True))
    marked = call(error={"code": "malformed_arguments", "message": "x"})
    assert {judge(loose, answer(c)).kind for c in (call(arguments='{"n": 99}'), call(arguments="{}"), marked)} == {"ok"}
    assert {judge(loose, answer(c)).kind for c in (call(arguments="[3]"), call(arguments="{"), call("gone"))} == {"malformed"}


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
