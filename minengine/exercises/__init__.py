"""Exercises that check themselves: `check("ch02.ex1", answer)` says "Right", or where it is wrong and where to look.

One file a chapter holds its exercises; a chapter's file is loaded when one of its exercises is checked.
"""
from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from .kinds import Function, Number, WrongAnswer

__all__ = ["Function", "Number", "UnknownExercise", "WrongAnswer", "check", "known"]


class UnknownExercise(LookupError):
    """No exercise has this id; the message lists those that exist."""


def check(exercise: str, answer: Any) -> None:
    """Print "Right", or raise.

    Args:
        exercise: chapter and number, e.g. "ch02.ex1".
        answer: a number, or a function, which is called with random arguments; the exercise says which.

    Raises:
        WrongAnswer: with the first case that is wrong and a hint, never with the solution.
        UnknownExercise: no exercise has that id.
    """
    chapter, _, number = str(exercise).partition(".")
    found = _of_chapter(chapter).get(number) if chapter in _chapters() else None
    if found is None:
        raise UnknownExercise(f"there is no exercise {exercise!r}; there are {', '.join(known())}")
    print(found.check(answer, seed=exercise))


def known() -> list[str]:
    """All ids, in the order of the book."""
    return [f"{chapter}.{number}" for chapter in _chapters() for number in _of_chapter(chapter)]


def _chapters() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__) if re.fullmatch(r"ch\d\d", module.name))


def _of_chapter(chapter: str) -> dict[str, Number | Function]:
    return import_module(f".{chapter}", __name__).EXERCISES
