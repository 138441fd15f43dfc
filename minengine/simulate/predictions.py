"""The kept table of predictions, `book/results/predictions.json`: a chapter has it at once, where the runs of the cluster take minutes.

    {machine, versions, commit, command, date,
     preset: presets/prime-inference.yml, rack: the machine with its constants,
     predictions: [what `Prediction.record` gives]}

The same code gives the same table, on any machine; a test makes a part of it again. Needs a checkout, as `minengine.results` does.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..results import PREDICTIONS, RESULTS, RUN, read_run
from .prediction import Prediction, shown

__all__ = ["Kept", "keep", "shown", "stored"]

MAPPING = (lambda v: isinstance(v, dict), "a mapping")
FIELDS = {
    **{name: check for name, check in RUN.items() if name != "measurements"},
    "preset": MAPPING,
    "rack": MAPPING,
    "predictions": (lambda v: isinstance(v, list) and bool(v), "a list of at least one prediction"),
}
PREDICTION = {
    **{field.name: (lambda v: True, "its value") for field in fields(Prediction)},
    "id": RUN["machine"],
    "error": (lambda v: v is None or isinstance(v, float), "a number or null"),
    "holds": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
}


@dataclass(frozen=True)
class Kept:
    predictions: tuple[Prediction, ...]
    preset: Mapping[str, Any]
    rack: Mapping[str, Any]
    command: str
    date: str
    commit: str

    def __getitem__(self, name: str) -> Prediction:
        """By its id."""
        return next(one for one in self.predictions if one.id == name)


def keep(path: str | Path, predictions: Sequence[Prediction], *, command: str, preset: Mapping[str, Any], rack: Mapping[str, Any]) -> None:
    """Write the table with what is to be said of the run that made it.

    Raises:
        OSError: the file cannot be written.
    """
    from ..results import run_facts

    run = {**run_facts(command), "preset": preset, "rack": rack, "predictions": [one.record() for one in predictions]}
    Path(path).write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stored(path: str | Path = RESULTS / PREDICTIONS) -> Kept:
    """The kept table.

    Raises:
        ResultError: there is none, or a field is missing, unknown or wrong.
    """
    run = read_run(path, FIELDS, "minengine simulate --preset prime-inference --out FILE", predictions=PREDICTION)
    found = [Prediction(**{field.name: one[field.name] for field in fields(Prediction)}) for one in run["predictions"]]
    return Kept(tuple(found), run["preset"], run["rack"], run["command"], run["date"], run["commit"])
