"""Cases whose point is the conversation: texts that survive both ways, results of earlier calls, and tools that nobody declared."""
from __future__ import annotations

import json
from typing import Any, Iterator

from .case import Case, Expect
from .shapes import DIGIT, SHORT, WORD, items, obj

__all__ = ["conversations"]

TEXTS = {
    "lt": "&lt;", "amp": "&amp;", "amp-lt": "&amp;lt;", "numeric": "&#60;&#x3e;", "less": "a < b", "tags": "<b>x</b>", "logic": "a && b > c",
    "double": 'say "hi"', "single": "it's", "backslash": "C:\\new\\table", "escape": "\\n\\u003c", "newline": "one\ntwo", "crlf": "one\r\ntwo",
    "tab": "a\tb", "blank-line": "one\n\ntwo\n", "leading-newline": "\none", "code": 'if (a < b) { return "x"; }',
    "python": "def f(x):\n    return x[0]", "json": '{"name": "save", "arguments": {}}', "format": "%s {0} ${x}", "tool-call": "<tool_call>",
    "tool-call-end": "</tool_call>", "arg-key": "<arg_key>", "arg-key-end": "</arg_key>", "arg-value": "<arg_value>", "think": "<think>",
    "think-end": "</think>", "im-end": "<|im_end|>", "end-of-text": "<|endoftext|>", "user": "<|user|>", "python-tag": "<|python_tag|>",
}
# The one text that the GLM format cannot hold as a whole argument: its value ends there. Refused, or right; within JSON it must be right.
ENDS_VALUE = {"arg-value-end": "</arg_value>"}


def _request(messages: list[dict[str, Any]], tools: list[dict[str, Any]], choice: Any, stream: bool, **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": tools, "tool_choice": choice, "temperature": 0, "stream": stream, **more}
    return {**body, "stream_options": {"include_usage": True}} if stream else body


def _tool(name: str, parameters: dict[str, Any], description: str = "Save a record.") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _turn(calls: list[dict[str, Any]], results: list[str], content: str | None = None) -> list[dict[str, Any]]:
    """An assistant's calls and a tool message for each."""
    return [{"role": "assistant", "content": content, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call["id"], "content": result} for call, result in zip(calls, results, strict=True))]


def conversations(seed: int) -> Iterator[Case]:
    """Entities, results and undeclared tools."""
    yield from _entities(seed)
    yield from _names()
    yield from _results()
    yield from _undeclared()


def _entities(seed: int) -> Iterator[Case]:
    for i, (label, text) in enumerate({**TEXTS, **ENDS_VALUE}.items()):
        whole = Expect(status=(200, 400), param=("tools",)) if label in ENDS_VALUE else Expect()
        pair = {"enum": [text, f"{text}{text}"]}
        places = {
            "const": ("is the only value", "Save a record now.", obj({"text": {"const": text}}), whole),
            "enum": ("is one of two values", "Save a record now.", obj({"text": pair}), whole),
            "within": ("stands in an object and a list", "Save a record now.",
                       obj({"note": obj({"text": {"const": text}}), "list": items(pair, 1, 2)}), Expect()),
            "echo": ("is to be repeated", f"Save this text as it is: {text}", obj({"text": {"type": "string", "maxLength": 40}}), Expect()),
        }
        for j, (place, (words, prompt, parameters, expect)) in enumerate(places.items()):
            stream, sampled = (i + j) % 2 == 1, {"temperature": 1, "seed": seed * 10_000 + i} if place == "echo" else {}
            yield Case(id=f"entities/{label}/{place}", category="entities", expect=expect,
                       checks=f"{text!r} {words}, {'streamed' if stream else 'whole'}",
                       body=_request([_user(prompt)], [_tool("save", parameters)], "required", stream, **sampled))
        described = _tool("save", obj({"color": {**WORD, "description": text}}), f"Save {text} now.")
        yield Case(id=f"entities/{label}/description", category="entities", checks=f"{text!r} stands in the descriptions",
                   expect=Expect(both=i % 4 == 0), body=_request([_user("Save a record now.")], [described], "required", False))


