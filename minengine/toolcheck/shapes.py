"""The table of schemas that a call's arguments are held to: for each its category, a name, and what it checks.

Every text and list is bounded where that is not the point, so that a small model's answer ends; recursion and plain numbers may run into max_tokens.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

__all__ = ["Shape", "obj", "shapes"]

Schema = dict[str, Any]
WORD: Schema = {"type": "string", "enum": ["red", "green", "blue"]}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
FLAG: Schema = {"type": "boolean"}
SHORT: Schema = {"type": "string", "maxLength": 12}


@dataclass(frozen=True)
class Shape:
    """parameters: the tool's schema; None for a tool that declares none."""

    category: str
    name: str
    checks: str
    parameters: Schema | None


def obj(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object that takes these properties and no other; all are required unless told."""
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required,
            "additionalProperties": False, **more}


def items(schema: Schema | bool, least: int, most: int) -> Schema:
    """A list of `least` to `most` of them."""
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most}


def with_defs(schema: Schema, **defs: Schema) -> Schema:
    """The schema beside definitions that it refers to."""
    return {**schema, "$defs": defs}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def shapes() -> Iterator[Shape]:
    """Every shape, in the order of the table."""
    for category, entries in (("types", _types()), ("enums", _enums()), ("consts", _consts()), ("unions", _unions()), ("non-ascii", _non_ascii())):
        for name, checks, value in entries:
            yield Shape(category, name, checks, obj({"value": value}))
    for category, entries in (("required", _required()), ("refs", _refs()), ("recursion", _recursion()), ("nesting", _nesting())):
        for name, checks, parameters in entries:
            yield Shape(category, name, checks, parameters)


def _types() -> list[tuple[str, str, Schema]]:
    text, whole, real = {"type": "string"}, {"type": "integer"}, {"type": "number"}
    return [
        ("string", "text of at most 12 characters", SHORT),
        ("string-min", "text of 3 to 8 characters", {**text, "minLength": 3, "maxLength": 8}),
        ("string-one", "text of exactly one character", {**text, "minLength": 1, "maxLength": 1}),
        ("string-empty", "text that must be empty", {**text, "maxLength": 0}),
        ("string-pattern", "letters, a dash, two digits", {**text, "pattern": "^[a-z]{3}-[0-9]{2}$"}),
        ("string-digits", "digits that stay text: 0042 is no number", {**text, "pattern": "^[0-9]{4}$"}),
        ("string-minus", "a number with a sign that stays text", {**text, "pattern": "^-[1-9]$"}),
        ("string-date", "text like a date, which is no arithmetic", {**text, "pattern": "^20[0-9]{2}-0[1-9]-1[0-9]$"}),
        ("string-words", "true, false and null as words stay text", {**text, "enum": ["true", "false", "null"]}),
        ("string-numbers", "1, 2.0 and 1e3 as words stay text", {**text, "enum": ["1", "2.0", "1e3"]}),
        ("string-brackets", "[] and {} as words stay text", {**text, "enum": ["[]", "{}", "[1]"]}),
        ("string-quoted", "a word within quotes keeps them", {**text, "enum": ['"red"', '"blue"']}),
        ("string-hex", "letters and digits", {**text, "pattern": "^[0-9a-f]{8}$"}),
        ("string-spaces", "spaces at both ends stay", {**text, "enum": [" red ", "  blue"]}),
        ("integer", "a digit", DIGIT),
        ("integer-plain", "any integer", whole),
        ("integer-sign", "-5 to 5", {**whole, "minimum": -5, "maximum": 5}),
        ("integer-negative", "below zero", {**whole, "minimum": -99, "maximum": -1}),
        ("integer-exclusive", "strictly between 10 and 13", {**whole, "exclusiveMinimum": 10, "exclusiveMaximum": 13}),
        ("integer-exact", "a range of one number", {**whole, "minimum": 7, "maximum": 7}),
        ("integer-big", "more digits than a double holds", {**whole, "enum": [9007199254740993, -9007199254740993]}),
        ("integer-million", "seven digits", {**whole, "minimum": 1000000, "maximum": 9999999}),
        ("number", "0 to 1", {**real, "minimum": 0, "maximum": 1}),
        ("number-plain", "any number", real),
        ("number-negative", "-2.5 to -0.5", {**real, "minimum": -2.5, "maximum": -0.5}),
        ("number-enum", "one of three fractions", {"enum": [0.5, 1.25, -3.75]}),
        ("number-small", "below a thousandth", {"enum": [0.0001, 1e-07]}),
        ("boolean", "true or false", FLAG),
        ("boolean-true", "true only", {**FLAG, "enum": [True]}),
        ("boolean-false", "false only: must not vanish as empty", {**FLAG, "enum": [False]}),
        ("null", "null only: must not vanish as missing", {"type": "null"}),
        ("array-integers", "one to three digits", items(DIGIT, 1, 3)),
        ("array-words", "two words", items(WORD, 2, 2)),
        ("array-strings", "at most two short texts", {"type": "array", "items": SHORT, "maxItems": 2}),
        ("array-booleans", "exactly four", items(FLAG, 4, 4)),
        ("array-nulls", "exactly two", items({"type": "null"}, 2, 2)),
        ("array-empty", "no items: must stay []", {"type": "array", "items": DIGIT, "maxItems": 0}),
        ("array-arrays", "pairs of digits", items(items(DIGIT, 2, 2), 1, 2)),
        ("array-objects", "one or two objects", items(obj({"n": DIGIT}), 1, 2)),
        ("array-tuple", "a word and a flag, in this order", {**items(False, 2, 2), "prefixItems": [WORD, FLAG]}),
        ("object", "two members", obj({"color": WORD, "count": DIGIT})),
        ("object-empty", "no members: must stay {}", obj({})),
        ("object-nulls", "members that are null", obj({"a": {"type": "null"}, "b": {"type": "null"}})),
    ]


def _enums() -> list[tuple[str, str, Schema]]:
    return [
        ("words", "one of three words", WORD),
        ("one", "a single value", {"enum": ["only"]}),
        ("integers", "numbers without a type", {"enum": [1, 2, 3]}),
        ("mixed", "text, number, boolean and null together", {"enum": ["one", 1, True, None]}),
        ("look-alikes", "1 and \"1\" are two values", {"enum": [1, "1"]}),
        ("with-null", "a word or null", {"enum": ["red", None]}),
        ("prefixes", "values that begin each other", {"enum": ["a", "ab", "abc", "abcd"]}),
        ("case", "values that differ in case", {"enum": ["On", "ON", "on"]}),
        ("spaces", "values with spaces within", {"enum": ["light red", "dark  blue"]}),
        ("paths", "dashes, dots and slashes", {"enum": ["a/b.c", "a-b_c", "../x"]}),
        ("punctuation", "commas, colons, brackets", {"enum": ["a,b", "a:b", "a]", "}b"]}),
        ("json", "text that is JSON", {"enum": ['{"a": 1}', "[1, 2]"]}),
        ("empty", "the empty text among others", {"enum": ["", "x"]}),
        ("long", "a value of 60 characters", {"enum": ["the quick brown fox jumps over the lazy dog and runs on home"]}),
        ("many", "one of 50", {"enum": [f"item-{i:02}" for i in range(50)]}),
        ("in-array", "items of an enum", items({"enum": ["x", "y"]}, 2, 3)),
        ("objects", "one of two objects", {"enum": [{"a": 1}, {"a": 2}]}),
        ("arrays", "one of two lists", {"enum": [[1], [1, 2]]}),
    ]


def _consts() -> list[tuple[str, str, Schema]]:
    values = {"text": "fixed", "empty": "", "number": 42, "fraction": 2.5, "zero": 0, "true": True, "false": False, "null": None, "digits": "42",
              "null-word": "null", "space": " x ", "object": {"a": [1, "b"]}, "array": [1, None, "x"], "sentence": "Hello, world: 1 + 1 = 2."}
    return [(name, f"exactly {value!r}", {"const": value}) for name, value in values.items()]


def _unions() -> list[tuple[str, str, Schema]]:
    cat, dog = obj({"kind": {"const": "cat"}, "lives": DIGIT}), obj({"kind": {"const": "dog"}, "tricks": FLAG})
    return [
        ("word-or-digit", "a word or a digit", {"anyOf": [WORD, DIGIT]}),
        ("digit-or-null", "a digit or null", {"anyOf": [DIGIT, {"type": "null"}]}),
        ("digits-or-null", "digits that stay text, or null", {"anyOf": [{"type": "string", "pattern": "^[0-9]{2}$"}, {"type": "null"}]}),
        ("type-list", "text or null by a list of types", {"type": ["string", "null"], "maxLength": 8}),
        ("type-list-numbers", "boolean or null by a list of types", {"type": ["boolean", "null"]}),
        ("kinds", "one of two objects, told apart by a const", {"anyOf": [cat, dog]}),
        ("one-of", "the same by oneOf", {"oneOf": [cat, dog]}),
        ("one-of-words", "oneOf of words without overlap", {"oneOf": [{"const": "left"}, {"const": "right"}]}),
        ("one-or-many", "a word or a list of them", {"anyOf": [WORD, items(WORD, 1, 2)]}),
        ("object-or-word", "an object or a word", {"anyOf": [obj({"n": DIGIT}), WORD]}),
        ("three", "boolean, digit or list", {"anyOf": [FLAG, DIGIT, items(FLAG, 1, 2)]}),
        ("nested", "a union in a union", {"anyOf": [{"anyOf": [{"const": "a"}, {"const": 1}]}, {"type": "null"}]}),
        ("in-array", "items of two types", items({"anyOf": [WORD, DIGIT]}, 2, 3)),
        ("flag-word", "true as a word or a digit: the word stays text", {"anyOf": [{"const": "true"}, DIGIT]}),
        ("all-of", "allOf of one schema", {"allOf": [WORD]}),
    ]


def _non_ascii() -> list[tuple[str, str, Schema]]:
    texts = {
        "german": "größer", "french": "déjà vu", "greek": "αβγ", "russian": "привет", "hebrew": "שלום", "arabic": "مرحبا", "hindi": "नमस्ते",
        "chinese": "你好世界", "japanese": "こんにちは", "korean": "안녕", "thai": "สวัสดี", "math": "∑ ≤ ∞", "emoji": "🙂🚀", "flag": "\U0001f1e9\U0001f1ea",
        "family": "\U0001f469\u200d\U0001f469\u200d\U0001f467", "combining": "e\u0301", "astral": "\U0001d4b3\U0001d518", "nbsp": "a\u00a0b",
        "zero-width": "a\u200bb", "line-separator": "a\u2028b",
    }
    named = [(name, f"exactly {text!a}", {"const": text}) for name, text in texts.items()]
    return named + [
        ("choice", "one of four scripts", {"enum": ["größer", "привет", "你好", "🙂"]}),
        ("key", "a member whose name is not ASCII", obj({"größe": DIGIT, "цвет": WORD})),
        ("array", "texts within JSON", items({"enum": ["ä", "你", "🙂"]}, 2, 2)),
    ]


def _required() -> list[tuple[str, str, Schema]]:
    three = {"color": WORD, "count": DIGIT, "loud": FLAG}
    names = list(three)
    subsets = [[n for i, n in enumerate(names) if mask >> i & 1] for mask in range(8)]
    entries = [("of-three-" + ("-".join(s) or "none"), f"required of three: {', '.join(s) or 'none'}", obj(three, s)) for s in subsets]
    many = {f"option_{i}": FLAG for i in range(8)}
    return entries + [
        ("many-optional", "eight optional members", obj(many, [])),
        ("many-required", "eight required members", obj(many)),
        ("last-required", "only the last of eight is required", obj(many, ["option_7"])),
        ("default", "an optional member with a default", obj({"color": {**WORD, "default": "red"}, "count": DIGIT}, ["count"])),
        ("no-list", "no `required` at all", {"type": "object", "properties": {"color": WORD}, "additionalProperties": False}),
        ("open", "additionalProperties not said", {"type": "object", "properties": {"color": WORD}, "required": ["color"]}),
        ("extra", "other members allowed, if digits", {**obj({"color": WORD}), "additionalProperties": DIGIT}),
        ("nothing", "a tool with an object of no members", obj({})),
        ("bare", "a tool whose schema is only an object", {"type": "object", "properties": {}}),
        ("absent", "a tool that declares no parameters", None),
    ]


def _refs() -> list[tuple[str, str, Schema]]:
    point = obj({"x": DIGIT, "y": DIGIT})
    line = obj({"a": ref("point"), "b": ref("point")})
    return [
        ("once", "a definition used once", with_defs(obj({"color": ref("word")}), word=WORD)),
        ("twice", "a definition used twice", with_defs(obj({"start": ref("point"), "end": ref("point")}), point=point)),
        ("definitions", "the older name `definitions`", obj({"color": {"$ref": "#/definitions/word"}}, definitions={"word": WORD})),
        ("chain", "a definition that is another", with_defs(obj({"a": ref("a")}), a=ref("b"), b=ref("c"), c=WORD)),
        ("in-items", "items by reference", with_defs(obj({"path": items(ref("point"), 1, 2)}), point=point)),
        ("in-union", "a union of references", with_defs(obj({"value": {"anyOf": [ref("word"), ref("digit")]}}), word=WORD, digit=DIGIT)),
        ("nullable", "a reference or null", with_defs(obj({"value": {"anyOf": [ref("point"), {"type": "null"}]}}), point=point)),
        ("within", "a definition that uses another", with_defs(obj({"line": ref("line")}), point=point, line=line)),
        ("property", "a reference to another property", obj({"a": WORD, "b": {"$ref": "#/properties/a"}})),
        ("described", "a reference beside a description", with_defs(obj({"color": {**ref("word"), "description": "of the wall"}}), word=WORD)),
    ]


def _recursion() -> list[tuple[str, str, Schema]]:
    def maybe(schema: Schema) -> Schema:
        return {"anyOf": [{"type": "null"}, schema]}

    linked, open_ended = obj({"value": DIGIT, "next": maybe(ref("node"))}), obj({"value": DIGIT, "next": ref("node")}, ["value"])
    tree = obj({"n": DIGIT, "children": items(ref("node"), 0, 2)})
    a, b = obj({"flag": FLAG, "b": maybe(ref("b"))}), obj({"digit": DIGIT, "a": maybe(ref("a"))})
    operation = obj({"op": {"enum": ["+", "*"]}, "left": ref("expression"), "right": ref("expression")})
    return [
        ("list", "a linked list that null ends", with_defs(obj({"list": ref("node")}), node=linked)),
        ("optional", "a linked list that a missing member ends", with_defs(obj({"list": ref("node")}), node=open_ended)),
        ("tree", "a tree of at most two children", with_defs(obj({"tree": ref("node")}), node=tree)),
        ("root", "a reference to the whole", obj({"name": WORD, "parent": maybe({"$ref": "#"})})),
        ("root-optional", "the same, optional", obj({"name": WORD, "parent": {"$ref": "#"}}, ["name"])),
        ("mutual", "two definitions that need each other", with_defs(obj({"a": ref("a")}), a=a, b=b)),
        ("expression", "an arithmetic expression", with_defs(obj({"value": ref("expression")}), expression={"anyOf": [DIGIT, operation]})),
    ]


def _nesting() -> list[tuple[str, str, Schema]]:
    def deep(n: int, leaf: Schema) -> Schema:
        return leaf if n == 0 else obj({f"level{n}": deep(n - 1, leaf)})

    kinds = {"word": WORD, "digit": DIGIT, "flag": FLAG, "none": {"type": "null"}, "list": items(FLAG, 0, 1)}
    return [(f"depth-{n}", f"an object {n} levels deep", deep(n, WORD)) for n in (2, 3, 4, 6, 8)] + [
        ("lists", "lists in objects in lists", obj({"rows": items(obj({"cells": items(obj({"n": DIGIT}), 1, 2)}), 1, 2)})),
        ("lists-deep", "a list three levels deep", obj({"cube": items(items(items(DIGIT, 1, 2), 1, 1), 1, 1)})),
        ("wide", "ten members of five types", obj({f"{kind}_{i}": schema for i in range(2) for kind, schema in kinds.items()})),
        ("call-names", "members named as parts of a call", obj({"name": WORD, "arguments": obj({"name": WORD}), "type": FLAG})),
        ("schema-names", "members named as parts of a schema", obj({"properties": DIGIT, "required": FLAG, "enum": WORD, "$ref": DIGIT})),
        ("odd-names", "members with space, dot, dash, dollar", obj({"two words": DIGIT, "a.b": FLAG, "c-d": WORD, "$e": DIGIT})),
        ("similar-names", "members that begin each other", obj({"a": DIGIT, "aa": DIGIT, "aaa": DIGIT})),
        ("object-text", "short texts at two levels", obj({"title": SHORT, "author": obj({"name": SHORT})})),
    ]
