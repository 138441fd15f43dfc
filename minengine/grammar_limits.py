"""What a grammar may cost. Compiling and following one is work for the engine's process, and the sources come from clients.

The limits are those of one source. They keep compiling to seconds and a step to milliseconds; servers may set lower ones.
"""
from __future__ import annotations

import json
import re
from math import inf
from typing import Any

from .request import RequestError

__all__ = ["MAX_ANSWER_CHARS", "MAX_DEPTH", "MAX_RULES", "MAX_SOURCE_CHARS", "check_rules", "check_source", "least_chars"]

MAX_SOURCE_CHARS = {"json": 65536, "regex": 4096, "choice": 65536, "grammar": 65536, "structural_tag": 262144}
MAX_DEPTH = 64  # of nested JSON: the work grows with its cube
MAX_RULES = 2048  # after all references and alternatives are written out: a schema can double them with each level
# The shortest answer (and the longest text that can be forced) may have this many characters; an exponential nest of repeats or
# references has more than memory holds.
MAX_ANSWER_CHARS = 8192

RULE = re.compile(r"^(\S+?)(?:\[[^\]]*\])? ::= ", re.MULTILINE)
ELEMENT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]\*?|(?:TagDispatch|TokenTagDispatch|Token|ExcludeToken)\(|\(=|\{\d+, -?\d+\}|[()|]|[\w.\-]+', re.DOTALL)


def check_source(kind: str, source: str) -> None:
    """
    Raises:
        RequestError: too long, nested too deeply, or no text or no JSON where it has to be.
    """
    def refuse(what: str) -> None:
        raise RequestError(f"structured_outputs.{kind}: {what}")

    if len(source) > MAX_SOURCE_CHARS[kind]:
        refuse(f"has {len(source)} characters and {MAX_SOURCE_CHARS[kind]} are taken; ask for less")
    try:
        source.encode()
    except UnicodeEncodeError:
        refuse("holds half of a surrogate pair, which no text contains; remove it")
    if kind in ("json", "structural_tag"):
        try:
            value = json.loads(source)
        except (ValueError, RecursionError) as error:
            refuse(f"is no JSON ({error}); correct it")
        if not isinstance(value, dict) and not (kind == "json" and isinstance(value, bool)):
            refuse(f"holds {type(value).__name__}; use an object")
        if _depth(value) > MAX_DEPTH:
            refuse(f"is nested {_depth(value)} levels deep and {MAX_DEPTH} are taken; name parts in $defs, or ask for less")


def _depth(value: Any) -> int:
    """Levels of nested lists and dicts; of a bare value 0."""
    depth, level = 0, [value]
    while level := [inner for outer in level if isinstance(outer, (dict, list)) for inner in (outer.values() if isinstance(outer, dict) else outer)]:
        depth += 1
    return depth + 1 if isinstance(value, (dict, list)) else 0


def check_rules(kind: str, grammar: str) -> None:
    """Judge a grammar as xgrammar prints it, normalised: before it is compiled, which may take long, and followed, which may too.

    Raises:
        RequestError: it has too many rules, no answer satisfies it, or some answer is too long.
    """
    num_rules = len(RULE.findall(grammar))
    if num_rules > MAX_RULES:
        raise RequestError(f"structured_outputs.{kind}: comes to {num_rules} rules and {MAX_RULES} are taken; ask for less")
    shortest, longest = least_chars(grammar)
    if shortest == inf:
        raise RequestError(f"structured_outputs.{kind}: no text satisfies it, for instance because a reference leads back to itself; correct it")
    if longest > MAX_ANSWER_CHARS:
        raise RequestError(f"structured_outputs.{kind}: a part of it has at least {longest} characters and {MAX_ANSWER_CHARS} are taken; ask for less")


def least_chars(grammar: str) -> tuple[float, float]:
    """Length of the shortest text of the rule `root`, and the longest of the shortest texts of all alternatives: no text that is forced is
    longer, but for the ends of the rules around it."""
    bodies = RULE.split(grammar)[1:]
    rules = {name: _alternatives(body) for name, body in zip(bodies[::2], bodies[1::2])}
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, alternatives in rules.items():
        for _, inner in alternatives:
            for used, _ in inner:
                users.setdefault(used, set()).add(name)
    least: dict[str, float] = dict.fromkeys(rules, inf)

    def length(alternative: tuple[int, list[tuple[str, int]]]) -> float:
        own, inner = alternative
        return own + sum(times * least.get(used, 0) for used, times in inner if times)

    todo = list(reversed(rules))  # a rule is printed after those it uses, more often than not
    while todo:
        name = todo.pop()
        shortest = min(map(length, rules[name]), default=0)
        if shortest < least[name]:
            least[name] = shortest
            todo += users[name]
    lengths = [n for alternatives in rules.values() for n in map(length, alternatives) if n < inf]
    return least.get("root", inf), max(lengths, default=0)


def _alternatives(body: str) -> list[tuple[int, list[tuple[str, int]]]]:
    """A rule's alternatives: characters of its own, and (rule, times) that it uses. `(("a" x{2, 9}) | (y))` -> [(1, [(x, 2)]), (0, [(y, 1)])]."""
    found, own, inner = [], 0, []
    elements = ELEMENT.finditer(body)
    for element in elements:
        text = element.group()
        if text[0] == '"':
            own += len(re.sub(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)", "c", text)) - 2
        elif text[0] == "[":
            own += not text.endswith("*")
        elif text[0] == "{":
            used, _ = inner[-1]
            inner[-1] = used, int(text[1:text.index(",")])
        elif text == "|":
            found.append((own, inner))
            own, inner = 0, []
        elif text.endswith("Dispatch("):
            return [(0, [])]  # free text, which may be empty
        elif text == "(=":
            break  # a look at what follows, at the end of a rule
        elif text in ("Token(", "ExcludeToken("):
            own += 1
            while next(elements).group() != ")":
                pass
        elif text not in "()":
            inner.append((text, 1))
    return [*found, (own, inner)]
