"""JSON text to a Python value that can be written as JSON again, whatever a model wrote. Pure Python.

Where JSON leaves room: of two equal keys the last counts; a number beyond a double becomes the nearest finite one, and a whole number
of more than 4,000 digits likewise (Python would refuse to print either); half a surrogate pair becomes U+FFFD, so that the value
has a UTF-8 form. NaN and Infinity are not JSON.
"""
from __future__ import annotations

import json
import re
import sys
from typing import Any

__all__ = ["MAX_DEPTH", "load_json", "type_name"]

MAX_DEPTH = 64  # of nested arrays and objects in an argument: Python's own reader and writer recurse

_MAX_DIGITS = 4000
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load_json(text: str) -> Any:
    """
    Raises:
        ValueError: not JSON, or nested deeper than MAX_DEPTH.
    """
    if _depth(text) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
    return _whole_characters(value) if _SURROGATE.search(text) else value


def type_name(value: Any) -> str:
    """JSON Schema's name of a value's type; of a whole number, "integer"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        if match.group() in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif match.group() in "}]":
            depth -= 1
    return deepest


def _finite(digits: str) -> float:
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


def _whole(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_DIGITS else int(-sys.float_info.max if digits[0] == "-" else sys.float_info.max)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value
