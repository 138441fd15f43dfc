"""What a grammar may cost. Compiling and following one is work for the engine's process, and the sources come from clients.

The limits are those of one source; servers may set lower ones. Where a cost can be read off the source or its rules, it is: here. Two costs
cannot, and are measured in CPU time: compiling, which is tried with a part of the vocabulary first (GrammarBackend), and following, which
the request pays from a credit (Matcher).
"""
from __future__ import annotations

import json
import re
import time
from math import inf
from typing import Any, Callable

from .request import RequestError

__all__ = ["Credit", "MAX_ANSWER_CHARS", "MAX_COMPILE_S", "MAX_DEPTH", "MAX_RULES", "MAX_SKIPS", "MAX_SOURCE_CHARS", "TRIAL_BYTES",
           "TRIAL_EVERY", "TRIAL_LONG", "TRIAL_NOISE", "TRIAL_NOISE_S", "check_rules", "check_source", "least_chars"]

MAX_SOURCE_CHARS = {"json": 65536, "regex": 4096, "choice": 65536, "grammar": 65536, "structural_tag": 1 << 20}  # a tag may hold 128 tools
MAX_DEPTH = 64  # of nested JSON: the work grows with its cube
MAX_SKIPS = 512  # parts in a row that may be left out, as optional properties may: the work grows with the cube of their number
MAX_RULES = 16384  # after all references and alternatives are written out: a schema can double them with each level
# The shortest answer (and the longest text that can be forced) may have this many characters; an exponential nest of repeats or
# references has more than memory holds.
MAX_ANSWER_CHARS = 8192

# As the trials estimate it, which may be half or one and a half times what it is. Measured on one core with 49,152 tokens, what is accepted
# takes up to 8 s, trials included (128 different tools of ten properties: 6 s in one form, 4 s in the other), and most of what is refused 2 s.
# The trials cannot be interrupted either: a grammar of hundreds of ambiguous rules is refused only after up to a minute.
MAX_COMPILE_S = 5
TRIAL_BYTES = (1, 4, 16)  # trials with so much of tokens longer than 16; measured, all tokens take TRIAL_LONG times as long as one of these,
TRIAL_LONG = 10_000  # whether the grammar is ambiguous or not
TRIAL_EVERY = 64  # and a trial with every 64th token
TRIAL_NOISE, TRIAL_NOISE_S = 0.1, 0.05  # a trial that takes so little longer than the rules alone, as a share and in seconds, says nothing

CREDIT_S = 0.2  # what a request has to spend on following its grammar,
CREDIT_S_A_TOKEN = 0.005  # what each token adds to it, up to that again,
REFUSAL_S = 0.002  # and what a token costs that the mask lets through and the grammar refuses, for another has to be chosen

Rules = dict[str, list[tuple[int, list[tuple[str, int]]]]]  # what `_alternatives` finds in each rule, by its name

RULE = re.compile(r"^(\S+?)(?:\[[^\]]*\])? ::= ", re.MULTILINE)
ELEMENT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]\*?|(?:TagDispatch|TokenTagDispatch|Token|ExcludeToken)\(|\(=|\{\d+, -?\d+\}|[()|]|[\w.\-]+', re.DOTALL)


class Credit:
    """CPU time that one request may spend on following its grammar: an ambiguous one, `s ::= s s | [a-z]`, has more ways to read a text with
    every character, and takes longer for each. `with credit:` spends the time of its block.

    A block cannot be interrupted: it ends late by one call, for one mask or a few bytes of text. With 49,152 tokens the worst of a dozen
    hostile grammars kept a single step for 0.72 s, half a second longer than the credit, and most for 0.2 s, all of it spent at once; a more
    ambiguous one may take longer. After that its request has ended.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._left_s, self._since = cpu_clock, CREDIT_S, None

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        self._left_s -= self._clock() - self._since
        self._since = None

    def book(self, accepted: bool) -> None:
        """A token was accepted, or refused."""
        if not self.overdrawn:  # for good
            self._left_s = min(CREDIT_S, self._left_s + CREDIT_S_A_TOKEN) if accepted else self._left_s - REFUSAL_S

    @property
    def overdrawn(self) -> bool:
        return self._left_s < (0 if self._since is None else self._clock() - self._since)


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
    rules = _rules(grammar)
    skips = _skips(rules)
    if skips > MAX_SKIPS:
        raise RequestError(f"structured_outputs.{kind}: has {skips} parts in a row that may be left out, as optional properties may, and {MAX_SKIPS} "
                           "are taken; make some required, or ask for less")
    shortest, longest = least_chars(rules)
    if shortest == inf:
        raise RequestError(f"structured_outputs.{kind}: no text satisfies it, for instance because a reference leads back to itself; correct it")
    if longest > MAX_ANSWER_CHARS:
        raise RequestError(f"structured_outputs.{kind}: a part of it has at least {longest} characters and {MAX_ANSWER_CHARS} are taken; ask for less")


def _rules(grammar: str) -> Rules:
    """The alternatives of each rule."""
    bodies = RULE.split(grammar)[1:]
    return {name: _alternatives(body) for name, body in zip(bodies[::2], bodies[1::2])}


def _skips(rules: Rules) -> int:
    """The most rules in a row of which each may be the next one alone."""
    next_ones = {name: [inner[0][0] for own, inner in alternatives if not own and len(inner) == 1] for name, alternatives in rules.items()}
    skips: dict[str, int] = {}
    for start in rules:
        path = [start]
        while path:
            name = path[-1]
            if name not in skips:
                skips[name] = 0  # whoever comes back to it meanwhile goes in a circle
                path += [used for used in next_ones.get(name, ()) if used not in skips]
            else:
                skips[path.pop()] = 1 + max((skips[used] for used in next_ones.get(name, ())), default=-1)
    return max(skips.values(), default=0)


def least_chars(rules: Rules) -> tuple[float, float]:
    """Length of the shortest text of the rule `root`, and the longest of the shortest texts of all alternatives: no text that is forced is
    longer, but for the ends of the rules around it."""
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
