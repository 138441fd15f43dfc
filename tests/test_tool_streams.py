"""Tool calls while they come: the same for every split of the text, in linear time, and back from what was written."""
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from minengine.serve.tools import FORMATS, ToolCallParser, format_tool_call, parse_tool_calls
from minengine.serve.tools.source import Source
from test_tools import TOOLS, call, tool


def test_what_is_known_is_passed_on_at_once():
    parser = ToolCallParser("glm", TOOLS, False)
    assert parser.feed("hello <b").content == "hello <b" and parser.feed(" <tool").content == " " and parser.feed("s").content == "<tools"
    assert parser.feed(call(("a", "x"))[:-1]).calls == [] and parser.feed(">!" + call(("a", "y")) + call(name="g")).calls == [
        {"name": "f", "arguments": {"a": "x"}}, {"name": "f", "arguments": {"a": "y"}}, {"name": "g", "arguments": {}}]
    assert parser.feed("<tool_call>f").content == "" and parser.finish().content == "<tool_call>f"
    with pytest.raises(ValueError, match="finished"):
        parser.feed("x")


FRAGMENTS = st.sampled_from(["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "f",
    "g", "a", "u", "n", "12", " ", "\n", "<", "</", "{", "}",
                             "[", "]", '"', "\\", ",", ":", '{"name": "f", "parameters": ', '{"a": "x"}', '["', '"]', '{"k": "</arg_value>"}',
                             '"name"', '"type": "function"', "é", "🙂", "&lt;", "\\u00e9", "\\ud800",
                             call(("a", "x")), call(("u", '["x')), call(("o", '{"k": "</arg_value>"}')),
                                 '{"name": "g", "arguments": {"q": [1, "}"]}}', '"parameters"', "true", "-1.5e3", "NaN"])
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=25).map("".join)


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.sampled_from(FORMATS), st.sampled_from([None, TOOLS, []]), st.sampled_from([None, True, False]), st.data())
def test_every_split_gives_the_same(text, format, tools, reasoning, data):
    whole = ToolCallParser(format, tools, reasoning)
    whole.feed(text)
    whole.finish()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    for places in (cuts, range(len(text))):
        parser = ToolCallParser(format, tools, reasoning)
        deltas = [parser.feed(text[start:end]) for start, end in zip([0, *places], [*places, len(text)])] + [parser.finish()]
        assert (parser.content, parser.reasoning, parser.calls) == (whole.content, whole.reasoning, whole.calls)
        assert "".join(delta.content for delta in deltas) == whole.content and "".join(delta.reasoning for delta in deltas) == whole.reasoning
        assert [one for delta in deltas for one in delta.calls] == whole.calls
    json.dumps(whole.calls, allow_nan=False)
    if tools == [] and not reasoning:
        assert all(one["error"]["code"] == "undeclared_tool" for one in whole.calls)


@pytest.mark.parametrize("format, text", [
    ("glm", call(("a", "x</arg_valu"), ("o", '{"k": ["\\u00e9\\ud83d\\ude42", "\\"</arg_value>", -1.5e3, true]}'), ("u", '["\\u00'))),
    ("llama",
    'a {"name": "f", "parameters": {"a": "\\u00e9\\ud83d\\ude42 \\\\\\"}", "o": {"k": [-1.5e3, true, {}]}}} b {"name": "B", "x": "\\u00e9"}'),
])
def test_every_single_cut_gives_the_same(format, text):
    whole = parse_tool_calls(text, format, TOOLS)
    assert [one["name"] for one in whole[1]] == ["f"] and "error" not in whole[1][0]
    for places in ([cut] for cut in range(len(text))), [range(len(text))]:
        for cuts in places:
            parser = ToolCallParser(format, TOOLS)
            for start, end in zip([0, *cuts], [*cuts, len(text)]):
                parser.feed(text[start:end])
            parser.finish()
            assert (parser.content, parser.calls) == whole


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_parsed_text_loses_nothing_but_calls(text):
    """With no call in it, content is the text."""
    for format in FORMATS:
        content, calls = parse_tool_calls(text, format, TOOLS, False)
        if not calls and "<think>" not in text:
            assert content == text


HARD = {
    "literal": call(("a", "x<" * 30_000)), "json": call(("o", '{"k": "' + "x" * 60_000 + '"}')), "deep": call(("o", "[" * 30_000)),
    "never closed": call(("u", '["')) * 1000, "never closed either": call(("u", "[")) * 1000, "opened": "<tool_call>" * 5000,
    "junk": "<tool_call>f<arg_key>a</arg_key>x</tool_call>" * 1500,
    "white space": "<tool_call>f<arg_key>a</arg_key>" + " " * 60_000, "braces": "{" * 60_000, "heads": '{"name": "f", "parameters": ' * 2000,
    "half heads": '{"name": "' * 6000,
    "nested heads": '{"name": "f", "parameters": {"a":' * 2000, "number": '{"name": "f", "parameters": {"a": ' + "1" * 60_000,
    "calls": '{"name": "f", "parameters": {"a": "x"}}; ' * 1500,
}


@pytest.mark.parametrize("size", [1, 1000, 10**9])
@pytest.mark.parametrize("name", HARD)
def test_work_grows_with_the_text_alone(monkeypatch, name, size):
    """Characters that the source copies, and tags and values that it looks at, for each character of the text."""
    text, work = HARD[name], 0

    def counted(method, cost):
        def run(self, *arguments):
            nonlocal work
            result = method(self, *arguments)
            work += cost(self)
            return result
        return run

    monkeypatch.setattr(Source, "append", counted(Source.append, lambda source: len(source.text)))
    monkeypatch.setattr(Source, "back", counted(Source.back,
        lambda source: 0 if source.pos else len(source.text)))  # 0: the beginning of a joined text
    monkeypatch.setattr(Source, "json", counted(Source.json, lambda source: 1))
    for format in FORMATS:
        work, parser = 0, ToolCallParser(format, TOOLS, None if size == 1000 else False)
        for start in range(0, len(text), size):
            parser.feed(text[start:start + size])
        parser.finish()
        assert work <= 40 * len(text)


# Round trips -------------------------------------------------------------------------------------------------------------

CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<>&\"'{}[]\\/\n"), max_size=20)
PIECES = st.lists(CHARACTERS | st.sampled_from(["</arg_valu", "<arg_value>", "</tool_call>", "<tool_call>", "</think>", "&lt;", '{"name": ', "12",
    "null"]), max_size=4).map("".join)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PIECES,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PIECES, inner, max_size=3), max_leaves=8)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda key: key == key.strip(" \t\n\r") and "</arg_key>" not in key)


def schema_of(value):
    if isinstance(value, list):
        return {"type": "array"}
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", type(None): "null"}
    return {"type": kinds[type(value)]}


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from(FORMATS), CHARACTERS)
def test_what_was_written_is_read_back(arguments, format, around):
    if format == "glm":
        arguments = {k: v.replace("</arg_value>", "") if isinstance(v, str) else v for k, v in arguments.items()}
    around = around.replace("<", "").replace("{", "")
    declared = [tool({key: schema_of(value) for key, value in arguments.items()}, list(arguments))]
    text = around + format_tool_call(format, "f", arguments) * 2 + around
    assert parse_tool_calls(text, format, declared, False) == (around * 2, [{"name": "f", "arguments": arguments}] * 2)
