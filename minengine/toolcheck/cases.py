"""All cases, enumerated from tables: the same list for the same seed, on every machine.

Each shape of `shapes.py` is asked for twice: whole, greedy, `tool_choice` required; and streamed, sampled at temperature 1 with a seed of its own, by
name among other tools, `strict` where the schema is within OpenAI's strict subset. Sampling brings texts that a greedy answer never would.
"""
from __future__ import annotations

from typing import Any, Iterator, Sequence

from .case import Case, Expect
from .conversations import conversations
from .refusals import refusals
from .shapes import DIGIT, FLAG, SHORT, WORD, Shape, items, obj, shapes

__all__ = ["CATEGORIES", "all_cases", "select"]

CATEGORIES = {
    "types": "arguments of every JSON type, and texts that look like another type",
    "required": "required and optional members, and tools without parameters",
    "enums": "values from a list",
    "consts": "exactly one value",
    "refs": "definitions and references",
    "recursion": "schemas that contain themselves",
    "nesting": "objects and lists within each other",
    "unions": "one schema or another",
    "non-ascii": "scripts, emoji and invisible characters in values and names",
    "entities": "&lt; &amp; < quotes, newlines, code and the formats' own tags: a value arrives as it is",
    "keywords": "schema keywords that a grammar may not know: refused, or held",
    "streaming": "the same greedy request whole and streamed gives the same calls, texts and finish_reason",
    "choice": "auto, required, named and none, with one tool, three and eight",
    "parallel": "parallel_tool_calls false gives one call at most",
    "prefixes": "tools whose names begin each other's",
    "cut-offs": "max_tokens ends the answer: finish_reason says so, and no part of a call passes for a whole one",
    "results": "earlier calls and their results in the history",
    "undeclared": "tools that are asked for or stand in the history and are not declared: never dropped in silence",
    "bad-requests": "requests that are wrong: 400, the field's name, and the server stays up",
}


def all_cases(seed: int = 0) -> list[Case]:
    """Every case; `seed` moves the sampled ones.

    Raises:
        ValueError: seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed={seed}: use 0 or more")
    cases = [*_shaped(seed), *_keywords(), *_streaming(), *_choice(), *_parallel(), *_prefixes(), *_cut_offs(), *conversations(seed), *refusals()]
    order = list(CATEGORIES)
    return sorted(cases, key=lambda case: order.index(case.category))


def select(cases: Sequence[Case], only: Sequence[str] = (), limit: int | None = None) -> list[Case]:
    """The cases of some categories (all for none), thinned evenly to `limit`.

    Raises:
        ValueError: a category that there is not, or a limit below 1.
    """
    unknown = [name for name in only if name not in CATEGORIES]
    if unknown:
        raise ValueError(f"only={unknown[0]}: is no category; use {', '.join(CATEGORIES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"cases={limit}: use 1 or more")
    chosen = [case for case in cases if not only or case.category in only]
    if limit is None or limit >= len(chosen):
        return chosen
    return [chosen[i * len(chosen) // limit] for i in range(limit)]


def tool(name: str, parameters: dict[str, Any] | None = None, description: str | None = None, **more: Any) -> dict[str, Any]:
    """A function in OpenAI's list of tools."""
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": {field: value for field, value in function.items() if value is not None}}


def named(name: str) -> dict[str, Any]:
    """The tool_choice that demands this function."""
    return {"type": "function", "function": {"name": name}}


