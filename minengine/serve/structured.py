"""What an answer must look like: `response_format`, `structured_outputs` and tools, as the engine's `StructuredOutputsParams`."""
from __future__ import annotations

import asyncio
import json
import re
from functools import lru_cache
from typing import Any

from ..request import RequestError, StructuredOutputsParams
from .limits import ServeLimits, check_count, check_regex, check_schema
from .protocol import ChatCompletionRequest, StructuredOutputs, json_field
from .state import ServerState
from .tools import check_tools, held_schema, json_beside_calls, structural_tag

__all__ = ["chat_structure", "check_tool_fields", "extension"]

THOUGHT = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
TAGS_KEPT = 32  # lists of tools whose grammars need not be written again; the compiled ones are the engine's to keep


async def chat_structure(body: ChatCompletionRequest, server: ServerState, *, reasoning: bool) -> StructuredOutputsParams | None:
    """The structure of a chat's answer, compiled; None when any text will do.

    With tools and a JSON schema (`response_format`, `structured_outputs.json`) an answer is either calls or text of that schema. Where
    `tool_choice` demands a call there are calls only: no text is left that could have a form.

    Args:
        reasoning: the answer begins inside reasoning, which stays free up to its end.

    Raises:
        RequestError: two fields ask for different structures, or one for something that cannot be followed.
    """
    outputs, response = body.structured_outputs, body.response_format
    calls = bool(body.tools) and server.args.tool_grammar
    called = calls and body.tool_choice != "none"
    formed = response is not None and response.type != "text"
    if outputs is not None and (formed or called and outputs.json_ is None):
        other, remedy = ("response_format", "") if formed else ("tools", ", or send tool_choice='none'")
        raise RequestError(f"structured_outputs: an answer has one structure and {other} asks for another; leave one out{remedy}")
    field, schema = "tools", None
    if outputs is not None:
        params = await extension(outputs, server.limits)
        if not called:
            return params
        field, schema = "structured_outputs.json", params.json
    elif formed:
        field = "response_format.json_schema.schema" if response.type == "json_schema" else "response_format"
        schema = await asyncio.to_thread(_response_schema, body, server.limits)
    if schema is not None and not called:
        structured = _formatted({"type": "json_schema", "json_schema": schema}, reasoning)
    elif calls:
        beside = None if schema is None or body.tool_choice != "auto" else json.dumps(schema)
        structured = await asyncio.to_thread(_calls, server.prompts.tool_format, json.dumps(body.declared), json.dumps(body.tool_choice),
                                             body.parallel_tool_calls is not False, reasoning, beside, field)
    else:
        return None
    try:
        await server.engine.compile(structured)
    except RequestError as error:  # the engine knows the structure by its own name for it
        raise RequestError(re.sub(r"^structured_outputs(\.\w+)?", field, str(error))) from error
    return structured


@lru_cache(TAGS_KEPT)
def _calls(tool_format: str, tools: str, tool_choice: str, parallel_tool_calls: bool, reasoning: bool, beside: str | None,
           field: str) -> StructuredOutputsParams:
    """The grammar of tool calls, or of them or a text. Tools, choice and the text's schema come as JSON, by which they are found again;
    the first call imports xgrammar."""
    choice = json.loads(tool_choice) if beside is None else "required"
    try:
        form = structural_tag(tool_format, json.loads(tools), choice, parallel_tool_calls, False)["format"]
        if beside is not None:
            form = {"type": "or", "elements": [json_beside_calls(tool_format, json.loads(beside), field), form]}
    except RequestError as error:
        raise _dotted(error) from error
    return _formatted(form, reasoning)


def _formatted(form: dict[str, Any], reasoning: bool) -> StructuredOutputsParams:
    if reasoning:
        form = {"type": "sequence", "elements": [THOUGHT, form]}
    elif form["type"] == "json_schema":
        return StructuredOutputsParams(json=form["json_schema"])
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def check_tool_fields(body: ChatCompletionRequest, limits: ServeLimits) -> None:
    """
    Raises:
        RequestError: a tool is none or too large, or `tool_choice` names none of them.
    """
    check_count(len(body.tools or ()), limits.max_tools, "tools", "tools", "max_tools")
    for at, tool in enumerate(body.tools or ()):
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"tools.{at}.function.parameters", limits)
    try:
        check_tools(body.declared)
    except RequestError as error:
        raise _dotted(error) from error
    if isinstance(body.tool_choice, dict):
        name, names = body.tool_choice["function"]["name"], [tool.function.name for tool in body.tools or ()]
        if name not in names:
            raise RequestError(f"tool_choice.function.name={name[:80]!r}: is no tool of this request; use one that tools declares")
    elif body.tool_choice == "required" and not body.tools:
        raise RequestError("tool_choice='required': there is no tool to call; send tools, or tool_choice='auto'")


def _dotted(error: RequestError) -> RequestError:
    """`tools[0].function` as this server's errors write it, `tools.0.function`."""
    return RequestError(re.sub(r"(?<=\w)\[(\d+)\](?=[.:=\s])", r".\1", str(error)))


async def extension(outputs: StructuredOutputs, limits: ServeLimits) -> StructuredOutputsParams:
    """vLLM's `structured_outputs`, within the server's limits. A JSON schema holds in full.

    Raises:
        RequestError: it is not exactly one structure, is too large, or its schema asks for what no grammar can enforce.
    """
    given = {name.rstrip("_"): getattr(outputs, name) for name in outputs.model_fields_set if getattr(outputs, name) is not None}
    if len(given) != 1:
        raise RequestError(f"structured_outputs: has {', '.join(sorted(given)) or 'nothing'}; send exactly one of json, regex, choice, grammar, "
                           "structural_tag")
    (name, value), = given.items()
    field = f"structured_outputs.{name}"
    if name in ("json", "structural_tag"):
        if isinstance(value, str):
            check_count(len(value), limits.max_schema_bytes, field, "characters", "max_schema_bytes")
            value = json_field(value, field, limits)
        check_schema(value, field, limits)
        if name == "json":
            value = await asyncio.to_thread(_held, value, field, None, strict=True)
    elif name == "regex":
        check_regex(value, field, limits)
    elif name == "grammar":
        check_count(len(value), limits.max_grammar_chars, field, "characters", "max_grammar_chars")
    else:
        check_count(len(value), limits.max_choices, field, "texts", "max_choices")
        check_count(sum(map(len, value)), limits.max_grammar_chars, field, "characters", "max_grammar_chars")
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
    return _held(schema, "response_format.json_schema.schema", "response_format.json_schema.strict", strict=bool(response.json_schema.strict))


def _held(schema: dict[str, Any] | bool, field: str, switch: str | None, *, strict: bool) -> dict[str, Any]:
    try:
        return held_schema(schema, field, switch, strict=strict, arguments=False)
    except RequestError as error:
        raise _dotted(error) from error
