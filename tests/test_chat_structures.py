"""What an answer must look like, over HTTP: schemas in full, calls or text of a form, and calls alone."""
import json

import jsonschema
import pytest

pytest.importorskip("fastapi", reason="the server's packages are missing; run: pip install 'minengine[serve]'")

from serving import server  # noqa: E402
from test_chat import ADD, CHAT, GREEDY, USER, added_up, events  # noqa: E402


@pytest.fixture(scope="module")
def served():
    with server("smollm2") as running:
        yield running


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {"a": {"enum": [1, 2, "x"], "type": "string"}}, "required": ["a"]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}}, {"required": ["a"]}]},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}], "minimum": 7, "maximum": 8},
])
def test_what_the_grammar_library_would_pass_over_holds_too(served, schema):
    asked = {**GREEDY, "max_tokens": 40, "temperature": 2, "seed": 0, "n": 8,
             "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}
    answers = [json.loads(choice["message"]["content"]) for choice in served.post(CHAT, asked).json()["choices"]]
    assert len(answers) == 8
    for answer in answers:
        jsonschema.validate(answer, schema)


@pytest.mark.parametrize("form", [
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    lambda schema: {"structured_outputs": {"json": schema}},
], ids=["response_format", "structured_outputs"])
def test_with_tools_an_answer_has_the_form_or_is_calls(served, form):
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]}
    body = {"messages": [USER], "tools": [ADD], "parallel_tool_calls": False, "temperature": 3, "seed": 0, "n": 24, "max_tokens": 80, **form(schema)}
    kinds = set()
    for stream in (False, True):
        answer = served.post(CHAT, body | ({"stream": True, "n": 1} if stream else {}))
        choices = [dict(zip(("message", "finish_reason"), added_up(events(answer.text))))] if stream else answer.json()["choices"]
        for choice in choices:
            calls, content = choice["message"].get("tool_calls"), choice["message"]["content"]
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "tool_calls":
                assert not content and "error" not in calls[0]
            elif choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(content), schema)
    assert {"tool_calls", "stop"} <= kinds
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        made = served.post(CHAT, {**body, "n": 1, "tool_choice": choice}).json()["choices"][0]
        assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None, "calls that are demanded win"
    free = served.post(CHAT, {**body, "n": 1, "tool_choice": "none"}).json()["choices"][0]
    jsonschema.validate(json.loads(free["message"]["content"]), schema)


@pytest.mark.parametrize("endpoint, prompt", [(CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": "A person: "})])
def test_structured_outputs_hold_a_schema_in_full(served, endpoint, prompt):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, "x"], "type": "string"}, "b": {"anyOf": [{"type": "integer"}], "minimum": 8, "maximum": 9}},
              "required": ["a", "b"]}
    for asked in (schema, json.dumps(schema)):
        answer = served.post(endpoint, {**prompt, "temperature": 2, "seed": 0, "n": 4, "max_tokens": 40, "structured_outputs": {"json": asked}}).json()
        for choice in answer["choices"]:
            jsonschema.validate(json.loads(choice["text"] if "text" in choice else choice["message"]["content"]), schema)


def test_required_calls_end_as_calls(served):
    body = {"messages": [USER], "tools": [ADD], "tool_choice": "required", "temperature": 1.5, "seed": 3, "n": 6, "max_tokens": 200}
    choices = served.post(CHAT, body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices].count("tool_calls") >= 5
    for choice in choices:
        if choice["finish_reason"] == "tool_calls":
            assert not (choice["message"]["content"] or "").strip() and not any("error" in call for call in choice["message"]["tool_calls"])
