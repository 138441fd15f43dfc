"""Exercises of "A tool call is a text until someone guarantees it". The references are masks of a few texts, the engine's own parser, and Wilson's interval."""
from __future__ import annotations

from random import Random

from ..serve.tools import ToolCallParser
from ..workload.stats import wilson
from .kinds import Function

__all__ = ["EXERCISES"]

OPENING = "<tool_call>"
CHOICES = ("celsius", "fahrenheit", "cel", "kelvin", "kel", "k")


def allowed_next(vocabulary: list[str], choices: list[str], written: str) -> list[int]:
    """Places of the tokens with which some choice goes on behind what is written."""
    behind = [choice[len(written):] for choice in choices if choice[: len(written)] == written]
    return [place for place, token in enumerate(vocabulary) if any(rest[: len(token)] == token for rest in behind)]


def draw_choice(random: Random) -> tuple[list[str], list[str], str]:
    """A vocabulary of pieces of choices and of what is none, and a beginning of a choice."""
    choices = random.sample(CHOICES, random.randint(1, 4))
    pieces = {text[a:b] for text in CHOICES for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    vocabulary = random.sample(sorted(pieces | {"x", "celsiusx", "C", "kelvin,"}), random.randint(8, 40))
    one = random.choice(choices)
    return vocabulary, choices, one[: random.randint(0, len(one))]


def shown(text: str) -> int:
    """Characters of a stream's beginning that the parser passes on."""
    return len(ToolCallParser("glm", reasoning=False).feed(text).content)


def draw_beginning(random: Random) -> tuple[str]:
    """Text with pieces of the tag in it and at its end, never the whole tag."""
    pieces = ["a < b", "<", "<<", "<tool", "<tool_call", "tool_call>", " ", "</tool_call>", "if x <t: pass", "<tool_<tool_"]
    text = "So " + "".join(random.choices(pieces, k=random.randint(0, 4)))
    return (text.replace(OPENING, OPENING[:-1]) + OPENING[: random.randint(0, len(OPENING) - 1)],)


def cases(bound: float) -> int:
    """The fewest cases without a fault whose interval ends at `bound` or below."""
    low, high = 0, 1  # too few, enough
    while wilson(0, high)[1] > bound:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wilson(0, middle)[1] > bound else (low, middle)
    return high


def draw_bound(random: Random) -> tuple[float]:
    return (round(10 ** random.uniform(-4, -0.5), 5),)


EXERCISES = {
    "ex1": Function(
        reference=allowed_next, draw=draw_choice,
        corners=((["c", "ce", "celsius", "f", "sius"], ["celsius", "fahrenheit"], ""), (["s", "sius", "x"], ["celsius"], "cel"), (["k", "e"], ["k", "ke"], "k")),
        hint="Put each token behind what is written: does one of the choices begin like that?"),
    "ex2": Function(
        reference=shown, draw=draw_beginning, corners=(("a < b",), ("a <",), ("a <<tool",), ("a <tool_call",), ("",), ("a <tool b <tool",)),
        hint="A character is held only if the text from there to its end is how the tag begins."),
    "ex3": Function(
        reference=cases, draw=draw_bound, corners=((0.01,), (0.5,), (0.001,)), tries=100,
        hint="Ask wilson(0, n) for some n first, and look when its upper end reaches the bound. The bound itself is good enough."),
}
