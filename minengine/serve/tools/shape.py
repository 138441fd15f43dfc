"""Is a request's list of tools well-formed? Asked before anything is read from it. Pure Python."""
from __future__ import annotations

import re
from typing import Any, Callable, Mapping, Sequence

from ...request import RequestError
from .declared import ALL_TYPES

__all__ = ["check_json_schema", "check_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tools(tools: Any) -> None:
    """
    Raises:
        RequestError: no list of function tools with distinct names, or parameters that are no JSON schema; the message names the place.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError("tools: not a list; send a list of function tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
            raise RequestError(f'{place}: not a function tool; send {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
        function, place = tool["function"], f"{place}.function"
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"{place}.name={name!r}: not a name; use 1 to 64 letters, digits, underscores, dashes and dots")
        if name in seen:
            raise RequestError(f"{place}.name={name!r}: declared twice; give each tool a name of its own")
        seen.add(name)
        if function.get("strict") not in (None, True, False):
            raise RequestError(f"{place}.strict={function['strict']!r}: use true or false")
        if function.get("parameters") is not None:
            if not isinstance(function["parameters"], Mapping):
                raise RequestError(f"{place}.parameters: not an object; send a JSON schema")
            check_json_schema(function["parameters"], f"{place}.parameters")


def check_json_schema(schema: Any, place: str) -> None:
    """
    Raises:
        RequestError: a keyword has a value that is none for it; the message names the place.
    """
    waiting = [(schema, place)]
    while waiting:
        schema, place = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            raise RequestError(f"{place}: is no JSON schema; use an object, true or false")
        for keyword, value in schema.items():
            fits, remedy = _SHAPES.get(keyword, (None, None))
            if fits and not fits(value):
                raise RequestError(f"{place}.{keyword}: {remedy}")
            if keyword in _SCHEMAS_BY_NAME:
                waiting += [(part, f"{place}.{keyword}.{name}") for name, part in value.items()]
            elif keyword in _SCHEMA_LISTS:
                waiting += [(part, f"{place}.{keyword}[{index}]") for index, part in enumerate(value)]
            elif keyword in _SCHEMAS:
                waiting.append((value, f"{place}.{keyword}"))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) != float("inf") and value == value


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _types(value: Any) -> bool:
    return isinstance(value, str) and value in ALL_TYPES or _strings(value) and value != [] and set(value) <= ALL_TYPES


_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames")

_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_types, f"not a type; use one or a list of {', '.join(sorted(ALL_TYPES))}"),
    "enum": (lambda value: isinstance(value, list) and value != [], "not a list of values; list at least one"),
    "required": (_strings, "not a list of names; list the names of properties"),
    "$ref": (lambda value: isinstance(value, str), "not a reference; use a string such as '#/$defs/name'"),
    "pattern": (lambda value: isinstance(value, str), "not a regular expression; use a string"),
    "format": (lambda value: isinstance(value, str), "not the name of a format; use a string"),
    "multipleOf": (lambda value: _number(value) and value > 0, "not a number above 0; use one"),
    **{keyword: (_number, "not a number; use one") for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    **{keyword: (_count, "not a whole number of 0 or more; use one")
       for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")},
    **{keyword: (lambda value: isinstance(value, Mapping), "not an object of schemas by name; use one") for keyword in _SCHEMAS_BY_NAME},
    **{keyword: (lambda value: isinstance(value, list) and value != [], "not a list of schemas; list at least one") for keyword in _SCHEMA_LISTS},
}
