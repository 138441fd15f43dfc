"""Grammars of tool calls, asked of xgrammar itself: whatever one accepts is read as calls whose arguments satisfy their schema."""
from __future__ import annotations

import builtins
import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from minengine.request import RequestError
from minengine.serve.tools import FORMATS, format_tool_call, held_schema, json_beside_calls, parse_tool_calls, structural_tag
from minengine.serve.tools.combine import Conflict, merge
from minengine.serve.tools.enforce import enforceable
from minengine.serve.tools.pattern import plain_pattern

xgrammar = pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}

# What a walk writes: every byte, and pieces that break a careless grammar when one lets them through.
PIECES = ["</arg_value>", "</tool_call>", "<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</", "arg_value>", '{"name": ', '"parameters"',
    '"arguments": ', '{"name"', "\\u0061", "\\ud800", "1e400",
          "null", "true", '"a":', '","', '":"', '{"', '"}', "[[", "]]", " ", "\n", "-0", "0.5", "10", "</think>", "<think>", "f", "g", "ab", "xx",
          "2024-01-01", "é"]
STOP = 256 + len(PIECES)
TOKENS = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b""]
CLOSERS = ["</arg_value></tool_call>", "</arg_value>", '"', "}", "]", "</tool_call>", ":", "0", "a", ",", "@b", " 12", "P1W", "x"]


@pytest.fixture(scope="module")
def compiler():
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, vocab_size=len(TOKENS), stop_token_ids=[STOP]),
        max_threads=1)


def tool(schema, name="f", **others):
    return {"type": "function", "function": {"name": name, "parameters": schema, **others}}


def argument(schema, **root):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **root}


