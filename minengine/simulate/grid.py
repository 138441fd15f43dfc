"""Stored points of deployments, `book/results/sizing.json`: simulated ahead by `python -m bench.sizing`, so that a page has them at once.

    {machine, versions, commit, command, date,
     given: what all points share: arguments of `sizing.point`,
     points: [{settings: the other arguments, value: what `point` gave}]}

The same arguments give the same point, on any machine; a test computes one again. Needs a checkout, as `minengine.results` does.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import RESULTS, RUN, SIZING, read_run
from .sizing import DEFAULTS, GIVEN

__all__ = ["Grid", "stored"]

MAPPING = (lambda v: isinstance(v, dict), "a mapping")
FIELDS = {
    **{name: check for name, check in RUN.items() if name != "measurements"},
    "given": (lambda v: isinstance(v, dict) and set(v) == set(GIVEN), f"a mapping with {', '.join(GIVEN)}"),
    "points": (lambda v: isinstance(v, list), "a list"),
}
POINT = {
    "settings": (lambda v: isinstance(v, dict) and set(v) == set(DEFAULTS), f"a mapping with {', '.join(DEFAULTS)}"),
    "value": MAPPING,
}


@dataclass(frozen=True)
class Grid:
    given: Mapping[str, Any]
    points: Sequence[Mapping[str, Any]]
    command: str
    date: str
    commit: str


def stored(path: str | Path = RESULTS / SIZING) -> Grid:
    """The stored grid.

    Raises:
        ResultError: there is none, or a field is missing, unknown or wrong.
    """
    run = read_run(path, FIELDS, "python -m bench.sizing", points=POINT)
    return Grid(run["given"], run["points"], run["command"], run["date"], run["commit"])
