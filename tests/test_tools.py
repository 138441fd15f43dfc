"""Tool calls as text: whole, marked or content."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from minengine.request import RequestError
from minengine.serve.tools import FORMATS, ToolCallParser, check_tools, format_tool_call, parse_tool_calls, structural_tag
from minengine.serve.tools.values import MAX_DEPTH, load_json


def tool(properties=None, required=(), name="f", **others):
    function = {"name": name, "parameters": {"type": "object", "properties": properties or {}, "required": list(required)}}
    return {"type": "function", "function": {**function, **others}}


def call(*pairs, name="f"):
    """GLM's wire text, written out by hand."""
    return f"<tool_call>{name}" + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs) + "</tool_call>"


def argument(schema, text, **root):
    """What one GLM argument of this schema is read as, and the mark."""
    declared = tool({"a": schema})
    declared["function"]["parameters"].update(root)
    _, (result,) = parse_tool_calls(call(("a", text)), "glm", [declared])
    return result["arguments"]["a"], result.get("error", {}).get("code")


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [tool({"a": STRING, "n": INTEGER, "o": {"type": "object"}, "u": {"type": ["string", "integer", "array"]}}, ["a"]), tool(name="g")]


# GLM: values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["&lt;b&gt; &amp; <i>", "</arg_valu", '"quoted"', "12", "true", "null", "", " x \n", "def f():\n\treturn 'a' < b\n",
                                  "</tool_call>", "<tool_call>g</tool_call>", "<arg_key>", "</arg_key>", "</think>", '{"a": 1}', "é 漢 🙂", "\\n"])
def test_a_string_is_literal(text):
    assert argument(STRING, text) == (text, None)


@pytest.mark.parametrize("schema, text, value", [
    (INTEGER, " 12\n", 12), ({"type": "number"}, "-1.5e3", -1500.0), ({"type": "boolean"}, "false", False), ({"type": "null"}, "null", None),
    ({"type": "object"}, '{"x": {"y": [1, "</arg_value>"]}}', {"x": {"y": [1, "</arg_value>"]}}),
    ({"type": "array"}, ' ["}", "\\"", "\\u00e9"]\n', ["}", '"', "é"]), ({"type": "object"}, "{}", {}), ({"type": "array"}, "[]", []),
    ({"type": ["string", "integer"]}, "12", 12), ({"type": ["string", "integer"]}, "12 apples", "12 apples"),
    ({"type": ["string", "integer"]}, '"12"', '"12"'), ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, '["x"]', ["x"]),
    ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, "[1]", "[1]"),
    ({"type": ["string", "array"]}, '["x', '["x'), ({"type": ["string", "array"]}, '["x"] and more', '["x"] and more'),
    ({"type": ["string", "object"]}, '{"k": "</arg_value>"}', {"k": "</arg_value>"}),
    ({"enum": ["a b", 1, None]}, "a b", "a b"), ({"enum": ["a b", 1, None]}, "1", 1), ({"enum": ["1", 2]}, "1", "1"), ({"const": "k"}, "k", "k"),
    ({}, "x", "x"), ({}, "1", 1), ({}, '"x"', '"x"'), (True, "[1]", [1]), ({"$ref": "#/$defs/s"}, "12", "12"),
    ({"$ref": "#/$defs/r"}, '{"r": {"r": {}}}', {"r": {"r": {}}}),
    ({"allOf": [{"$ref": "#/$defs/s"}]}, "12", "12"), ({"oneOf": [{"$ref": "#/$defs/s"}, INTEGER]}, "12", 12), ({"$ref": "#/$defs/loop"}, "12", 12),
    ({"$ref": "#/nowhere"}, "12", 12), ({"anyOf": [STRING, {"type": "integer", "minimum": 100}]}, "12", "12"),
])
def test_a_value_is_read_by_its_schema(schema, text, value):
    defs = {"s": STRING, "r": {"type": "object", "properties": {"r": {"$ref": "#/$defs/r"}}}, "loop": {"$ref": "#/$defs/loop"}}
    assert argument(schema, text, **{"$defs": defs}) == (value, None)
    assert type(argument(schema, text, **{"$defs": defs})[0]) is type(value)


