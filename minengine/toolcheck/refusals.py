"""Requests that are wrong. A client learns nothing from a 500, and little from a 400 that does not name the field."""
from __future__ import annotations

from typing import Any, Iterator

from .case import Case, Expect
from .shapes import DIGIT, obj

__all__ = ["refusals"]

SAVE = {"type": "function", "function": {"name": "save", "parameters": obj({"n": DIGIT})}}
USER = {"role": "user", "content": "Save a record."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "save", "arguments": '{"n": 1}'}}
GOOD = {"messages": [USER], "tools": [SAVE]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Saved."}


def refusals() -> Iterator[Case]:
    """Each wrong request; after it the server must still list its models."""
    for field, label, checks, body in (*_tools(), *_functions(), *_choices(), *_messages(), *_fields()):
        yield Case(id=f"bad-requests/{field}-{label}", category="bad-requests", checks=f"{checks}: 400 that names {field}", body=body,
                   expect=Expect(status=(400,), param=(field,)))
    for label, checks, text in (
            ("not-json", "text that is no JSON", "{'messages': []}"),
            ("empty", "no body at all", ""),
            ("half", "JSON that ends early", '{"messages": [{"role"'),
            ("list", "a list instead of an object", "[1, 2]"),
            ("null", "null instead of an object", "null")):
        yield Case(id=f"bad-requests/body-{label}", category="bad-requests", checks=f"{checks}: 400", body=text, expect=Expect(status=(400,)))


Entry = tuple[str, str, str, dict[str, Any]]  # field, label, what is wrong, body


def _tools() -> Iterator[Entry]:
    for label, checks, tools in (
            ("object", "tools as an object", {"save": SAVE}),
            ("text", "tools as text", "save"),
            ("number", "a number among the tools", [7]),
            ("null-entry", "null among the tools", [None]),
            ("no-function", "a tool without its function", [{"type": "function"}]),
            ("function-text", "a function that is text", [{"type": "function", "function": "save"}]),
            ("type", "a tool of unknown type", [{**SAVE, "type": "gadget"}])):
        yield "tools", label, checks, {**GOOD, "tools": tools}


def _functions() -> Iterator[Entry]:
    """The only tool is `save` with some members changed; None takes one away."""
    for label, checks, changes in (
            ("no-name", "a function without a name", {"name": None}),
            ("name-number", "a name that is a number", {"name": 7}),
            ("name-empty", "an empty name", {"name": ""}),
            ("description-list", "a description that is a list", {"description": ["x"]}),
            ("parameters-text", "parameters as text", {"parameters": "n"}),
            ("parameters-list", "parameters as a list", {"parameters": [1]}),
            ("strict-text", "strict as a word", {"strict": "perhaps"}),
            ("schema-type", "a type that there is not", {"parameters": obj({"n": {"type": "digit"}})}),
            ("schema-properties", "properties as a list", {"parameters": {"type": "object", "properties": ["n"]}}),
            ("schema-required", "required as a word", {"parameters": {**obj({"n": DIGIT}), "required": "n"}}),
            ("schema-enum", "an enum that is no list", {"parameters": obj({"n": {"enum": "red"}})}),
            ("schema-enum-empty", "an enum without values", {"parameters": obj({"n": {"enum": []}})}),
            ("schema-ref", "a reference to nothing, strict", {"strict": True, "parameters": obj({"n": {"$ref": "#/$defs/none"}})}),
            ("schema-ref-away", "a reference to another document, strict", {"strict": True, "parameters": obj({"n": {"$ref": "https://example.com/x"}})}),
            ("schema-pattern", "a pattern that is no expression", {"parameters": obj({"n": {"type": "string", "pattern": "(["}})}),
            ("schema-range", "a range that nothing lies in", {"parameters": obj({"n": {"type": "integer", "minimum": 5, "maximum": 4}})}),
            ("schema-lengths", "text longer than its maximum", {"parameters": obj({"n": {"type": "string", "minLength": 5, "maxLength": 4}})})):
        function = {field: value for field, value in {**SAVE["function"], **changes}.items() if value is not None}
        yield "tools", label, checks, {**GOOD, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _choices() -> Iterator[Entry]:
    gone = {"type": "function", "function": {"name": "delete_all"}}
    for label, checks, choice in (
            ("word", "a choice that there is not", "always"),
            ("number", "a choice that is a number", 1),
            ("undeclared", "the name of a tool that is not declared", gone),
            ("near", "a name that begins a declared one", {"type": "function", "function": {"name": "sav"}}),
            ("no-name", "a named choice without the name", {"type": "function", "function": {}}),
            ("no-function", "a named choice without the function", {"type": "function"})):
        yield "tool_choice", label, checks, {**GOOD, "tool_choice": choice}
    yield "tool_choice", "undeclared-streamed", "the name of a tool that is not declared, streamed", {**GOOD, "stream": True, "tool_choice": gone}
    yield "tool_choice", "required-no-tools", "required without tools", {"messages": [USER], "tool_choice": "required"}
    yield "tool_choice", "named-no-tools", "a named choice without tools", {"messages": [USER], "tool_choice": gone}


def _messages() -> Iterator[Entry]:
    yield "messages", "missing", "no messages", {"tools": [SAVE]}
    for label, checks, messages in (
            ("text", "messages as text", "hello"),
            ("empty", "an empty list", []),
            ("number", "a number among them", [7]),
            ("no-role", "a message without a role", [{"content": "x"}]),
            ("role", "a role that there is not", [{"role": "robot", "content": "x"}]),
            ("content", "content as a number", [{"role": "user", "content": 7}]),
            ("no-id", "a result without tool_call_id", [USER, _assistant([CALL]), {"role": "tool", "content": "x"}]),
            ("calls-text", "tool_calls as text", [USER, _assistant("save"), RESULT]),
            ("call-no-function", "a call without its function", [USER, _assistant([{"id": "call_1", "type": "function"}]), RESULT]),
            ("call-no-name", "a call without a name", [USER, _assistant([{**CALL, "function": {"arguments": "{}"}}]), RESULT]),
            ("arguments-object", "arguments as an object instead of text",
             [USER, _assistant([{**CALL, "function": {"name": "save", "arguments": {"n": 1}}}]), RESULT])):
        yield "messages", label, checks, {**GOOD, "messages": messages}


def _assistant(calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": calls}


def _fields() -> Iterator[Entry]:
    for field, label, value in (
            ("parallel_tool_calls", "word", "several"), ("max_tokens", "negative", -1), ("max_tokens", "word", "many"),
            ("temperature", "word", "hot"), ("temperature", "negative", -1), ("top_p", "above", 1.5),
            ("n", "zero", 0), ("stream", "word", "perhaps"), ("stop", "number", 7), ("logprobs", "word", "perhaps"), ("response_format", "type", {"type": "poem"})):
        yield field, label, f"{field} as {value!r}", {**GOOD, field: value}