def accepts(compiler, tag, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
    return matcher.accept_string(text) and matcher.is_completed()


def walk(compiled, seed):
    """A random text that the grammar accepts; None where none was found soon enough."""
    rng, written = random.Random(seed), bytearray()
    matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, len(TOKENS))
    longest = rng.randrange(4, 24)
    for step in range(120):
        if matcher.is_completed() and (step > longest or rng.random() < 0.2):
            break
        if step > longest and (closer := next((c for c in rng.sample(CLOSERS, len(CLOSERS)) if matcher.fork().accept_string(c)), None)):
            matcher.accept_string(closer)
            written += closer.encode()
            continue
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(len(TOKENS)) if words[token // 32] >> token % 32 & 1 and token != STOP]
        if not allowed:
            break
        pieces = [token for token in allowed if token >= 256]
        token = rng.choice(pieces if pieces and rng.random() < 0.6 else allowed)
        assert matcher.accept_token(token)
        written += TOKENS[token]
    try:
        return written.decode() if matcher.is_completed() else None
    except UnicodeDecodeError:
        return None


TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": INTEGER,
    "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["v"]}}}
CASES = {
    "string": argument(STRING), "integer": argument(INTEGER), "number": argument(NUMBER), "any": argument({}), "true": argument(True),
    "boolean": argument({"type": "boolean"}), "null": argument({"type": "null"}),
    "lengths": argument({"type": "string", "minLength": 2, "maxLength": 5}), "least length": argument({"type": "string", "minLength": 3}),
    "length alone": argument({"minLength": 3}), "nullable length": argument({"type": ["string", "null"], "minLength": 3}),
    "pattern": argument({"type": "string", "pattern": "^[a-z]+$"}), "pattern of all": argument({"type": "string", "pattern": "^.*$"}),
    "pattern of none": argument({"type": "string", "pattern": "^[^ab]+$"}),
    "pattern in full": argument({"type": "string", "pattern": r"^[\s\S]+$"}),
    "pattern of words": argument({"type": "string", "pattern": r"^\w+ \d{2}$"}),
    "pattern of spaces": argument({"type": "string", "pattern": r"^a\s[\s\w]b$"}),
    "pattern of escapes": argument({"type": "string", "pattern": r'^[x"\\\t]x+$'}), "pattern open": argument({"type": "string", "pattern": "ab|x"}),
    "pattern or number": argument({"anyOf": [{"type": "string", "pattern": "^[0-9]+$"}, {"type": "integer", "minimum": 5}]}),
    "pattern inside": argument({"type": "object", "properties": {"s": {"type": "string", "pattern": "^.{2}$"}}, "required": ["s"]}),
    "least": argument({"type": "integer", "minimum": 3}), "bounds": argument({"type": "integer", "minimum": -5, "maximum": 1200}),
    "open bounds": argument({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7}),
    "broken bounds": argument({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 9.5}),
    "number bounds": argument({"type": "number", "minimum": -0.5, "maximum": 12.25}),
    "number open": argument({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    "steps": argument({"type": "integer", "multipleOf": 3}), "bound alone": argument({"minimum": 3}),
    "array": argument({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3}), "any array": argument({"type": "array"}),
    "tuple": argument({"type": "array", "prefixItems": [INTEGER, STRING], "items": {"type": "null"}, "minItems": 1}),
    "long tuple": argument({"type": "array", "prefixItems": [INTEGER], "minItems": 2}),
    "object": argument({"type": "object", "properties": {"q": INTEGER, "r": STRING}, "required": ["r"]}),
    "any object": argument({"type": "object"}), "map": argument({"type": "object", "additionalProperties": INTEGER}),
    "open object": argument({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}),
    "required alone": argument({"type": "object", "required": ["z"]}), "counted": argument({"type": "object",
    "properties": {"q": INTEGER, "r": STRING}, "minProperties": 1, "maxProperties": 1}),
    "named": argument({"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INTEGER}),
    "by pattern": argument({"type": "object", "patternProperties": {"^x": INTEGER}}),
    "short names": argument({"type": "object", "propertyNames": {"maxLength": 2}}),
    "untyped": argument({"properties": {"q": INTEGER}, "required": ["q"]}),
    "union": argument({"type": ["string", "integer"]}), "list or text": argument({"anyOf": [{"type": "array", "items": STRING}, STRING]}),
    "object or text": argument({"anyOf": [{"type": "object", "properties": {"a": STRING}, "required": ["a"]}, STRING]}),
    "beside anyOf": argument({"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 0}]}),
    "one of two required": argument({"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
    "oneOf types": argument({"oneOf": [INTEGER, STRING]}), "oneOf constants": argument({"oneOf": [{"type": "object",
    "properties": {"k": {"const": "a"}, "v": INTEGER}, "required": ["k"]},
    {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]}),
    "oneOf names": argument({"oneOf": [{"type": "object", "properties": {"x": INTEGER}, "required": ["x"]},
    {"type": "object", "properties": {"y": INTEGER}, "required": ["y"]}]}),
    "allOf": argument({"allOf": [INTEGER, {"minimum": 5}]}), "allOf objects": argument({"allOf": [{"type": "object", "properties": {"x": INTEGER},
    "required": ["x"]}, {"properties": {"y": STRING}, "required": ["y"]}]}),
    "allOf beside": argument({"minimum": 5, "allOf": [{"$ref": "#/$defs/i"}]}, **{"$defs": {"i": INTEGER}}),
    "enum": argument({"enum": ["a b", 1, None, {"x": 1}, "<x>"]}), "enum and type": argument({"enum": [1, "a"], "type": "string"}),
    "enum and bound": argument({"enum": [1, 9], "minimum": 5}), "enum like JSON": argument({"enum": ["1", "null", " x "]}),
    "const": argument({"const": {"a": [1, 2]}}), "enum inside": argument({"type": "array", "items": {"enum": ['q"\\\n', "é"]}}),
    "ref beside": argument({"$ref": "#/$defs/i", "minimum": 5, "description": "d"}, **{"$defs": {"i": INTEGER}}),
    "refs in two places": {"type": "object", "properties": {"a": {"$ref": "#/$defs/s"}, "o": {"type": "array", "items": {"$ref": "#/$defs/s"}}},
    "$defs": {"s": {"type": "string", "maxLength": 3}}},
    "odd ref": argument({"$ref": "#/definitions/a~1b"}, definitions={"a/b": INTEGER}),
    "ref chain": argument({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"$ref": "#/$defs/y"}, "y": INTEGER}}),
    "recursion": argument({"$ref": "#/$defs/t"}, **{"$defs": TREE["$defs"]}),
    "recursive root": {"type": "object", "properties": {"a": {"$ref": "#"}, "v": STRING}}, "root ref": TREE,
    "root anyOf": {"anyOf": [{"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}, {"type": "object", "properties": {"y": STRING}}]},
    "root map": {"type": "object", "additionalProperties": INTEGER}, "root any": {"type": "object"}, "root empty": {},
    "root closed": {"type": "object", "properties": {}, "additionalProperties": False},
    "root by pattern": {"type": "object", "patternProperties": {"^x+$": STRING}}, "root enum": {"enum": [{"a": 1, "b": "x"}, {}]},
    "optional": {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c c": {"type": "boolean"}}},
    "remarks": argument({"type": "string", "title": "t", "default": "x", "nullable": True}),
    **{name: argument({"type": "string", "format": name}) for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6",
    "uuid", "uri", "json-pointer", "relative-json-pointer")},
}
REFUSED = {
    "pattern  ": {"type": "string", "pattern": "(?=a)b"}, "pattern   ": {"type": "string", "pattern": r"(a)\1"},
    "pattern    ": {"type": "string", "pattern": r"\bb"}, "type": {"allOf": [STRING, INTEGER]},
    **{"pattern" + " " * n: {"type": "string", "pattern": pattern} for n, pattern in enumerate(('^"$', r"\\", r"\n", r"\x22", r"\cA", "(?i)a"), 5)},
    "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True}, "contains": {"type": "array", "contains": INTEGER},
    "not": {"not": STRING}, "if": {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}},
    "dependentRequired": {"type": "object", "properties": {"q": INTEGER, "r": STRING}, "dependentRequired": {"q": ["r"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False}, "multipleOf": {"type": "number", "multipleOf": 0.5},
    "multipleOf ": {"type": "integer", "multipleOf": 3, "minimum": 10}, "minLength": {"type": "string", "pattern": "^a+$", "minLength": 3},
    "format": {"type": "string", "format": "unheard-of"},
    "maxLength": {"type": "string", "format": "date", "maxLength": 3}, "pattern": {"type": "string", "pattern": "a^b"},
    "pattern ": {"type": "string", "format": "date", "pattern": "^2"},
    "oneOf": {"oneOf": [INTEGER, NUMBER]}, "oneOf ": {"oneOf": [{"type": "object", "properties": {"x": INTEGER}},
    {"type": "object", "properties": {"x": INTEGER}}]}, "$ref": {"$ref": "https://example.org/schema"}, "$ref ": {"$ref": "#/$defs/nowhere"},
    "$ref  ": {"$ref": "#/$defs/loop"},
    "patternProperties": {"type": "object", "patternProperties": {"^x+$": INTEGER, "^xy*$": STRING}},
    "patternProperties ": {"type": "object", "properties": {"x": STRING}, "patternProperties": {"^x$": INTEGER}},
    "minProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
    "required": {"type": "object", "properties": {}, "required": ["z"], "additionalProperties": False}, "const": {"const": 1, "type": "string"},
    "enum ": {"enum": [1, 1 << 63]}, "const ": {"const": {"x": [-10**30]}},
    "enum": {"enum": [1, 2], "minimum": 5}, "minimum": {"type": "integer", "minimum": 1e20}, "anyOf": {"type": "integer", "anyOf": [STRING]},
    "additionalProperties": {"allOf": [{"properties": {"x": INTEGER}, "additionalProperties": False}, {"properties": {"y": INTEGER}}]},
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_what_a_grammar_accepts_satisfies_the_schema(compiler, name, format):
    tools = [tool(CASES[name], strict=True), tool({"type": "object", "properties": {}}, name="ff")]
    compiled = {choice: compiler.compile_structural_tag(json.dumps(structural_tag(format, tools, choice))) for choice in ("required", "auto")}
    schema, found = jsonschema.Draft202012Validator(CASES[name]), 0
    for seed in range(40):
        choice = "auto" if seed % 5 == 0 else "required"
        if (text := walk(compiled[choice], seed)) is None:
            continue
        _, calls = parse_tool_calls(text, format, tools, False)
        assert calls or choice == "auto", text
        for call in calls:
            assert "error" not in call, (text, call)
            assert call["name"] == "ff" or schema.is_valid(call["arguments"]), (text, call)
            found += call["name"] == "f"
    assert found, "no walk made a call"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_grammar_cannot_enforce_is_refused_by_name(compiler, name, format):
    schema = argument(REFUSED[name], **{"$defs": {"loop": {"$ref": "#/$defs/loop"}}})
    keyword = name.strip().replace("$", "[$]")
    place = rf"^tools\[1\]\.function\.parameters\.properties\.a(\.\w+\[\d\])?\.{keyword}: "
    with pytest.raises(RequestError, match=rf"{place}.*set tools\[1\]\.function\.strict to false$"):
        structural_tag(format, [tool({}, name="g"), tool(schema, strict=True)])
    for loose in ({}, {"strict": False}):  # as far as it goes, and not at all
        compiler.compile_structural_tag(json.dumps(structural_tag(format, [tool(schema, **loose)])))


@pytest.mark.parametrize("schema, place", [({"type": "string", "pattern": "<b>"}, "pattern"), ({"type": "string", "pattern": "^[!-~]$"}, "pattern"),
    ({"type": "string", "pattern": r"\x3c"}, "pattern"), ({"enum": ["x</arg_value>y"]}, "enum"),
                                           ({"anyOf": [STRING, {"type": "array", "items": {"type": "string", "pattern": "^a$"}}]}, "anyOf")])
def test_what_only_glm_cannot_hold(schema, place):
    structural_tag("llama", [tool(argument(schema), strict=True)])
    with pytest.raises(RequestError, match=rf"^tools\[0\]\.function\.parameters\.properties\.a\.{place}: "):
        structural_tag("glm", [tool(argument(schema), strict=True)])


def test_values_that_glm_cannot_write_are_left_out_and_no_other_is_a_refusal(compiler):
    some, none = {"enum": ["</arg_value>", "b"]}, {"enum": ["</arg_value>", "a</arg_value>"]}
    tag = structural_tag("glm", [tool(argument(some))], "required")
    assert accepts(compiler, tag, format_tool_call("glm", "f", {"a": "b"})) and not accepts(compiler, tag, format_tool_call("glm", "f", {"a": "c"}))
    for strict in ({}, {"strict": True}):
        with pytest.raises(RequestError, match=r"properties\.a\.enum: has a value with '</arg_value>', which the format cannot hold; leave it out$"):
            structural_tag("glm", [tool(argument(none), **strict)])
    structural_tag("glm", [tool(argument(none), strict=False)])
    structural_tag("glm", [tool(argument({"type": "array", "items": none}))])  # within JSON the parser would read it: no reason to refuse


@pytest.mark.parametrize("schema, place", [(argument(STRING, maxProperties=0), "maxProperties"),
    ({"type": "object", "minProperties": 1, "properties": {"a": STRING}}, "minProperties"),
    (argument(STRING, **{"properties": {" a": STRING}}), "properties")])
def test_what_only_glm_cannot_count(schema, place):
    with pytest.raises(RequestError, match=rf"^tools\[0\]\.function\.parameters\.{place}: "):
        structural_tag("glm", [tool(schema, strict=True)])


@pytest.mark.parametrize("schema", [argument({"type": "string", "pattern": "("}), argument({"type": "integer", "minimum": 5, "maximum": 3}),
    {"type": "string"}])
def test_a_schema_without_a_grammar_is_refused(schema):
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters"):
        structural_tag("llama", [tool(schema, strict=True)])


def test_where_every_schema_holds_none_is_told_to_be_less_strict():
    for schema, says in (({"type": "array", "uniqueItems": True}, "s.uniqueItems: cannot be enforced by a grammar; leave it out$"),
                         (False, "s=false: allows nothing"),
                         ({"type": "string", "format": "iso-8601"}, "s.format: 'iso-8601' is none that a grammar knows; use one of date, ")):
        with pytest.raises(RequestError, match=f"^{says}"):
            held_schema(schema, "s", None, strict=True, arguments=False)
    assert held_schema(True, "s", None, strict=True, arguments=False) == {}


def test_branches_that_differ_in_themselves_alone_are_refused():
    loops = {name: {"type": "object", "properties": {"k": {"$ref": f"#/$defs/{name}"}}, "required": ["k"]} for name in "xy"}
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters: refers to itself"):
        structural_tag("glm", [tool(argument({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}, **{"$defs": loops}))])


# The way back: what satisfies a schema can be written ---------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("<>&\"'{}\\/\n"),
    max_size=12).filter(lambda text: "</arg_value>" not in text)
INNER = st.recursive(st.none() | st.booleans() | st.integers(-10**6, 10**6) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=5)
ARGUMENTS = st.fixed_dictionaries({"s": WORDS, "e": st.sampled_from(["a b", "<x>", 1, None])}, optional={
    "i": st.integers(), "b": st.booleans(), "o": st.dictionaries(WORDS, INNER, max_size=3), "l": st.lists(WORDS, max_size=3),
    "u": WORDS.filter(lambda text: not text.strip().isdigit()) | st.integers()})
DECLARED = {"type": "object", "properties": {"s": STRING, "e": {"enum": ["a b", "<x>", 1, None]}, "i": INTEGER, "b": {"type": "boolean"},
    "o": {"type": "object"}, "l": {"type": "array", "items": STRING}, "u": {"anyOf": [STRING, INTEGER]}}, "required": ["s", "e"]}


@settings(max_examples=150, deadline=None)
@given(ARGUMENTS, st.sampled_from(FORMATS))
def test_what_satisfies_the_schema_can_be_written_and_is_read_back(compiler, arguments, format):
    arguments = {name: arguments[name] for name in DECLARED["properties"] if name in arguments}  # in the declared order
    tools = [tool(DECLARED, strict=True)]
    text = format_tool_call(format, "f", arguments)
    assert accepts(compiler, structural_tag(format, tools, "required"), text)
    assert parse_tool_calls(text, format, tools, False) == ("", [{"name": "f", "arguments": arguments}])


# Choices -----------------------------------------------------------------------------------------------------------------

TOOLS = [tool(argument(STRING)), tool({"type": "object", "properties": {}}, name="g")]
CALL = {format: format_tool_call(format, "f", {"a": "x"}) for format in FORMATS}
OTHER = {format: format_tool_call(format, "g", {}) for format in FORMATS}
UNDECLARED = {format: format_tool_call(format, "h", {}) for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_choices(compiler, format):
    call, other, stray = CALL[format], OTHER[format], UNDECLARED[format]
    named = {"type": "function", "function": {"name": "g"}}
    expected = {  # text: by auto, required, none, named
        "hello": (True, False, True, False), call: (True, True, False, False), other: (True, True, False, True),
        f"so {call}": (True, False, False, False), f"{call}\n{other}": (True, True, False, False), stray: (False, False, False, False),
            f"{call} {stray}": (False, False, False, False), call + other: (True, True, False, False), f"{call} done": (True, False, False, False),
            f"{call}\n": (True, False, False, False), f"{call}\n\n{other}": (True, False, False, False), f"\n{call}": (True, False, False, False),
    }
    for text, wanted in expected.items():
        got = tuple(accepts(compiler, structural_tag(format, TOOLS, choice), text) for choice in ("auto", "required", "none", named))
        assert got == wanted, text
    for choice in ("auto", "required"):
        tag = structural_tag(format, TOOLS, choice, parallel_tool_calls=False)
        assert accepts(compiler, tag, call) and not accepts(compiler, tag, call + other) and not accepts(compiler, tag, call + "\n")
    assert structural_tag(format, []) is None and structural_tag(format, None, "none") is None


PERSON = {"type": "object", "properties": {"name": STRING, "age": INTEGER}, "required": ["name"], "additionalProperties": False}
ANY_OBJECT = {"type": "object", "additionalProperties": True}


@pytest.mark.parametrize("format, schema", [*((format, PERSON) for format in FORMATS), ("glm", ANY_OBJECT), ("glm", {})])
def test_json_beside_calls_is_read_as_one_or_the_other(compiler, format, schema):
    form = {"type": "or", "elements": [json_beside_calls(format, schema, "s"), structural_tag(format, TOOLS, "required")["format"]]}
    tag, found = {"type": "structural_tag", "format": form}, 0
    for text, wanted in {'{"name": "Bob"}': True, CALL[format]: True, f"{CALL[format]}\n{OTHER[format]}": True, "hello": False, UNDECLARED["glm"]: False,
                         '{"name": "<tool_call>f"}': format == "llama", '{"<tool_call>": 1}': False, f'{{"name": "Bob"}}{CALL[format]}': False}.items():
        assert accepts(compiler, tag, text) == wanted, text
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    for text in filter(None, (walk(compiled, seed) for seed in range(40))):
        content, calls = parse_tool_calls(text, format, TOOLS, False)
        assert not any("error" in call for call in calls) and (not content.strip() if calls else jsonschema.validate(json.loads(content), schema) is None), text
        found += not calls
    assert found


@pytest.mark.parametrize("format, schema, says", [
    ("llama", ANY_OBJECT, "s: leaves names free"), ("llama", {}, "s: leaves names free"), ("llama", {"type": "array"}, "s: leaves names free"),
    ("llama", {"anyOf": [PERSON, {"$ref": "#/$defs/d0"}], "$defs": {"d0": ANY_OBJECT}}, "s: leaves names free"),
    ("llama", argument(STRING, properties={"parameters": STRING}), 's: asks for "parameters"'), ("glm", {"enum": ["<tool_call>"]}, "s: asks for <tool_call>"),
])
def test_json_that_may_read_as_a_call_is_refused_beside_calls(format, schema, says):
    with pytest.raises(RequestError, match=f"^{says}.*; .*or send no tools$"):
        json_beside_calls(format, schema, "s")


def test_text_of_llama_holds_nothing_that_reads_as_a_call(compiler):
    tag = structural_tag("llama", TOOLS)
    for text in ('{ "name": "h", "parameters": {}}', '{"name":"h","parameters":{}}', '{"type": "function", "name": "h", "arguments": {}}'):
        assert parse_tool_calls(text, "llama", TOOLS)[1] and not accepts(compiler, tag, text)
    assert accepts(compiler, tag, 'Look: {"age": 3} and { "name": "Bob" }')


def test_reasoning_of_glm(compiler):
    enabled, auto, disabled = (structural_tag("glm", TOOLS, "required", reasoning=reasoning) for reasoning in (True, None, False))
    assert accepts(compiler, enabled, "hm</think>" + CALL["glm"]) and not accepts(compiler, enabled, CALL["glm"])
    assert accepts(compiler, auto, "<think>hm</think>" + CALL["glm"]) and accepts(compiler, auto, CALL["glm"])
    assert not accepts(compiler, disabled, "<think>hm</think>" + CALL["glm"])


@pytest.mark.parametrize("format", FORMATS)
def test_strict_false_is_any_object_and_no_parameters_are_none(compiler, format):
    loose = structural_tag(format, [tool(argument(INTEGER), strict=False)], "required")
    for arguments in ({"a": "x"}, {"b": {"c": [1]}}, {}):
        assert accepts(compiler, loose, format_tool_call(format, "f", arguments))
    none = structural_tag(format, [{"type": "function", "function": {"name": "f"}}], "required")
    assert accepts(compiler, none, format_tool_call(format, "f", {})) and not accepts(compiler, none, format_tool_call(format, "f", {"a": 1}))


@pytest.mark.parametrize("choice, tools, place", [("any", TOOLS, "tool_choice='any'"), ("required", [], "tool_choice='required'"),
    ({"type": "function", "function": {"name": "h"}}, TOOLS, r"tool_choice\.function\.name='h'"), ({"type": "tool"}, TOOLS, "tool_choice="),
    (None, TOOLS, "tool_choice=None")])
def test_a_wrong_choice_is_refused(choice, tools, place):
    with pytest.raises(RequestError, match=f"^{place}"):
        structural_tag("glm", tools, choice)


def test_without_xgrammar_the_install_line_is_printed(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RequestError, match=r"run pip install 'minengine\[serve\]'$"):
        structural_tag("glm", TOOLS)


# Pieces ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern, plain, tagless", [("^a.b$", r"^a[^\n\r\u2028\u2029]b$", r"^a[^\n\r\u2028\u2029<]b$"),
    (r"[^x]\S", r"[^x]\S", r"[^x<][^\s<]"), (r"\.[.$^]\$", r"\.[.$^]\$", r"\.[.$^]\$"), (r"[\w\W]", r"[\w\W]", "[^<]"),
    ("(?<n>a)", "(?<n>a)", "(?<n>a)")])
def test_patterns_are_made_plain(pattern, plain, tagless):
    assert (plain_pattern(pattern, False), plain_pattern(pattern, True)) == (plain, tagless)


def test_merging():
    assert merge({"type": ["integer", "string"], "minimum": 1, "required": ["a"]},
        {"type": "number", "minimum": 3, "required": ["b"]}) == {"type": "integer", "minimum": 3, "required": ["a", "b"]}
    assert merge({"enum": [1, 2]}, {"enum": [2, True]}) == {"enum": [2]} and merge({"maxLength": 3},
        {"maxLength": 2}) == {"maxLength": 2} and merge({"type": "string"}, {"type": "null"}) == {"type": []}
    for one, other in (({"pattern": "a"}, {"pattern": "b"}), ({"items": INTEGER}, {"prefixItems": [STRING]}),
        ({"additionalProperties": False}, {"properties": {"a": STRING}})):
        for pair in ((one, other), (other, one)):
            with pytest.raises(Conflict):
                merge(*pair)


def test_enforceable_leaves_the_schema_alone():
    schema = argument({"allOf": [INTEGER, {"minimum": 5}], "uniqueItems": True}, **{"$defs": {"x": STRING}})
    before = json.dumps(schema)
    enforceable(schema, True)
    assert json.dumps(schema) == before
