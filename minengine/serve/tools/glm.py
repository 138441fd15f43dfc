"""GLM's tool calls: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`. Pure Python.

A string is written as it is, any other value as JSON; nothing is escaped, so `&lt;`, `<` and quotes mean themselves. White space around
names, keys and tags does not count. How a value is read, by its declared schema:

- Only strings allowed: the text up to the first `</arg_value>`, whatever it is.
- Otherwise: JSON, if it is JSON that the schema allows; then a `</arg_value>` inside one of its strings is text. Else the literal text.
  Where a schema allows both a string and 12, the text `12` is the number: the format cannot say which was meant.
- A JSON string is never the reading: `"x"` in a place for any value is three characters. With nothing declared likewise.

A literal `</arg_value>` inside a string cannot be represented. The string ends there; what follows is no key and no end of a call, so
the call is marked `malformed_arguments`, unless that looks like one: then nothing tells that text was lost. A grammar never lets
a model write it, and `format_call` refuses it.

A value may hold `</tool_call>` or `<tool_call>`. Between arguments a `<tool_call>` means that a closing tag was lost: the open call is text,
and the new one counts. Anything else between arguments makes the call, once it is closed, a malformed one.
"""
from __future__ import annotations

import json
from typing import Any, Generator, Mapping

from .declared import ALL_TYPES, Tool, types
from .source import WHITESPACE, EndOfText, Source
from .values import load_json

__all__ = ["OPENERS", "SIGNS", "format_arguments", "format_call", "read_call"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
OPENERS = (OPEN,)
SIGNS = OPENERS  # of a call: reasoning that no tag opened ends before one


def read_call(source: Source, tools: Mapping[str, Tool] | None) -> Generator[None, None, tuple[str, dict[str, Any], str | None] | None]:
    """Reads a call behind its opening tag: name, arguments and what is wrong with its form (None: nothing); None instead of all
    where another call begins, at whose opening tag the source then stands.

    Raises:
        EndOfText: the text ended within the call.
    """
    name, tag = yield from source.until(KEY, CLOSE, OPEN)
    name = name.strip(WHITESPACE)
    tool = tools.get(name) if tools else None
    arguments: dict[str, Any] = {}
    while tag == KEY:
        key, _ = yield from source.until(KEY_END)
        key = key.strip(WHITESPACE)
        if (yield from source.tag(VALUE)):
            arguments[key] = yield from _read_value(source, tool, key)
            tag = yield from source.tag(KEY, CLOSE, OPEN)
        else:
            tag = ""
    wrong = None
    if not tag:
        wrong = "arguments: between them stands text that is neither a key with its value nor the end of the call; write the call again"
        _, tag = yield from source.until(CLOSE, OPEN)
    if tag == OPEN:
        source.pos -= len(OPEN)
        return None
    return name, arguments, wrong


def _read_value(source: Source, tool: Tool | None, key: str) -> Generator[None, None, Any]:
    schema = tool.argument(key) if tool else True
    allowed = types(schema, tool.schema) if tool else ALL_TYPES
    if allowed == {"string"}:
        text, _ = yield from source.until(VALUE_END)
        return text
    start = source.mark()
    text = yield from _container(source, start)
    value = _reading(text, tool, schema)
    if text is None or value is text:  # no container: the first closing tag ends it
        source.back(start)
        text, _ = yield from source.until(VALUE_END)
        value = _reading(text, tool, schema)
    return value


def _reading(text: str | None, tool: Tool | None, schema: Any) -> Any:
    """The JSON value that a text stands for, or the text itself."""
    if text is None:
        return None
    try:
        value = load_json(text)
    except ValueError:
        return text
    literal = isinstance(value, str) or tool and not tool.satisfies(schema, value) and tool.satisfies(schema, text)
    return text if literal else value


def _container(source: Source, start: int) -> Generator[None, None, str | None]:
    """The text of a JSON array or object up to the closing tag, which is read; None where no such value stands."""
    try:
        yield from source.spaces()
        if source.text[source.pos] in "{[" and (yield from source.json()):
            text = source.since(start)
            if (yield from source.tag(VALUE_END)):
                return text
    except EndOfText:
        pass  # a string that looks like the beginning of JSON
    return None


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """
    Raises:
        ValueError: a string that the format cannot hold; the message names the argument.
    """
    if any(tag in name for tag in (OPEN, CLOSE, KEY)) or name != name.strip(WHITESPACE):
        raise ValueError(f"name={name!r}: GLM's format cannot hold white space around it nor a tag in it; rename the tool")
    return f"{OPEN}{name}{format_arguments(arguments)}{CLOSE}"


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """
    Raises:
        ValueError: as format_call.
    """
    parts: list[str] = []
    for key, value in arguments.items():
        if KEY_END in key or key != key.strip(WHITESPACE):
            raise ValueError(f"arguments.{key}: GLM's format cannot hold white space around a key nor {KEY_END!r} in it; rename the argument")
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, str) and VALUE_END in text:
            raise ValueError(f"arguments.{key}: holds {VALUE_END!r}, which ends a string in GLM's format; send it in an object or an array")
        parts += [KEY, key, KEY_END, VALUE, text, VALUE_END]
    return "".join(parts)
