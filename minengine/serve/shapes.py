"""Fields that take several shapes: one validator each, so that an error names the field and not the attempts. Each type brings its own
JSON schema, for the document."""
from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

__all__ = ["Content", "Prompts", "Stop", "ToolChoice"]


def _refuse(sentence: str) -> PydanticCustomError:
    """A validator's no: what is wrong; the remedy. The field's name and value are put before it by the error's reader."""
    return PydanticCustomError("shape", "{sentence}", {"sentence": sentence})


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refuse("is no stop string; use a non-empty text or a list of them")
    return tuple(stops)


def _content(value: Any) -> str | None:
    """A message's text. Parts are joined by newlines, as vLLM does for templates that know no parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refuse("is no content; use a text or a list of parts like {\"type\": \"text\", \"text\": ...}")
    for at, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _refuse(f"part {at} is no content part; use {{\"type\": \"text\", \"text\": ...}}")
        if part["type"] != "text":
            raise _refuse(f"part {at} has type={part['type'][:40]!r} and this model reads text only; send parts of type 'text'")
        if not isinstance(part.get("text"), str):
            raise _refuse(f"part {at} has no text; use {{\"type\": \"text\", \"text\": ...}}")
    return "\n".join(part["text"] for part in value)


def _tool_choice(value: Any) -> str | dict[str, Any]:
    if value is None or value in ("auto", "none", "required"):
        return value or "auto"
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _refuse("is no choice; use 'auto', 'none', 'required' or {\"type\": \"function\", \"function\": {\"name\": ...}}")
    return {"type": "function", "function": {"name": function["name"]}}


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    ok = isinstance(value, list) and value and (
        all(isinstance(item, str) for item in value)
        or all(isinstance(item, list) and item and all(type(id) is int for id in item) for item in value))
    if not ok:
        raise _refuse("is no prompt; use a text, a list of texts, a list of token ids or a list of such lists, none of them empty")
    return value


_TEXT_OR_TEXTS = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}, {"type": "null"}]}
_TEXT_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
_NAMED = {"type": "object", "required": ["type", "function"], "properties": {
    "type": {"const": "function"}, "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, _IDS,
                      {"type": "array", "items": _IDS, "minItems": 1}]}

Stop = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_TEXT_OR_TEXTS)]
Content = Annotated[str | None, PlainValidator(_content), WithJsonSchema(_CONTENT)]
ToolChoice = Annotated[str | dict[str, Any], PlainValidator(_tool_choice), WithJsonSchema(
    {"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED, {"type": "null"}]})]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]