@pytest.mark.parametrize("schema, text, value", [
    (INTEGER, "twelve", "twelve"), (INTEGER, '"12"', '"12"'), (INTEGER, "1.5", 1.5), ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "Infinity", "Infinity"),
    ({"type": "object"}, '{"x": }', '{"x": }'), ({"type": "object"}, "[]", []), ({"type": "array", "items": INTEGER}, '["x"]', ["x"]),
    ({"type": "boolean"}, "1", 1),
    ({"enum": ["a", 1]}, "b", "b"), ({"const": 1}, "true", True), ({"type": "object", "required": ["k"]}, "{}", {}),
    ({"type": "integer", "minimum": 3}, "2", 2),
    ({"type": "array", "minItems": 1}, "[]", []), ({"type": "string", "maxLength": 2}, "abc", "abc"), (INTEGER, "", ""),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "1", 1), ({"type": "object", "additionalProperties": False}, '{"k": 1}', {"k": 1}),
])
def test_a_value_of_the_wrong_kind_is_marked_and_kept(schema, text, value):
    assert argument(schema, text) == (value, "malformed_arguments")


def test_a_tool_that_is_not_strict_is_held_to_its_form_alone():
    loose = [tool({"a": INTEGER}, ["b"], strict=False)]
    assert parse_tool_calls(call(("a", "x")), "glm", loose) == ("", [{"name": "f", "arguments": {"a": "x"}}])
    assert parse_tool_calls(call(("a", "1")), "glm", loose) == ("", [{"name": "f", "arguments": {"a": 1}}])
    _, (broken,) = parse_tool_calls("<tool_call>f<arg_key>a</arg_key>1</tool_call>", "glm", loose)
    assert broken["error"]["code"] == "malformed_arguments"


def test_a_missing_argument_is_named():
    _, (result,) = parse_tool_calls(call(("n", "1")), "glm", TOOLS)
    assert result["error"] == {"code": "malformed_arguments", "message": "arguments: 'a' is required and missing; call 'f' again with it"}
    _, (result,) = parse_tool_calls(call(("a", "x"), ("n", "y")), "glm", TOOLS)
    assert result["error"]["message"].startswith("arguments.n: does not satisfy its declared schema")


def test_an_undeclared_tool_is_never_dropped():
    text = "a" + call(("x", "1"), name="nosuch") + "b"
    content, (result,) = parse_tool_calls(text, "glm", TOOLS)
    assert content == "ab" and result["name"] == "nosuch" and result["arguments"] == {"x": 1}
    assert result["error"] == {"code": "undeclared_tool", "message": "name='nosuch': no such tool is declared; use one of these: f, g"}
    assert parse_tool_calls(text, "glm", None)[1] == [{"name": "nosuch", "arguments": {"x": 1}}]
    assert parse_tool_calls(text, "glm", [])[1][0]["error"]["code"] == "undeclared_tool"


# GLM: form ---------------------------------------------------------------------------------------------------------------


def test_text_around_calls_is_content_to_the_letter():
    text = "\nLet me. " + call(("a", "1")) + "\n\n" + call(("a", "2")) + call(name="g") + " </tool_call> <arg_key> end"
    content, calls = parse_tool_calls(text, "glm", TOOLS)
    assert content == "\nLet me. \n\n </tool_call> <arg_key> end"
    assert calls == [{"name": "f", "arguments": {"a": "1"}}, {"name": "f", "arguments": {"a": "2"}}, {"name": "g", "arguments": {}}]


def test_white_space_between_tags_does_not_count():
    text = "<tool_call> f \n<arg_key> a </arg_key>\n<arg_value>x</arg_value>\t<arg_key>n</arg_key> <arg_value> 1 </arg_value>\n</tool_call>"
    assert parse_tool_calls(text, "glm", TOOLS) == ("", [{"name": "f", "arguments": {"a": "x", "n": 1}}])


