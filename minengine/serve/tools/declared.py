"""What a request declares: its tools, and whether a call's arguments satisfy their schema. Pure Python.

The check covers what a wrong call gets wrong: `type`, `enum`, `const`, `required`, `properties`, `additionalProperties`, `items`,
`prefixItems`, the bounds of numbers, lengths and counts, `multipleOf`, `anyOf`, `oneOf`, `allOf` and `$ref` within the schema,
at every depth. It leaves alone `pattern` and `format` (a client's regular expression could hold up the server), `uniqueItems`,
`contains`, `not`, `if`, `dependent...` and `propertyNames`: a grammar holds a strict tool to the first two, and refuses the others.
"""
from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from .values import type_name

__all__ = ["ALL_TYPES", "Tool", "declared_tools", "lookup", "same", "types"]

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})

MALFORMED, UNDECLARED = "malformed_arguments", "undeclared_tool"


class Tool:
    """One declared function.

    Attributes:
        schema: of its arguments; {} where none is declared.
        strict: held to the schema; only an explicit `"strict": false` is not.
    """

    def __init__(self, function: Mapping[str, Any]) -> None:
        self.name: str = function["name"]
        self.schema: dict[str, Any] = function.get("parameters") or {}
        self.strict = function.get("strict") is not False

    def argument(self, name: str) -> Any:
        """The schema of one argument; True where nothing is known of it."""
        for schema in _objects(self.schema, self.schema, set()):
            if name in schema.get("properties", {}):
                return schema["properties"][name]
        extra = self.schema.get("additionalProperties", True)
        return extra if isinstance(extra, Mapping) else True

    def satisfies(self, schema: Any, value: Any) -> bool:
        return Check(self.schema).holds(schema, value)

    def fault(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with arguments, in one sentence; None if nothing is."""
        if not self.strict or self.satisfies(self.schema, arguments):
            return None
        for schema in _objects(self.schema, self.schema, set()):
            for name in schema.get("required", ()):
                if name not in arguments:
                    return f"arguments: {name!r} is required and missing; call {self.name!r} again with it"
        for name, value in arguments.items():
            if not self.satisfies(self.argument(name), value):
                return f"arguments.{name}: does not satisfy its declared schema; call {self.name!r} again with a value that does"
        return f"arguments: do not satisfy the declared schema of {self.name!r}; call it again with arguments that do"


def declared_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Tool] | None:
    """Name to tool of OpenAI's list; None stays None: nothing is known, so nothing can be undeclared."""
    if tools is None:
        return None
    return {tool["function"]["name"]: Tool(tool["function"]) for tool in tools if tool.get("type", "function") == "function"}


def lookup(root: Any, reference: str) -> Any:
    """What a local `$ref` points to; True (anything) where it leads nowhere."""
    here = root
    for part in reference.lstrip("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping) and part in here:
            here = here[part]
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            return True
    return here if reference.startswith("#") else True


def types(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The types that a schema may allow: too many rather than too few. A `$ref` back to itself adds none."""
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else ALL_TYPES
    result = ALL_TYPES
    if "type" in schema:
        named = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
        result &= named | ({"integer"} if "number" in named else set())
    if "const" in schema:
        result &= {type_name(schema["const"])}
    if "enum" in schema:
        result &= {type_name(value) for value in schema["enum"]}
    if "$ref" in schema:
        reference = schema["$ref"]
        result &= frozenset() if reference in seen else types(lookup(root, reference), root, seen | {reference})
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            result &= frozenset().union(*(types(branch, root, seen) for branch in schema[keyword]))
    for branch in schema.get("allOf", ()):
        result &= types(branch, root, seen)
    return frozenset(result)


def same(one: Any, other: Any) -> bool:
    """JSON's equality: 1 is 1.0 and is not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return one == other


def _objects(schema: Any, root: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """A schema and those that it refers to or combines: where its properties may be declared."""
    if isinstance(schema, Mapping) and id(schema) not in seen:
        seen.add(id(schema))
        yield schema
        for part in (lookup(root, schema["$ref"]) if "$ref" in schema else True, *schema.get("allOf", ()),
                     *schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from _objects(part, root, seen)


class Check:
    """Does a value satisfy a schema? Remembers every pair it has looked at: the work stays within schemas times values, and a schema
    that refers to itself at the same value demands nothing more."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.known: dict[tuple[int, int], bool] = {}

    def holds(self, schema: Any, value: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        pair = (id(schema), id(value))
        if pair not in self.known:
            self.known[pair] = True
            self.known[pair] = self._alone(schema, value) and self._combined(schema, value) and self._inside(schema, value)
        return self.known[pair]

    def _alone(self, schema: Mapping[str, Any], value: Any) -> bool:
        kind = type_name(value)
        if "type" in schema:
            named = (schema["type"],) if isinstance(schema["type"], str) else schema["type"]
            if kind not in named and not (kind == "integer" and "number" in named):
                return False
        if "const" in schema and not same(value, schema["const"]) or "enum" in schema and not any(same(value, v) for v in schema["enum"]):
            return False
        if kind in ("integer", "number"):
            return (schema.get("minimum", value) <= value <= schema.get("maximum", value)
                    and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
                    and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
                    and ("multipleOf" not in schema or value % schema["multipleOf"] == 0))
        least, most = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"),
                       "object": ("minProperties", "maxProperties")}.get(kind, (None, None))
        return least is None or schema.get(least, 0) <= len(value) <= schema.get(most, len(value))

    def _combined(self, schema: Mapping[str, Any], value: Any) -> bool:
        if "$ref" in schema and not self.holds(lookup(self.root, schema["$ref"]), value):
            return False
        for branch in schema.get("allOf", ()):
            if not self.holds(branch, value):
                return False
        return (("anyOf" not in schema or sum(self.holds(branch, value) for branch in schema["anyOf"]) > 0)
                and ("oneOf" not in schema or sum(self.holds(branch, value) for branch in schema["oneOf"]) == 1))

    def _inside(self, schema: Mapping[str, Any], value: Any) -> bool:
        if isinstance(value, list):
            first = schema.get("prefixItems", ())
            rest = schema.get("items", True)
            for index, item in enumerate(value):
                if not self.holds(first[index] if index < len(first) else rest, item):
                    return False
        elif isinstance(value, dict):
            for name in schema.get("required", ()):
                if name not in value:
                    return False
            properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
            if "patternProperties" in schema:
                extra = True  # which of the others it covers is a regular expression's affair
            for name, item in value.items():
                if not self.holds(properties.get(name, extra), item):
                    return False
        return True
