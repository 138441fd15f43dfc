"""Whether an answer holds what its case asks. Pure functions: no server, no clock.

Whether a call was wise is the model's affair. Here: can a client run it, is it one of the declared ones, does it satisfy the schema, was it cut,
and is a call that was made also a call that arrived.
"""
from __future__ import annotations

import json
from typing import Any

from .case import Case, Verdict
from .wire import Answer

__all__ = ["compare", "judge"]

# Raw text of calls in the formats of well-known models. In an answer's content it is a call that the server did not recognise.
WIRE = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "<|python_tag|>", "[TOOL_CALLS]",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|DSML|")
# An answer of this many tokens that shows neither content nor reasoning nor a call has been dropped somewhere; a few may be end marks and blanks.
SILENT_TOKENS = 8


class _Bad(ValueError):
    """Arguments that are no JSON object; the message says why."""


def judge(case: Case, answer: Answer) -> Verdict:
    """The verdict on one answer to one case."""
    if answer.status not in case.expect.status:
        wanted = " or ".join(map(str, case.expect.status))
        said = (answer.error or {}).get("message") or answer.broken or "a completion"
        return Verdict(kind="wrong_status", detail=f"status {answer.status} instead of {wanted}: {said}")
    if answer.status != 200:
        return _refusal(case, answer)
    cut = answer.finish_reason == "length"
    fault = answer.broken or _calls_fault(case, answer) or _finish_fault(case, answer)
    if fault:
        return Verdict(kind="malformed", detail=fault, calls=len(answer.calls), cut=cut)
    for kind, fault in (("lost", _lost(case, answer, cut)), ("leaked", _leaked(case, answer, cut))):
        if fault:
            return Verdict(kind=kind, detail=fault, calls=len(answer.calls), cut=cut)
    return Verdict(kind="ok", calls=len(answer.calls), cut=cut)


def compare(whole: Answer, streamed: Answer) -> str | None:
    """What differs between an answer and its streamed twin, in a sentence; ids may."""
    for name in ("status", "finish_reason", "content", "reasoning"):
        a, b = getattr(whole, name), getattr(streamed, name)
        if a != b:
            return f"{name} is {a!r:.150} whole and {b!r:.150} streamed"
    a, b = ([_essence(call) for call in answer.calls] for answer in (whole, streamed))
    return None if a == b else f"calls are {a!r:.300} whole and {b!r:.300} streamed"


def _essence(call: Any) -> tuple[Any, ...]:
    function = call.get("function") or {}
    return function.get("name"), function.get("arguments"), (call.get("error") or {}).get("code")


def _refusal(case: Case, answer: Answer) -> Verdict:
    if answer.error is None:
        return Verdict(kind="wrong_status", detail=f"status {answer.status}, and {answer.broken}")
    if not isinstance(answer.error.get("message"), str) or not answer.error["message"]:
        return Verdict(kind="wrong_status", detail=f"status {answer.status} without a message")
    param = answer.error.get("param")
    steps = str(param).replace("[", ".").replace("]", "").split(".")
    if case.expect.param and (param is None or steps[0] not in case.expect.param):
        wanted = " or ".join(case.expect.param)
        return Verdict(kind="wrong_status", detail=f"param is {param!r} instead of {wanted}: {answer.error['message']:.150}")
    return Verdict(kind="ok")


def _tools(case: Case) -> dict[str, dict[str, Any]]:
    """Name to schema of the declared tools; a tool without parameters takes none."""
    tools = {}
    for tool in case.body.get("tools") or ():
        function = tool["function"]
        tools[function["name"]] = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    return tools


def _choice(case: Case) -> tuple[str, str | None]:
    """(auto | required | named | none, the name)."""
    choice = case.body.get("tool_choice") or ("auto" if case.body.get("tools") else "none")
    return ("named", choice["function"]["name"]) if isinstance(choice, dict) else (choice, None)


