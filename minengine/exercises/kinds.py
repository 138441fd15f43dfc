"""The two kinds of answer: a number, or a function that is tried on random arguments."""
from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, Callable

__all__ = ["Function", "Number", "WrongAnswer"]

SHOWN = 300  # characters of a case that a message quotes


class WrongAnswer(AssertionError):
    """An exercise's answer that does not hold; the message says in which case and what to look at."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """An answer within `rel` of `value()`.

    Many numbers may solve an exercise that asks for a cause ("which cap gives this share?"). Then `effect` is worked out
    from the answer, and that is what must be near `value()`.
    """

    value: Callable[[], float]
    hint: str
    rel: float = 0.01
    effect: Callable[[float], float] = float

    def check(self, answer: Any, seed: str) -> str:
        if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not math.isfinite(answer):
            raise WrongAnswer(f"the answer is {_shown(answer)}, and a finite number is asked for. {self.hint}")
        got, wanted = self.effect(answer), self.value()
        if abs(got - wanted) > self.rel * abs(wanted):
            what = f"{answer:.4g}" if self.effect is float else f"with {answer:.4g} it"
            raise WrongAnswer(f"{what} is too {'large' if got > wanted else 'small'}. {self.hint}")
        return f"Right: {answer:.4g}."


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function equal to `reference`, on the `corners` first and then on `tries` draws of arguments.

    Numbers with a fraction may differ by rounding. The draws depend on the exercise alone, so a message can be repeated.
    """

    reference: Callable[..., Any]
    draw: Callable[[Random], tuple[Any, ...]]
    hint: str
    corners: tuple[tuple[Any, ...], ...] = ()
    tries: int = 200

    def check(self, answer: Any, seed: str) -> str:
        if not callable(answer):
            raise WrongAnswer(f"the answer is {_shown(answer)}, and a function is asked for: hand it over without calling it. {self.hint}")
        name, random = getattr(answer, "__name__", "the function"), Random(seed)
        cases = [*self.corners, *(self.draw(random) for _ in range(self.tries))]
        for case in cases:
            call = f"{name}({_shown(*case)})"
            wanted = self.reference(*case)
            try:
                got = answer(*case)
            except Exception as error:
                raise WrongAnswer(f"{call} ends with {type(error).__name__}: {error}. {self.hint}") from error
            if not same(got, wanted):
                raise WrongAnswer(f"{call} gives {_shown(got)}, and that is not it. {self.hint}")
        return f"Right, in all {len(cases)} cases."


def same(got: Any, wanted: Any) -> bool:
    """Equal; pairs and lists item by item, numbers with a fraction but for rounding."""
    if isinstance(wanted, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return False
    return math.isclose(got, wanted, rel_tol=1e-9) if isinstance(wanted, float) else got == wanted


def _shown(*values: Any) -> str:
    text = ", ".join(map(repr, values))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