@pytest.mark.parametrize("text", ["<tool_call>f", "<tool_call>f<arg_key>a</arg_key><arg_value>x", call(("a", "x"))[:-1], "<tool_c", "<tool_call>",
                                  "<tool_call>f<arg_key>o</arg_key><arg_value>{\"a\": [",
                                  "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>junk"])
def test_an_unfinished_call_is_content(text):
    assert parse_tool_calls("so: " + text, "glm", TOOLS) == ("so: " + text, [])


def test_a_lost_closing_tag_makes_the_open_call_text():
    opened = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>"
    assert parse_tool_calls(opened + call(name="g"), "glm", TOOLS) == (opened, [{"name": "g", "arguments": {}}])
    assert parse_tool_calls("<tool_call><tool_call>g</tool_call>", "glm", TOOLS) == ("<tool_call>", [{"name": "g", "arguments": {}}])


@pytest.mark.parametrize("inside", ["<arg_key>n</arg_key>1", "<arg_key>n</arg_key></arg_value>", "junk", "<arg_value>1</arg_value>"])
def test_text_between_arguments_makes_a_call_malformed(inside):
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>{inside}</tool_call>."
    content, (result,) = parse_tool_calls(text, "glm", TOOLS)
    assert content == "." and result["arguments"] == {"a": "x"} and result["error"]["code"] == "malformed_arguments"


def test_a_closing_tag_inside_a_string_cannot_be_represented():
    content, (result,) = parse_tool_calls(call(("a", "x</arg_value>y")), "glm", TOOLS)
    assert content == "" and result["arguments"] == {"a": "x"} and result["error"]["code"] == "malformed_arguments"
    # What follows looks like the end of the call: nothing can tell that text was lost.
    assert parse_tool_calls(call(("a", "x</arg_value></tool_call>y")), "glm", TOOLS) == ("y</arg_value></tool_call>",
        [{"name": "f", "arguments": {"a": "x"}}])
    with pytest.raises(ValueError, match=r"^arguments\.a: holds '</arg_value>'.*object or an array$"):
        format_tool_call("glm", "f", {"a": "x</arg_value>y"})
    assert argument({"anyOf": [{"type": "array", "items": INTEGER}, STRING]}, '["</arg_value>"]') == ('["', "malformed_arguments")  # a string after all
    inside = {"o": {"k": "x</arg_value>y"}}
    assert parse_tool_calls(format_tool_call("glm", "f", inside), "glm")[1] == [{"name": "f", "arguments": inside}]