def ask(text: str, tools: Sequence[dict[str, Any]], choice: Any = None, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A greedy request of one message; `more` overrides."""
    body = {"messages": [{"role": "user", "content": text}], "tools": list(tools), "temperature": 0, **more}
    if choice is not None:
        body["tool_choice"] = choice
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


DECOYS = (tool("look_up", obj({"query": SHORT}), "Look a word up."), tool("stop_all", description="Stop everything."))


def _within_strict(schema: Any) -> bool:
    """Whether OpenAI's strict mode takes the schema: closed objects, everything required, anyOf but not oneOf, allOf or tuples."""
    if isinstance(schema, list):
        return all(map(_within_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object":
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", ())) != set(schema.get("properties", ())):
            return False
    return not {"oneOf", "allOf", "prefixItems", "definitions"} & set(schema) and all(map(_within_strict, schema.values()))


def _shaped(seed: int) -> Iterator[Case]:
    for i, shape in enumerate(shapes()):
        yield Case(id=f"{shape.category}/{shape.name}/required", category=shape.category, checks=f"{shape.checks}; required, whole, greedy",
                   body=ask("Save a record now.", [_save(shape)], "required"))
        strict = shape.parameters is not None and _within_strict(shape.parameters) or None
        yield Case(id=f"{shape.category}/{shape.name}/named", category=shape.category,
                   checks=f"{shape.checks}; named among three{', strict' if strict else ''}, streamed, sampled",
                   body=ask("Save a record of your choice.", [DECOYS[0], _save(shape, strict=strict), DECOYS[1]], named("save"), stream=True,
                            temperature=1, seed=seed * 10_000 + i))


def _save(shape: Shape, **more: Any) -> dict[str, Any]:
    return tool("save", shape.parameters, "Save a record.", **more)


def _keywords() -> Iterator[Case]:
    digits, closed = items(DIGIT, 3, 3), {"type": "object", "additionalProperties": False}
    three = {"a": FLAG, "b": DIGIT, "c": WORD}
    table = {
        "unique-items": obj({"value": {**digits, "uniqueItems": True}}),
        "contains": obj({"value": {**digits, "contains": {"const": 7}}}),
        "multiple-of": obj({"value": {"type": "integer", "minimum": 1, "maximum": 99, "multipleOf": 7}}),
        "not": obj({"value": {**WORD, "not": {"const": "red"}}}),
        "all-of-two": obj({"value": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}}),
        "if-then": obj({"a": FLAG, "b": DIGIT}, ["a"], **{"if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}}),
        "dependent": obj({"a": FLAG, "b": DIGIT}, [], dependentRequired={"a": ["b"]}),
        "min-properties": obj(three, [], minProperties=2),
        "max-properties": obj(three, [], maxProperties=1),
        "pattern-properties": {**closed, "patternProperties": {"^n[0-9]$": DIGIT}, "minProperties": 1, "maxProperties": 2},
        "property-names": {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": DIGIT, "maxProperties": 2},
        "one-of-overlap": obj({"value": {"oneOf": [{"type": "integer", "minimum": low, "maximum": low + 5} for low in (0, 5)]}}),
        "beyond-64-bits": obj({"value": {"enum": [12345678901234567890, 123456789012345678901234567890]}}),
        "look-ahead": obj({"value": {"type": "string", "pattern": "^(?!red)[a-z]{3}$"}}),
    }
    for name, parameters in table.items():
        for strict in (True, None):
            yield Case(id=f"keywords/{name}/{'strict' if strict else 'plain'}", category="keywords",
                       checks=f"{name}: refused by 400 with tools as its field, or {'held' if strict else 'an object (strict is not said)'}",
                       body=ask("Save a record now.", [tool("save", parameters, "Save a record.", strict=strict)], "required"),
                       expect=Expect(status=(200, 400), param=("tools",), loose=not strict))


def _streaming() -> Iterator[Case]:
    """Every fourth shape, and prompts that need no call."""
    for i, shape in enumerate(shapes()):
        if i % 4 == 0:
            choice = ("required", named("save"), "auto")[i // 4 % 3]
            yield Case(id=f"streaming/{shape.category}-{shape.name}", category="streaming", checks=f"whole and streamed agree: {shape.checks}",
                       body=ask("Save a record now.", [_save(shape)], choice), expect=Expect(both=True))
    for i, text in enumerate(("Say hello.", "What is 2 + 2?", "Save a record, then say done.", "Save three records.")):
        yield Case(id=f"streaming/free-{i}", category="streaming", checks=f"whole and streamed agree, choice auto: {text}",
                   body=ask(text, [tool("save", obj({"n": DIGIT}), "Save a record."), *DECOYS], "auto"), expect=Expect(both=True))


def _kits() -> dict[str, list[dict[str, Any]]]:
    weather = tool("get_weather", obj({"city": SHORT}), "The weather of a city.")
    light = tool("set_light", obj({"on": FLAG, "level": DIGIT}), "Switch a light.")
    paint = tool("paint", obj({"colors": items(WORD, 1, 2)}), "Paint a wall.")
    others = [tool(f"action_{i}", obj({"n": DIGIT}), f"Action {i}.") for i in range(5)]
    return {"one": [weather], "three": [weather, light, paint], "eight": [weather, light, paint, *others]}


def _choice() -> Iterator[Case]:
    for size, tools in _kits().items():
        last = tools[-1]["function"]["name"]
        for label, choice in (("auto", "auto"), ("default", None), ("required", "required"), ("named", named(last)), ("none", "none")):
            for prompt, text in (("task", "What is the weather in Paris?"), ("chat", "Say hello.")):
                for stream in (False, True):
                    how = "streamed" if stream else "whole"
                    yield Case(id=f"choice/{label}/{size}-{prompt}-{how}", category="choice",
                               checks=f"tool_choice {label}, {len(tools)} tools, {how}: {text}", body=ask(text, tools, choice, stream))


def _parallel() -> Iterator[Case]:
    for size, tools in _kits().items():
        for choice in ("auto", "required"):
            for parallel in (False, True):
                for stream in (False, True):
                    how = "streamed" if stream else "whole"
                    yield Case(id=f"parallel/{choice}-{size}-{str(parallel).lower()}-{how}", category="parallel",
                               checks=f"parallel_tool_calls {str(parallel).lower()}, choice {choice}, {len(tools)} tools, {how}",
                               body=ask("Weather in Paris, Rome and Oslo?", tools, choice, stream, parallel_tool_calls=parallel))


def _prefixes() -> Iterator[Case]:
    families = {"get": ["get", "get_weather", "get_weather_now"], "a": ["a", "aa", "aaa"], "dash": ["run", "run-test", "run-tests"],
                "case": ["Save", "save", "SAVE"]}
    for family, names in families.items():
        tools = [tool(name, obj({f"for_{i}": DIGIT}), f"Tool {name}.") for i, name in enumerate(names)]
        for order, listed in (("rising", tools), ("falling", tools[::-1])):
            for i, choice in enumerate(("required", *map(named, names))):
                label = names[i - 1] if i else "required"
                yield Case(id=f"prefixes/{family}-{order}/{label}", category="prefixes",
                           checks=f"tools {', '.join(names)}, declared {order}: choice {label} fits the schema of the tool that it names",
                           body=ask("Use a tool.", listed, choice, stream=bool(i % 2)))


def _cut_offs() -> Iterator[Case]:
    """Schemas that no part of a whole answer satisfies, and few tokens."""
    table = {
        "long-text": obj({"text": {"type": "string", "minLength": 400, "maxLength": 500}}),
        "long-list": obj({"numbers": items(DIGIT, 200, 300)}),
        "last-member": obj({**{f"flag_{i}": FLAG for i in range(30)}, "last": DIGIT}),
        "deep": obj({"a": obj({"b": obj({"rows": items(obj({"x": DIGIT, "y": DIGIT}), 40, 50)})})}),
    }
    for name, parameters in table.items():
        for tokens in (1, 5, 20):
            for stream in (False, True):
                how = "streamed" if stream else "whole"
                yield Case(id=f"cut-offs/{name}-{tokens}-{how}", category="cut-offs",
                           checks=f"{name} cut after {tokens} tokens, {how}: no call, finish_reason length",
                           body=ask("Save a long record.", [tool("save", parameters, "Save a record.")], "required", stream, max_tokens=tokens))
