"""A JSON schema as a grammar can enforce it: what xgrammar 0.2 ignores is rewritten, or reported. Pure Python.

xgrammar drops without a word what stands beside `$ref`, `anyOf`, `enum` and the like, keywords it does not know, and some
combinations. Here such a schema is first made one that says the same, or less, in the words it does know; what then remains is a `Fault`.
"Less" means: an object with declared properties gets no others; a bounded number no exponent; a string with a length no JSON escape.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping

from .combine import Conflict, disjoint, merge
from .declared import Check, lookup, types
from .formats import FORMAT_PATTERNS
from .pattern import Unenforceable, plain_pattern

__all__ = ["Fault", "enforceable"]


@dataclass(frozen=True)
class Fault:
    """A keyword that a grammar cannot hold a model to."""

    place: str  # where it stands, as in "properties.a.uniqueItems"
    reason: str
    hopeless: bool = False  # no value that the format can write would be right


_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_OF = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_OF["integer"] = _OF["number"]
_IGNORED = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
            "additionalItems", "$dynamicRef", "$recursiveRef")
_KNOWN = frozenset({"type", "enum", "const", *_COMBINED}.union(*_OF.values()))


def enforceable(schema: Mapping[str, Any], tags: bool, arguments: bool = True) -> tuple[dict[str, Any], list[Fault]]:
    """The schema for the grammar, and what it leaves out of the one given.

    Args:
        tags: for GLM's format: no value may hold a "</arg_value>".
        arguments: of a call, which are an object whatever the schema says.
    """
    writer = _Writer(schema, tags)
    result = writer.node(writer.joined([schema, {"type": "object"}] if arguments else [schema], ""), "")
    if arguments and types(result, {"$defs": writer.defined}) != {"object"}:
        result = {"type": "object"}  # reported by then
    if tags:
        writer.check_counts(result)
    return {**result, "$defs": writer.defined} if writer.defined else result, writer.faults


class _Writer:
    def __init__(self, root: Any, tags: bool) -> None:
        self.root, self.tags = root, tags
        self.faults: list[Fault] = []
        self.defined: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # by reference

    def fault(self, path: str, keyword: str, reason: str, hopeless: bool = False) -> None:
        self.faults.append(Fault(f"{path}.{keyword}".strip("."), reason, hopeless))

    def node(self, schema: Any, path: str) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            if schema is False:
                self.fault(path, "", "allows nothing; leave it out")
            return {}
        for keyword in _IGNORED:
            if schema.get(keyword, True) is not True:
                self.fault(path, keyword, "cannot be enforced by a grammar")
        schema = {keyword: value for keyword, value in schema.items() if keyword in _KNOWN}
        if "allOf" in schema or "$ref" in schema and len(schema) > 1:
            schema = self.joined([schema], path)
        if "$ref" in schema:
            return self.reference(schema["$ref"], path)
        if "enum" in schema or "const" in schema:
            return self.listed(schema, path)
        if "anyOf" in schema or "oneOf" in schema:
            return self.branches(schema, path)
        if schema.get("type") == []:
            self.fault(path, "type", "contradicts what it is combined with; change either")
            return {}
        kinds = schema.get("type") or next((kind for kind in ("object", "array", "string", "number") if any(k in schema for k in _OF[kind])), None)
        if kinds is None:
            return {}
        if not isinstance(kinds, str):
            return {"anyOf": [self.node({**schema, "type": kind}, path) for kind in dict.fromkeys(kinds)]}
        own = {keyword: schema[keyword] for keyword in _OF.get(kinds, ()) if keyword in schema}
        return {"type": kinds, **(getattr(self, f"of_{kinds}")(own, path) if own else {})}

    def check_counts(self, result: Mapping[str, Any]) -> None:
        """GLM's arguments are a sequence of tags, which cannot be counted."""
        if result.get("minProperties", 0) > max(len(result.get("required", ())), "properties" not in result):
            self.fault("", "minProperties", "cannot be enforced for the arguments themselves; require some by name")
        if result.get("maxProperties", math.inf) < len(result.get("properties", ())) or "properties" not in result and "maxProperties" in result:
            self.fault("", "maxProperties", "cannot be enforced for the arguments themselves; declare fewer")

    # Combinations ----------------------------------------------------------------------------------------------------

    def joined(self, parts: list[Any], path: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        """One schema without `allOf` and `$ref` at its top that says what all parts say."""
        whole: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, Mapping):
                continue
            plain = {keyword: value for keyword, value in part.items() if keyword in _KNOWN or keyword in _IGNORED}
            inner = list(plain.pop("allOf", ()))
            reference = plain.pop("$ref", None)
            if reference is not None and reference not in seen:
                inner.append(self.target(reference, path))
            further = [self.joined(inner, path, (*seen, reference) if reference else seen)] if inner else []
            for one in (plain, *further):
                try:
                    whole = merge(whole, one)
                except Conflict as conflict:
                    self.fault(path, conflict.keyword, "stands in two schemas that are combined here; write them as one")
        return whole

    def target(self, reference: str, path: str) -> Any:
        found = lookup(self.root, reference)
        if found is True:
            self.fault(path, "$ref", f"leads nowhere ({reference}); use '#/$defs/name' within this schema")
        return found

    def reference(self, reference: str, path: str) -> dict[str, Any]:
        if reference not in self.names:
            target, seen = self.target(reference, path), [reference]
            while isinstance(target, Mapping) and "$ref" in target:
                if target["$ref"] in seen:
                    self.fault(path, "$ref", "refers to itself; describe a value")
                    target = {}
                else:
                    seen.append(target["$ref"])
                    target = self.joined([target], path, tuple(seen[:-1])) if len(target) > 1 else self.target(target["$ref"], path)
            self.names[reference] = f"d{len(self.names)}"
            self.defined[self.names[reference]] = self.node(target, path)
        return {"$ref": f"#/$defs/{self.names[reference]}"}

    def listed(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """`enum` and `const`: the values that all else allows."""
        keyword = "enum" if "enum" in schema else "const"
        if "pattern" in schema:
            self.fault(path, "pattern", f"stands beside {keyword}; leave it out")
        check = Check(self.root)
        values = [value for value in schema.get("enum", [schema.get("const")]) if check.holds(schema, value)]
        held = [value for value in values if not (self.tags and any("</arg_value>" in text for text in _texts(value)))]
        if len(held) < len(values):
            # Of an argument itself the parser would take the tag for its end; within JSON it would read it, and mark what is wrong.
            whole = path.count(".") == 2
            self.fault(path, keyword, "has a value with '</arg_value>', which the format cannot hold; leave it out", hopeless=whole and not held)
        elif any(not -(1 << 63) <= number < 1 << 63 for value in values for number in _integers(value)):
            self.fault(path, keyword, "has an integer beyond 64 bits, which a grammar would round; leave it out")
        elif not values:
            self.fault(path, keyword, "has no value that the rest of its schema allows; change either")
        return {"enum": held} if held else {}

    def branches(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        keyword = "anyOf" if "anyOf" in schema else "oneOf"
        rest = {key: value for key, value in schema.items() if key != keyword}
        if "oneOf" in rest:
            self.fault(path, "oneOf", "stands beside anyOf; nest one in the other")
            del rest["oneOf"]
        written = [self.joined([branch, rest], f"{path}.{keyword}[{index}]") if rest else branch for index, branch in enumerate(schema[keyword])]
        possible = [branch for branch in written if types(branch, self.root)]
        if keyword == "oneOf" and not disjoint(possible, self.root):
            self.fault(path, "oneOf", "has branches that one value may satisfy together; use anyOf, or a property with a const of its own in each")
        if not possible:
            self.fault(path, keyword, "has no branch that the rest of its schema allows; change either")
            return {}
        result = {"anyOf": [self.node(branch, f"{path}.{keyword}[{index}]") for index, branch in enumerate(possible)]}
        kinds = types(result, {"$defs": self.defined})
        if self.tags and "string" in kinds and kinds & {"array", "object"} and self.shaped(result, set()):
            self.fault(path, keyword, "allows a string beside JSON with a pattern or format inside, which a text may look like; allow one of them")
        return result

    def shaped(self, schema: Any, seen: set[str]) -> bool:
        """Is there a string with a pattern inside?"""
        if isinstance(schema, Mapping):
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                if self.shaped(self.defined.get(reference.rpartition("/")[2]), seen):
                    return True
            return "pattern" in schema or any(self.shaped(value, seen) for value in schema.values())
        return isinstance(schema, list) and any(self.shaped(value, seen) for value in schema)

    # One type each ---------------------------------------------------------------------------------------------------

    def of_object(self, own: dict[str, Any], path: str) -> dict[str, Any]:
        extra, required = own.get("additionalProperties", True), own.get("required", [])
        properties = dict(own.get("properties", {}))
        for name in required:
            if name not in properties:
                if extra is False:
                    self.fault(path, "required", f"names {name!r}, which is not declared; declare it in properties")
                properties[name] = extra
        result: dict[str, Any] = {}
        if properties or "properties" in own:
            for keyword in ("patternProperties", "propertyNames"):
                if keyword in own:
                    self.fault(path, keyword, "stands beside declared properties; use one of the two")
            if self.tags and any("</arg_key>" in name or name != name.strip(" \t\n\r") for name in properties):
                self.fault(path, "properties", "has a name with white space around it or '</arg_key>' in it, which the format cannot hold; rename it")
            result = {"properties": {name: self.node(part, f"{path}.properties.{name}") for name, part in properties.items()},
                      "required": list(dict.fromkeys(required)), "additionalProperties": False}
        elif "patternProperties" in own:
            if len(own["patternProperties"]) > 1 or "propertyNames" in own:
                self.fault(path, "patternProperties", "may ask two things of one name; use a single pattern")
            result = {"patternProperties": {self.pattern(pattern, path, "patternProperties"): self.node(part, f"{path}.patternProperties.{pattern}")
                                            for pattern, part in own["patternProperties"].items()}}
        else:
            result = {"additionalProperties": extra if isinstance(extra, bool) else self.node(extra, f"{path}.additionalProperties")}
            if "propertyNames" in own:
                result["propertyNames"] = self.node(self.joined([own["propertyNames"], {"type": "string"}], path), f"{path}.propertyNames")
        if own.get("minProperties", 0) > (1 if "properties" not in result else len(properties)):
            self.fault(path, "minProperties", "cannot be enforced where names are free or too few; declare the properties and require them")
        else:
            result |= {keyword: own[keyword] for keyword in ("minProperties", "maxProperties") if keyword in own}
        return result

    def of_array(self, own: dict[str, Any], path: str) -> dict[str, Any]:
        if own.get("uniqueItems") and own.get("maxItems", 2) > 1:
            self.fault(path, "uniqueItems", "cannot be enforced by a grammar")
        result = {keyword: own[keyword] for keyword in ("minItems", "maxItems") if keyword in own}
        if "prefixItems" in own:
            result["prefixItems"] = [self.node(part, f"{path}.prefixItems[{index}]") for index, part in enumerate(own["prefixItems"])]
        if own.get("items", True) is False:
            result["items"] = False
        elif "items" in own or own.get("minItems", 0) > len(own.get("prefixItems", ())):
            result["items"] = self.node(own.get("items", True), f"{path}.items")
        return result

    def of_string(self, own: dict[str, Any], path: str) -> dict[str, Any]:
        lengths = {keyword: own[keyword] for keyword in ("minLength", "maxLength") if keyword in own}
        shape = {}
        if own.get("format") in FORMAT_PATTERNS:
            shape = {"pattern": FORMAT_PATTERNS[own["format"]]}
        elif "format" in own:
            self.fault(path, "format", f"{own['format'][:40]!r} is none that a grammar knows; use one of {', '.join(FORMAT_PATTERNS)}, or a pattern")
        if "pattern" in own:
            if shape:
                self.fault(path, "pattern", "stands beside a format; use one of the two")
            else:
                shape = {"pattern": self.pattern(own["pattern"], path, "pattern")}
        if shape:
            for keyword in lengths:
                self.fault(path, keyword, "stands beside a pattern or format; write the length into the pattern")
            return shape
        if self.tags and lengths:  # xgrammar lets a string of a bounded length hold the closing tag
            return {"pattern": f"^[^<]{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"}
        return lengths

    def of_integer(self, own: dict[str, Any], path: str) -> dict[str, Any]:
        bounds = {}
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in own:
                rounded = (math.ceil if keyword in ("minimum", "exclusiveMaximum") else math.floor)(own[keyword])
                if abs(rounded) >= 2**63:
                    self.fault(path, keyword, "is beyond 64 bits; use a smaller one")
                else:
                    bounds[keyword] = rounded
        step = own.get("multipleOf", 1)
        if step != 1 and (bounds or step != int(step) or step > 1000):
            self.fault(path, "multipleOf", "cannot be enforced beside bounds, above 1000 or for fractions; use an enum")
        elif step != 1:
            bounds["multipleOf"] = int(step)
        return bounds

    def of_number(self, own: dict[str, Any], path: str) -> dict[str, Any]:
        if "multipleOf" in own:
            self.fault(path, "multipleOf", "cannot be enforced for numbers with fractions; use the type integer")
        return {keyword: value for keyword, value in own.items() if keyword != "multipleOf"}

    def pattern(self, pattern: str, path: str, keyword: str) -> str:
        try:
            return plain_pattern(pattern, self.tags)
        except Unenforceable as error:
            self.fault(path, keyword, str(error))
            return "^[^<]*$"


def _integers(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [number for item in value for number in _integers(item)] if isinstance(value, list) else [value] if isinstance(value, int) else []


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else [value] if isinstance(value, str) else []