@pytest.mark.parametrize("name, arguments", [(" f", {}), ("f<arg_key>", {}), ("</tool_call>", {}), ("f", {" a": 1}), ("f", {"</arg_key>": 1})])
def test_what_glm_cannot_hold_is_refused(name, arguments):
    with pytest.raises(ValueError, match="format cannot hold"):
        format_tool_call("glm", name, arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_json_is_refused(format):
    with pytest.raises(ValueError):
        format_tool_call(format, "f", {"a": float("nan")})


def test_formats_are_named():
    for use in (lambda: parse_tool_calls("", "xml"), lambda: format_tool_call("xml", "f", {}), lambda: structural_tag("xml", [])):
        with pytest.raises(ValueError, match="format='xml': unknown; use one of glm, llama"):
            use()


# Llama -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, arguments", [
    ('{"name": "f", "parameters": {"a": "x"}}', {"a": "x"}), ('{"name":"f","arguments":{}}', {}), ('{ "name" : "f" ,\n"parameters" : { } }', {}),
    ('{"type": "function", "name": "f", "parameters": {"a": "}]\\"{"}}', {"a": '}]"{'}),
    ('{"name": "f", "parameters": {"a": {"b": [1, null]}}}', {"a": {"b": [1, None]}}),
    ('{"name": "f", "parameters": {"a": "&lt; < é \\u00e9 \\ud83d\\ude42"}}', {"a": "&lt; < é é 🙂"}),
])
def test_a_llama_call(text, arguments):
    assert parse_tool_calls(text, "llama") == ("", [{"name": "f", "arguments": arguments}])


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 3}', '{"name": "f"}', '{"name": "f", "parameters": {"a": 1}',
    '{"name": "f", "parameters": {"a": }}', '{"name": "f", "parameters": [1]}',
                                  '{"name": "f", "parameters": {}, "id": 1}', '{"name": "f", "parameters": "{}"}', '{"name": f, "parameters": {}}',
                                  "{", '{"type": "x", "name": "f", "parameters": {}}',
                                  '{"name": "f", "parameters": {"a": "\n"}}', '{"name": "f", "parameters": {"a": 01}}',
                                  '{"name": "f", "parameters": {a: 1}}', '{"name": "f", "parameters": {"a" 1}}',
                                  '{"name": "f", "parameters": {"a": "\\x"}}', '{"name": "f", "parameters": {"a": "\\u12g4"}}',
                                  '{"name": "f", "parameters": {"a": [1}}}', '{"name": "f", "parameters": {"a": 1,}}'])
def test_other_braces_are_content(text):
    assert parse_tool_calls(text, "llama") == (text, [])


def test_several_llama_calls_stand_anywhere():
    text = 'So {"x": {"name": "f", "parameters": {"a": "1"}}; {"name": "g", "parameters": {}}\n[{"name": "h", "arguments": {}}]'
    content, calls = parse_tool_calls(text, "llama", TOOLS)
    assert content == 'So {"x": ; \n[]' and [(c["name"], c.get("error", {}).get("code")) for c in calls] == [("f", None), ("g", None),
        ("h", "undeclared_tool")]
    _, (result,) = parse_tool_calls('{"name": "f", "parameters": {"a": 1}}', "llama", TOOLS)
    assert result["error"]["code"] == "malformed_arguments" and result["arguments"] == {"a": 1}


def test_a_broken_head_hides_no_call_behind_it():
    assert parse_tool_calls('{ "name": "{"name": "f", "parameters": {}}', "llama") == ('{ "name": "', [{"name": "f", "arguments": {}}])


# JSON's corners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [('{"k": 1, "k": 2}', {"k": 2}), ("[1e400, -1e400]", [sys.float_info.max, -sys.float_info.max]),
    ("[12345678901234567890]", [12345678901234567890]),
                                         ('["\\ud800", "\\ud83d\\ude42", "a\\udc00"]', ["\ufffd", "🙂", "a\ufffd"]),
                                         ('{"\\ud800": 1}', {"\ufffd": 1}), ("[" + "9" * 5000 + "]", [int(sys.float_info.max)])])
def test_values_that_python_and_json_see_differently(text, value):
    for format, wire in (("glm", call(("a", text))), ("llama", f'{{"name": "f", "parameters": {{"a": {text}}}}}')):
        _, (result,) = parse_tool_calls(wire, format)
        assert result["arguments"]["a"] == value
        json.dumps(result, allow_nan=False).encode()


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "[NaN]", "01", "{'a': 1}", "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)])
def test_what_is_not_json(text):
    with pytest.raises(ValueError):
        load_json(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 100_000])
def test_depth_has_a_limit_and_no_crash(depth):
    text = "[" * depth + "]" * depth
    _, error = argument({"type": "array"}, text)
    assert error == (None if depth <= MAX_DEPTH else "malformed_arguments")
    depth -= 1  # the arguments themselves are one level
    _, (result,) = parse_tool_calls(f'{{"name": "f", "parameters": {{"a": {"[" * depth + "]" * depth}}}}}', "llama")
    assert ("error" in result) == (depth + 1 > MAX_DEPTH)


