"""The grammar of an answer with tool calls, as a structural tag: xgrammar's own for the format, made exact.

What is changed in it, each from texts that the unchanged one accepts:

- The schemas, by `enforce`: whatever it accepts satisfies the declared schema of a strict tool.
- Required calls: behind one there is another one, after at most a line's end as GLM's templates write it, or the end of the answer. Text
  there could go on until the answer is cut.
- GLM: the arguments, by `glm_tag`: no white space around tags and values, and no `</arg_value>` in any value, nor in the JSON of one.
- Llama: text between calls holds no `"parameters"` and no `"arguments"`, and `{"name"` begins a call: the parser would take an
  object with them for a call, whose arguments no schema would hold.
"""
from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

from ...request import RequestError
from .enforce import enforceable
from .glm import OPEN
from .glm_tag import arguments_format, either
from .parser import FORMATS
from .shape import check_json_schema, check_tools

__all__ = ["held_schema", "json_beside_calls", "structural_tag"]

_BUILDERS = {"glm": "glm_4_7", "llama": "llama"}
_REASONING = {True: "enabled", False: "disabled", None: "auto"}
_LLAMA_OPENER, _LLAMA_ARGUMENTS = '{"name"', ['"parameters"', '"arguments"']
_LINE_END = {"type": "optional", "content": {"type": "const_string", "value": "\n"}}


def structural_tag(format: str, tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] = "auto",
                   parallel_tool_calls: bool = True, reasoning: bool | None = False) -> dict[str, Any] | None:
    """For `StructuredOutputsParams(structural_tag=...)`; None where there are no tools, and so nothing to hold to.

    A tool with `"strict": true` must have a schema that a grammar can enforce in full; without the field, it is enforced as far as a grammar
    can, and the parser marks what is still wrong; with false, arguments are any JSON object. A tool without `parameters` takes none.

    Args:
        tool_choice: "none" lets no call be written, "required" nothing but calls, a named one nothing but its call.
        parallel_tool_calls: False ends the answer behind the first call.
        reasoning: as the parser's. Llama's format has none.

    Raises:
        RequestError: a field of `tools` or `tool_choice` is wrong, a strict schema cannot be enforced, or xgrammar is missing.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: unknown; use one of {', '.join(FORMATS)}")
    check_tools(tools or [])
    _check_choice(tool_choice, tools or [])
    if not tools:
        return None
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError("tools: xgrammar is not installed, which holds calls to their schemas; run pip install 'minengine[serve]'") from error
    held = [] if tool_choice == "none" else [_held(tool, f"tools[{index}].function", format, xgrammar) for index, tool in enumerate(tools)]
    tag = xgrammar.get_model_structural_tag(
        _BUILDERS[format], tools=held, tool_choice=tool_choice, reasoning=_REASONING[reasoning], parallel_tool_calls=parallel_tool_calls,
        max_whitespace_cnt=2).model_dump(mode="json")
    _sharpen(tag, format)
    return tag


def _check_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise RequestError("tool_choice='required': no tools are declared; declare at least one in tools")
        return
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'tool_choice={choice!r}: use "auto", "none", "required" or {{"type": "function", "function": {{"name": ...}}}}')
    if function.get("name") not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"tool_choice.function.name={function.get('name')!r}: no such tool; name one that tools declares")


def json_beside_calls(format: str, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The format of an answer in JSON where calls are possible too: nothing in it reads as one.

    Args:
        schema: as `held_schema` writes it.
        place: the field that holds it, for the error.

    Raises:
        RequestError: the schema asks for what a call begins with.
    """
    signs = [OPEN] if format == "glm" else _LLAMA_ARGUMENTS
    written = json.dumps(schema, ensure_ascii=False)
    sign = next((sign for sign in signs if sign in written), None)
    if sign is not None:
        raise RequestError(f"{place}: asks for {sign}, which reads as a part of a call where tools are declared too; rename it, or send no tools")
    if format == "llama" and any(map(_free, (schema, *schema.get("$defs", {}).values()))):
        raise RequestError(f"{place}: leaves names free, so an object may read as a call where tools are declared too; declare its properties, "
                           "or send no tools")
    return {"type": "json_schema", "json_schema": dict(schema), "style": "json", "max_whitespace_cnt": 2, "excludes": signs if format == "glm" else []}


