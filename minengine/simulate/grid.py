"""Stored points of deployments, `book/results/sizing.json`: simulated ahead by `python -m bench.sizing`, so that a page has them at once.

    {machine, versions, commit, command, date,
     given: what all points share: arguments of `sizing.point`,
     points: [{settings: the other arguments, value: what `point` gave}]}

The same arguments give the same point, on any machine; a test computes one again. Needs a checkout, as `minengine.results` does.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import RESULTS, RUN, SIZING, ResultError, check_fields
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
    path = Path(path)
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path.name}: cannot be opened ({error.strerror}); python -m bench.sizing writes it, in a checkout") from error
    except ValueError as error:
        raise ResultError(f"{path.name}: is no JSON ({error}); write it with python -m bench.sizing") from error
    check_fields(path.name, run, FIELDS)
    for i, one in enumerate(run["points"]):
        check_fields(f"{path.name}, point {i}", one, POINT)
    return Grid(run["given"], run["points"], run["command"], run["date"], run["commit"])