def _calls_fault(case: Case, answer: Answer) -> str | None:
    tools, (choice, named), seen = _tools(case), _choice(case), set()
    for i, call in enumerate(answer.calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return f"call {i} has no function: {call!r:.150}"
        if call.get("type") != "function":
            return f"call {i} has type {call.get('type')!r} instead of 'function'"
        if not isinstance(call.get("id"), str) or not call["id"] or call["id"] in seen:
            return f"call {i} has id {call.get('id')!r}, which must be text, not empty and its own"
        seen.add(call["id"])
        name, text = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(text, str):
            return f"call {i} must have a name and arguments as text: {function!r:.150}"
        mark = call.get("error")
        if mark is not None and not (isinstance(mark, dict) and all(isinstance(mark.get(k), str) for k in ("code", "message"))):
            return f"call {i} is marked by {mark!r:.100}, which has no code and message"
        if name not in tools:
            if mark is None:
                return f"call {i} names {name!r}, which is not declared, without a mark"
            continue
        if mark is not None and not case.expect.loose:
            return f"call {i} to {name} is marked {mark['code']}: {mark['message']:.150}"
        if choice == "named" and name != named:
            return f"call {i} is to {name!r}, and the choice names {named!r}"
        fault = _arguments_fault(text, {} if case.expect.loose else tools[name])
        if fault:
            return f"call {i} to {name}: {fault}"
    if choice == "none" and answer.calls:
        return f"{len(answer.calls)} calls, and the choice is none"
    if case.body.get("parallel_tool_calls") is False and len(answer.calls) > 1:
        return f"{len(answer.calls)} calls, and parallel_tool_calls is false"
    return None


def _arguments_fault(text: str, schema: dict[str, Any]) -> str | None:
    from jsonschema import Draft202012Validator

    try:
        arguments = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except ValueError as error:
        return f"arguments are no JSON ({error}): {text!r:.200}"
    if not isinstance(arguments, dict):
        return f"arguments are {type(arguments).__name__}, no object: {text!r:.200}"
    error = next(Draft202012Validator(schema).iter_errors(arguments), None)
    if error is None:
        return None
    where = ".".join(map(str, error.absolute_path)) or "the object"
    return f"arguments break the schema at {where}: {error.message:.150}; they are {text!r:.200}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise _Bad("a key stands twice")
    return result


def _refuse(constant: str) -> None:
    raise _Bad(f"{constant} is no JSON")


def _finish_fault(case: Case, answer: Answer) -> str | None:
    reason, choice = answer.finish_reason, _choice(case)[0]
    if answer.calls:
        # A named call ends by "stop" at OpenAI; whole calls before a cut one may stand beside "length".
        allowed = ("tool_calls", "length", "stop") if choice == "named" else ("tool_calls", "length")
    else:
        allowed = ("stop", "length", "tool_calls")  # tool_calls without a call is a lost one
    return None if reason in allowed else f"finish_reason is {reason!r} beside {len(answer.calls)} calls"


def _lost(case: Case, answer: Answer, cut: bool) -> str | None:
    if answer.calls or cut:
        return None
    if answer.finish_reason == "tool_calls":
        return "finish_reason is tool_calls, and there is no call"
    if _choice(case)[0] in ("required", "named"):
        return f"the choice demands a call, and the answer is {answer.content!r:.200}"
    if (answer.completion_tokens or 0) > SILENT_TOKENS and not answer.content and not answer.reasoning:
        return f"{answer.completion_tokens} tokens were generated, and the answer shows nothing of them"
    return None


def _leaked(case: Case, answer: Answer, cut: bool) -> str | None:
    """Wire text in the content, unless the answer was cut (its unfinished call is text) or the conversation itself speaks of it."""
    if cut or _choice(case)[0] == "none":
        return None
    said = json.dumps(case.body["messages"], ensure_ascii=False)
    for mark in WIRE:
        if mark in answer.content and mark not in said:
            return f"{mark} stands in the content: {answer.content!r:.200}"
    try:
        call = json.loads(answer.content)
    except ValueError:
        return None
    if isinstance(call, dict) and call.get("name") in _tools(case) and isinstance(call.get("arguments", call.get("parameters")), dict):
        return f"the content is a call: {answer.content!r:.200}"
    return None