def test_a_schema_that_branches_into_itself_is_checked_once_a_place():
    tree = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": n} for n in (0, 1, 1, 1)] + [{"type": "array",
        "items": {"$ref": "#/$defs/t"}, "minItems": 2}]}
    text = "[" * 50 + "1" + "]" * 50
    assert argument({"$ref": "#/$defs/t"}, text, **{"$defs": {"t": tree}})[1] == "malformed_arguments"


# Reasoning ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reasoning, text, expected", [
    (True, "thought</think>said", ("thought", "said")), (True, "<think>thought</think>said", ("thought", "said")),
    (True, "never closed", ("never closed", "")),
    (False, "<think>thought</think>said", ("thought", "said")), (False, "\n<think>thought", ("thought", "")),
    (False, "a</think>b", ("", "a</think>b")), (False, "a<think>b", ("", "a<think>b")),
    (None, "thought</think>said", ("thought", "said")), (None, "<think>thought</think>said</think>", ("thought", "said</think>")),
    (None, "said", ("", "said")), (None, "<think>x", ("x", "")),
])
@pytest.mark.parametrize("format", FORMATS)
def test_reasoning(format, reasoning, text, expected):
    parser = ToolCallParser(format, None, reasoning)
    parser.feed(text)
    parser.finish()
    assert (parser.reasoning, parser.content) == expected


@pytest.mark.parametrize("format, text", [("glm", call(("a", "</think>"))), ("llama", '{"name": "f", "parameters": {"a": "</think>"}}')])
def test_a_call_before_any_end_of_reasoning_is_no_reasoning(format, text):
    assert parse_tool_calls(text, format, TOOLS) == ("", [{"name": "f", "arguments": {"a": "</think>"}}])
    parser = ToolCallParser(format, TOOLS, True)  # here it is
    parser.feed("<tool_call>g</tool_call></think>" + text)
    assert parser.reasoning == "<tool_call>g</tool_call>" and len(parser.calls) == 1


# Tools and imports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools, place", [
    ("f", "tools"), ([1], r"tools\[0\]"), ([{"type": "web_search"}], r"tools\[0\]"), ([tool(), tool()], r"tools\[1\]\.function\.name='f'"),
    ([tool(name="a b")], r"tools\[0\]\.function\.name"),
    ([tool(name="x" * 65)], r"tools\[0\]\.function\.name"), ([tool(strict="yes")], r"tools\[0\]\.function\.strict"),
    ([tool(parameters=[])], r"tools\[0\]\.function\.parameters"),
    ([tool({"a": {"type": "str"}})], r"tools\[0\]\.function\.parameters\.properties\.a\.type"),
    ([tool({"a": {"enum": []}})], r"tools\[0\]\.function\.parameters\.properties\.a\.enum"),
    ([tool({"a": {"items": 3}})], r"tools\[0\]\.function\.parameters\.properties\.a\.items: "),
    ([tool({"a": {"anyOf": [{"minimum": "x"}]}})], r"tools\[0\]\.function\.parameters\.properties\.a\.anyOf\[0\]\.minimum"),
    ([tool({"a": {"maxLength": -1}})], r"tools\[0\]\.function\.parameters\.properties\.a\.maxLength"),
    ([tool({"a": {"type": []}})], r"tools\[0\]\.function\.parameters\.properties\.a\.type"),
    ([tool(required="a")], None), ([tool({"a": {"required": "b"}})], r"tools\[0\]\.function\.parameters\.properties\.a\.required"),
    ([tool({"a": {"multipleOf": 0}})], r"tools\[0\]\.function\.parameters\.properties\.a\.multipleOf"),
])
def test_tools_are_checked(tools, place):
    if place is None:
        check_tools(tools)
        return
    with pytest.raises(RequestError, match=f"^{place}"):
        check_tools(tools)


def test_imports_stay_light():
    code = "import sys, minengine.serve.tools; print(*{'torch', 'fastapi', 'xgrammar', 'jsonschema', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
