"""Exercises that check themselves: say "right", or say where the first difference is without giving the answer away."""
from __future__ import annotations

from typing import Any, Callable, Iterable

__all__ = ["WrongAnswer", "check_function", "check_value"]


class WrongAnswer(AssertionError):
    """An exercise's answer that does not hold; the message says in which case and what to look at."""


def check_value(answer: float, expected: float, *, hint: str, rel: float = 0.01) -> None:
    """Accept a number within `rel` of the expected one.

    Raises:
        WrongAnswer: with the direction in which the answer is off, and the hint.
    """
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise WrongAnswer(f"the answer is {answer!r}, not a number. {hint}")
    if abs(answer - expected) > rel * abs(expected):
        raise WrongAnswer(f"{answer:.4g} is too {'large' if answer > expected else 'small'}. {hint}")
    print(f"Right: {answer:.4g}.")


def check_function(mine: Callable[..., Any], reference: Callable[..., Any], cases: Iterable[tuple[Any, ...]], *, hint: str) -> None:
    """Call both functions with the same arguments, case by case.

    Raises:
        WrongAnswer: with the first case on which they differ and your function's result, and the hint.
    """
    count = 0
    for case in cases:
        got, wanted = mine(*case), reference(*case)
        if got != wanted:
            shown = ", ".join(map(repr, case))
            raise WrongAnswer(f"{mine.__name__}({shown[:300]}) gives {got!r}, and that is not it. {hint}")
        count += 1
    if not count:
        raise ValueError("cases: is empty; give at least one")
    print(f"Right, in all {count} cases.")
