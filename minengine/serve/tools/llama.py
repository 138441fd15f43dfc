"""Llama's tool calls: `{"name": "f", "parameters": {...}}`, one JSON object a call. Pure Python.

Read as a call: an object whose keys are `name`, then `parameters` or `arguments` (an object), and nothing else, except a leading
`"type": "function"`. It may stand anywhere in a text, also in an array or in braces; several follow each other. Other JSON, such as
`{"name": "Bob", "age": 3}`, is content, and so is a call that breaks off or goes wrong behind its `parameters`.
"""
from __future__ import annotations

import json
from typing import Any, Generator, Mapping

from .declared import Tool
from .source import Source
from .values import load_json

__all__ = ["OPENERS", "SIGNS", "format_call", "read_call"]

OPENERS = ("{",)
SIGNS = ('{"name"',)  # of a call: reasoning that no tag opened ends before one


def read_call(source: Source, tools: Mapping[str, Tool] | None) -> Generator[None, None, tuple[str, dict[str, Any], str | None] | None]:
    """Reads a call behind its opening brace: name, arguments and what is wrong with its form (None: nothing); None instead of all where
    no call stands, with the source where reading goes on: behind the brace, or behind what was read as arguments.

    Raises:
        EndOfText: the text ended within what may be a call.
    """
    behind_brace = source.mark()
    name = yield from _head(source)
    if name is None:
        source.back(behind_brace)
        return None
    start = source.mark()
    if not (yield from source.json()):
        return None
    text = source.since(start)
    if not (yield from source.tag("}")):
        return None
    try:
        return load_json(f'"{name}"'), load_json(text), None
    except ValueError as error:
        return load_json(f'"{name}"'), {}, f"arguments: {error}; call again with flatter ones"


def _head(source: Source) -> Generator[None, None, str | None]:
    """Up to the brace that opens the arguments, which is left: the name, as JSON writes it; None where something else stands."""
    if (yield from source.tag('"name"', '"type"')) == '"type"':
        for part in (":", '"function"', ",", '"name"'):
            if not (yield from source.tag(part)):
                return None
    for part in (":", '"'):
        if not (yield from source.tag(part)):
            return None
    start = source.mark()
    if not (yield from source.string()):
        return None
    name = source.since(start)[:-1]
    for parts in ((",",), ('"parameters"', '"arguments"'), (":",)):
        if not (yield from source.tag(*parts)):
            return None
    yield from source.spaces()
    return name if source.text[source.pos] == "{" else None


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {json.dumps(arguments, ensure_ascii=False, allow_nan=False)}}}'
