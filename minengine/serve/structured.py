"""What an answer must look like: `response_format`, `structured_outputs` and tools, as the engine's `StructuredOutputsParams`."""
from __future__ import annotations

from typing import Any

from ..request import RequestError, StructuredOutputsParams
from .limits import ServeLimits, check_count, check_regex, check_schema
from .protocol import ChatCompletionRequest, StructuredOutputs, json_field
from .tools import structural_tag

__all__ = ["chat_structure", "extension"]

THINK_END = "</think>"


def chat_structure(body: ChatCompletionRequest, tool_format: str, *, tool_grammar: bool, reasoning: bool,
                   limits: ServeLimits) -> StructuredOutputsParams | None:
    """The structure of a chat's answer, or None when any text will do.

    Args:
        tool_grammar: hold calls to their tools' schemas while they are generated.
        reasoning: the answer begins inside reasoning, which stays free up to its end.

    Raises:
        RequestError: two fields ask for different structures, or one for something that cannot be followed.
    """
    asked = [name for name, given in (("structured_outputs", body.structured_outputs is not None),
                                      ("response_format", body.response_format is not None and body.response_format.type != "text"),
                                      ("tools", tool_grammar and bool(body.tools) and body.tool_choice != "none")) if given]
    if len(asked) > 1:
        raise RequestError(f"{asked[0]}: an answer has one structure and {asked[1]} asks for another; leave one out"
                           + (", or send tool_choice='none'" if asked[1] == "tools" else ""))
    if body.structured_outputs is not None:
        return extension(body.structured_outputs, limits)
    if "response_format" in asked:
        return _behind_reasoning(_response_schema(body, limits)) if reasoning else StructuredOutputsParams(json=_response_schema(body, limits))
    if not body.tools or not tool_grammar:
        return None
    tag = structural_tag(tool_format, [tool.model_dump(exclude_none=True) for tool in body.tools], body.tool_choice,
                         body.parallel_tool_calls is not False, reasoning)
    return None if tag is None else StructuredOutputsParams(structural_tag=tag)


def extension(outputs: StructuredOutputs, limits: ServeLimits) -> StructuredOutputsParams:
    """vLLM's `structured_outputs`, as it is, within the server's limits."""
    given = {name.rstrip("_"): getattr(outputs, name) for name in outputs.model_fields_set if getattr(outputs, name) is not None}
    if len(given) != 1:
        raise RequestError(f"structured_outputs: has {', '.join(sorted(given)) or 'nothing'}; send exactly one of json, regex, choice, grammar, structural_tag")
    (name, value), = given.items()
    field = f"structured_outputs.{name}"
    if name in ("json", "structural_tag"):
        if isinstance(value, str):
            check_count(len(value), limits.max_schema_bytes, field, "characters", "max_schema_bytes")
            value = json_field(value, field, limits)
        check_schema(value, field, limits)
    elif name == "regex":
        check_regex(value, field, limits)
    elif name == "grammar":
        check_count(len(value), limits.max_grammar_chars, field, "characters", "max_grammar_chars")
    else:
        check_count(len(value), limits.max_choices, field, "texts", "max_choices")
        check_count(sum(map(len, value)), limits.max_grammar_chars, field, "characters", "max_grammar_chars")
        value = tuple(value)
    return StructuredOutputsParams(**{name: value})


def _response_schema(body: ChatCompletionRequest, limits: ServeLimits) -> dict[str, Any]:
    response = body.response_format
    if response.type == "json_object":
        return {"type": "object"}
    if response.json_schema is None:
        raise RequestError("response_format.json_schema: is missing; send {\"name\": ..., \"schema\": {...}}")
    schema = response.json_schema.schema_
    if schema is None:
        raise RequestError("response_format.json_schema.schema: is missing; send a JSON schema, or type='json_object' for any object")
    check_schema(schema, "response_format.json_schema.schema", limits)
    return schema


def _behind_reasoning(schema: dict[str, Any]) -> StructuredOutputsParams:
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END}
    answer = {"type": "json_schema", "json_schema": schema}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {"type": "sequence", "elements": [thought, answer]}})
