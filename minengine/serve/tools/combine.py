"""Schemas that hold together, made one; and whether branches exclude each other. Pure Python."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

from .declared import ALL_TYPES, lookup, same, types

__all__ = ["Conflict", "disjoint", "merge"]

_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class Conflict(Exception):
    """Two schemas whose joint meaning has no simple form."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that allows what both allow.

    Raises:
        Conflict: it has no simple form.
    """
    for closed, open in ((one, other), (other, one)):  # what is additional depends on the properties beside it
        if closed.get("additionalProperties", True) is not True and (
                not set(open.get("properties", ())) <= set(closed.get("properties", ())) or "patternProperties" in open):
            raise Conflict("additionalProperties")
    for keyword in ("items", "prefixItems"):
        if keyword in one and {"items", "prefixItems"} & set(other) and one != other:
            raise Conflict(keyword)
    result = dict(one)
    for keyword, value in other.items():
        result[keyword] = _both(keyword, result[keyword], value) if keyword in result else value
    return result


def _both(keyword: str, one: Any, other: Any) -> Any:
    if same(one, other):
        return one
    if keyword == "required":
        return list(dict.fromkeys([*one, *other]))
    if keyword == "properties":
        return {**one, **{name: {"allOf": [one[name], part]} if name in one else part for name, part in other.items()}}
    if keyword == "type":
        left, right = types({"type": one}, True), types({"type": other}, True)
        common = sorted(left & right - ({"integer"} if "number" in left & right else set()))
        return common[0] if len(common) == 1 else common
    if keyword == "enum":
        return [value for value in one if any(same(value, candidate) for candidate in other)]
    if keyword in _HIGHEST:
        return max(one, other)
    if keyword in _LOWEST:
        return min(one, other)
    raise Conflict(keyword)


def disjoint(branches: Sequence[Any], root: Any) -> bool:
    """Can no generated value satisfy two of the branches? By their types, by a property with different constants that each requires, or
    because each requires a property that the other does not declare (an object with declared properties gets no others)."""
    return all(_apart(one, other, root) for index, one in enumerate(branches) for other in branches[index + 1:])


def _apart(one: Any, other: Any, root: Any) -> bool:
    common = types(one, root) & types(other, root)
    if not common:
        return True
    one, other = _target(one, root), _target(other, root)
    if common != {"object"} or one is None or other is None:
        return _values(one) is not None and _values(other) is not None and not _meet(_values(one), _values(other))
    required = [set(schema.get("required", ())) for schema in (one, other)]
    declared = [schema.get("properties", {}) for schema in (one, other)]
    if all(declared) and not required[0] <= set(declared[1]) and not required[1] <= set(declared[0]):
        return True
    return any(name in declared[0] and name in declared[1] and _apart(declared[0][name], declared[1][name], root)
               for name in required[0] & required[1])


def _target(schema: Any, root: Any) -> Mapping[str, Any] | None:
    for _ in range(len(ALL_TYPES)):  # references to references, a few
        if not isinstance(schema, Mapping):
            return None
        if "$ref" not in schema:
            return schema
        schema = lookup(root, schema["$ref"])
    return None


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _meet(one: list[Any], other: list[Any]) -> bool:
    return any(same(left, right) for left in one for right in other)
