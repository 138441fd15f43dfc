"""The grammar of one GLM call's arguments, from a schema that `enforce` has written. Pure Python: a structural tag is a dict.

xgrammar's own `glm_xml` style allows white space around every value, which is a part of the value where that is a string with an enum or a
pattern, and a closing tag within a string that has a length. Here each argument is a tag with its value as it is read back: free
strings are any text without the closing tag, other strings exactly themselves, all else JSON.
"""
from __future__ import annotations

from typing import Any, Iterator, Mapping

from .glm import KEY, KEY_END, VALUE, VALUE_END, format_arguments

__all__ = ["arguments_format", "either"]

_FREE_KEY = "^[A-Za-z_][A-Za-z0-9_.-]*$"


def arguments_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What stands between a call's name and its closing tag. Arguments come in their declared order."""
    defined = schema.get("$defs", {})
    wholes = []
    for node in _alternatives(schema, defined, frozenset()):
        if "enum" in node:
            wholes += [_constant(format_arguments(value)) for value in node["enum"]]
        elif "properties" in node:
            written = [(name, _argument(_constant(name), part, defined)) for name, part in node["properties"].items()]
            required = node.get("required", ())
            wholes.append(_sequence([part if name in required else {"type": "optional", "content": part} for name, part in written]))
        elif "patternProperties" in node:
            (pattern, part), = node["patternProperties"].items()
            wholes.append({"type": "star", "content": _argument({"type": "regex", "pattern": pattern}, part, defined)})
        elif node.get("additionalProperties", True) is False:
            wholes.append(_constant(""))
        else:
            extra = node.get("additionalProperties", True)
            name = _value(node["propertyNames"], defined) if "propertyNames" in node else {"type": "regex", "pattern": _FREE_KEY}
            repeated = "plus" if node.get("minProperties") else "star"
            wholes.append({"type": repeated, "content": _argument(name, {} if extra is True else extra, defined)})
    return either(wholes)


def _argument(name: dict[str, Any], schema: Mapping[str, Any], defined: Mapping[str, Any]) -> dict[str, Any]:
    value = {"type": "tag", "begin": VALUE, "content": _value(schema, defined), "end": VALUE_END}
    if name["type"] == "const_string":
        return {**value, "begin": KEY + name["value"] + KEY_END + VALUE}
    return _sequence([_constant(KEY), name, _constant(KEY_END), value])


def _value(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> dict[str, Any]:
    texts, others = [], []
    for node in _alternatives(schema, defined, frozenset()):
        if "enum" in node:
            texts += [_constant(value) for value in node["enum"] if isinstance(value, str)]
            if rest := [value for value in node["enum"] if not isinstance(value, str)]:
                others.append({"enum": rest})
        elif "pattern" in node:
            texts.append({"type": "regex", "pattern": node["pattern"]})
        elif node.get("type", "string") == "string":  # any text, so also every JSON text: which one is meant, the schema tells the parser
            return {"type": "any_text", "excludes": [VALUE_END]}
        else:
            others.append(node)
    if others:
        json_schema = {**(others[0] if len(others) == 1 else {"anyOf": others}), **({"$defs": dict(defined)} if defined else {})}
        texts.append({"type": "json_schema", "json_schema": json_schema, "style": "json", "max_whitespace_cnt": 2, "excludes": [VALUE_END]})
    return either(texts)


def _alternatives(schema: Mapping[str, Any], defined: Mapping[str, Any], seen: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """The nodes of one type each that a schema leads to; a reference back to itself adds none."""
    if "$ref" in schema:
        if schema["$ref"] not in seen:
            yield from _alternatives(defined[schema["$ref"].rpartition("/")[2]], defined, seen | {schema["$ref"]})
    elif "anyOf" in schema:
        for branch in schema["anyOf"]:
            yield from _alternatives(branch, defined, seen)
    else:
        yield schema


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": parts} if parts else _constant("")


def either(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One of several formats."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