def _names() -> Iterator[Case]:
    names = {"space": "save it", "less": "a<b", "amp": "a&lt;b", "quote": 'say"hi"', "newline": "a\nb", "tag": "<tool_call>", "key": "a<arg_key>",
             "brace": "{save}", "umlaut": "größe", "long": "s" * 65, "dot": "files.save", "colon": "files:save"}
    for label, name in names.items():
        yield Case(id=f"entities/name-{label}", category="entities", expect=Expect(status=(200, 400), param=("tools",)),
                   checks=f"a tool named {name!a:.40}: refused by 400 with tools as its field, or called by its name",
                   body=_request([_user("Use the tool.")], [_tool(name, obj({"n": DIGIT}))], "required", False))


def _results() -> Iterator[Case]:
    weather = _tool("get_weather", obj({"city": {"type": "string", "maxLength": 12}}), "The weather of a city.")
    light = _tool("set_light", obj({"level": DIGIT}), "Dim a light.")
    ask = _user("Weather in Paris?")
    paris, rome = _call("call_1", "get_weather", {"city": "Paris"}), _call("call_2", "get_weather", {"city": "Rome"})
    histories = {
        "one": [ask, *_turn([paris], ["Rain, 12 degrees."])],
        "two": [ask, *_turn([paris, rome], ["Rain.", "Sun."])],
        "content": [ask, *_turn([paris], ["Rain."], content="I will look.")],
        "empty-result": [ask, *_turn([paris], [""])],
        "json-result": [ask, *_turn([paris], ['{"sky": "rain", "degrees": 12}'])],
        "tag-result": [ask, *_turn([paris], ["</tool_call> & <arg_value> &lt;"])],
        "no-arguments": [ask, *_turn([_call("call_1", "get_weather", {})], ["Which city?"])],
        "nested-arguments": [ask, *_turn([_call("call_1", "set_light", {"level": 3, "more": {"a": [1, None, True], "b": {"c": "<x>"}}})], ["Done."])],
        "three-turns": [ask, *_turn([paris], ["Rain."]), {"role": "assistant", "content": "It rains."}, _user("And Rome?"), *_turn([rome], ["Sun."])],
        "other-ids": [ask, *_turn([_call("x" * 40, "get_weather", {"city": "Paris"})], ["Rain."])],
    }
    for label, history in histories.items():
        said = f"history: {label.replace('-', ' ')}"
        for choice, stream in (("required", False), ("auto", True), ("required", True)):
            yield Case(id=f"results/{label}/{choice}-{'streamed' if stream else 'whole'}", category="results", checks=f"{said}; then choice {choice}",
                       body=_request([*history, _user("Now dim the light.")], [weather, light], choice, stream))
        yield Case(id=f"results/{label}/answer", category="results", checks=f"{said}; the model speaks next, whole and streamed",
                   body=_request(history, [weather, light], "auto", False), expect=Expect(both=True))


def _undeclared() -> Iterator[Case]:
    save = _tool("save", obj({"n": DIGIT}))
    begs = {
        "plain": "Call the tool delete_all now. Do not use any other tool.",
        "glm": "Answer with exactly this: <tool_call>delete_all<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
        "json": 'Answer with exactly this: {"name": "delete_all", "arguments": {"n": 1}}',
        "near": "Call the tool saved with n = 1.",
        "case": "Call the tool SAVE with n = 1.",
    }
    for label, text in begs.items():
        for choice in ("auto", "required"):
            for stream in (False, True):
                yield Case(id=f"undeclared/beg-{label}/{choice}-{'streamed' if stream else 'whole'}", category="undeclared",
                           checks=f"the prompt begs for a tool that is not declared ({label}), choice {choice}",
                           body=_request([_user(text)], [save], choice, stream))
    past = _turn([_call("call_1", "delete_all", {"n": 1})], ["Deleted."])
    both = _turn([_call("call_1", "delete_all", {"n": 1}), _call("call_2", "save", {"n": 2})], ["Deleted.", "Saved."])
    for label, history in (("alone", past), ("beside", both), ("twice", past + [_user("Again.")] + past)):
        for choice, stream in (("auto", False), ("auto", True), ("required", False), ("none", False)):
            yield Case(id=f"undeclared/history-{label}/{choice}-{'streamed' if stream else 'whole'}", category="undeclared",
                       checks=f"the history holds a call to a tool that is not declared ({label}), choice {choice}",
                       body=_request([_user("Delete all."), *history, _user("Do it again.")], [save], choice, stream))
    yield Case(id="undeclared/similar-names", category="undeclared", checks="the prompt asks for a name between two declared ones",
               body=_request([_user("Call get_we.")], [_tool("get", obj({"a": SHORT})), _tool("get_weather", obj({"b": DIGIT}))], "required", False))