def _free(schema: Any) -> bool:
    """May an object of this schema, as `held_schema` writes it, have names that it does not declare?"""
    if "$ref" in schema or "enum" in schema:
        return False
    if "anyOf" in schema:
        return any(map(_free, schema["anyOf"]))
    if schema.get("type") == "object":
        return any(map(_free, schema["properties"].values())) if "properties" in schema else schema.get("additionalProperties", True) is not False
    if schema.get("type") == "array":
        rest = [] if schema.get("items") is False else [schema.get("items", {})]
        return any(map(_free, [*schema.get("prefixItems", ()), *rest]))
    return "type" not in schema


def held_schema(schema: Mapping[str, Any] | bool, place: str, switch: str | None, *, strict: bool, tags: bool = False,
                arguments: bool = True) -> dict[str, Any]:
    """The schema that a grammar holds an answer to: all of the one given if it is strict, else as much as a grammar can.

    Args:
        place, switch: the fields that hold the schema and `strict`, for the errors; no switch where all schemas are strict.
        tags, arguments: as `enforceable` takes them.

    Raises:
        RequestError: it is no schema, a strict one that cannot be enforced, or one that no text of the format satisfies.
    """
    if schema is False:
        raise RequestError(f"{place}=false: allows nothing; describe a value")
    check_json_schema(schema, place)
    loosen = f", or set {switch} to false" if switch else ""
    try:
        held, faults = enforceable(schema, tags, arguments)
    except RecursionError as error:  # branches whose difference lies in themselves, or very deep ones
        raise RequestError(f"{place}: refers to itself or nests too deep; make it flatter{loosen}") from error
    fault = next((one for one in faults if strict or one.hopeless), None)
    if fault is not None:
        reason = fault.reason if ";" in fault.reason else f"{fault.reason}; leave it out"
        raise RequestError(f"{f'{place}.{fault.place}'.rstrip('.')}: {reason}" + ("" if fault.hopeless else loosen))
    return held


def _held(tool: Mapping[str, Any], place: str, format: str, xgrammar: Any) -> dict[str, Any]:
    """A tool with the schema that its arguments are held to."""
    function = tool["function"]
    strict, parameters = function.get("strict"), function.get("parameters")
    if strict is False:
        schema = {"type": "object", "additionalProperties": True}
    elif parameters is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    else:
        schema = held_schema(parameters, f"{place}.parameters", f"{place}.strict", strict=bool(strict), tags=format == "glm")
        try:
            xgrammar.Grammar.from_json_schema(schema)
        except Exception as error:  # the library's own kinds: an unknown escape in a pattern, bounds that allow nothing
            reason = str(error).strip().splitlines()[-1].rpartition("] ")[2].partition(": ")[2]
            raise RequestError(f"{place}.parameters: no grammar can be made of it ({reason}); simplify it, or set {place}.strict to false") from error
    return {"type": "function", "function": {"name": function["name"], "parameters": schema}}


def _sharpen(node: Any, format: str) -> None:
    """Changes a dumped tag in place."""
    if isinstance(node, list):
        for part in node:
            _sharpen(part, format)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if kind == "tag" and node["content"].get("type") == "json_schema":
        if format == "glm":
            node["content"] = arguments_format(node["content"]["json_schema"])
        return
    if format == "llama" and kind in ("triggered_tags", "any_text"):
        node["excludes"] = [*node["excludes"], *_LLAMA_ARGUMENTS]
        if kind == "triggered_tags":
            node["triggers"] = [_LLAMA_OPENER]
    for part in node.values():
        _sharpen(part, format)
    if kind == "triggered_tags" and node["at_least_one"]:
        calls = either(node["tags"])
        further = {"type": "star", "content": {"type": "sequence", "elements": [_LINE_END, calls]}}
        replaced = calls if node["stop_after_first"] else {"type": "sequence", "elements": [calls, further]}
        node.clear()
        node.update(replaced)
