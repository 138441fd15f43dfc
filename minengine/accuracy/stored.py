"""Stored accuracies, `book/results/accuracy-*.json`: what `minengine accuracy` measured, with every question's outcome.

    {machine, versions, commit, command, date, seed,
     tasks: [{name, kind, model, what, unit, setting, baseline,
              scores: [{kv_cache_dtype, row_bytes, outcomes, mean: [value, low, high], difference: [value, low, high] or null}]}]}

`outcomes` has an entry a context: a text of 1 and 0, an answer each, or a number. `difference` is to the baseline's format, and null for it.
Needs a checkout, as `minengine.results` does.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ..results import ACCURACY, RESULTS, ResultError
from .bootstrap import Estimate, Outcomes, difference, interval

__all__ = ["Score", "Task", "score_entry", "stored"]

RUN = ("machine", "versions", "commit", "command", "date", "seed")
TASK = ("name", "kind", "model", "what", "unit", "setting", "baseline")


@dataclass(frozen=True)
class Score:
    """One format in one task."""

    kv_cache_dtype: str
    row_bytes: int  # of one layer, and of one head of it
    outcomes: Outcomes
    mean: Estimate
    difference: Estimate | None  # to the baseline's format, paired; None: it is the baseline

    def changed(self, baseline: Score) -> tuple[int, int]:
        """Answers lost and won: right in the baseline and wrong here, and the other way round."""
        gained = self.outcomes.values - baseline.outcomes.values
        return int((gained < 0).sum()), int((gained > 0).sum())


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measure at one setting, in all formats, the baseline first."""

    name: str  # unique in its file, such as "recall-4096-256"
    kind: str  # recall, needle, perplexity, agreement
    model: str
    what: str
    unit: str
    setting: Mapping[str, Any]
    baseline: str  # a kv_cache_dtype
    scores: Mapping[str, Score]  # by kv_cache_dtype
    machine: str
    versions: Mapping[str, str]
    commit: str
    command: str
    seed: int
    date: date
    file: str


def stored(folder: str | Path = RESULTS) -> dict[str, Task]:
    """All stored tasks by name; where two files hold one, the newer file's.

    Raises:
        ResultError: a file is no JSON or lacks a field, or a task lacks its baseline; the message names the file, the field and the remedy.
    """
    found: dict[str, Task] = {}
    for path in sorted(Path(folder).glob(f"{ACCURACY}*.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            for entry in run["tasks"]:
                scores = {score.kv_cache_dtype: score for score in map(_score, entry["scores"])}
                scores[entry["baseline"]]  # what the differences are to
                task = Task(**{name: entry[name] for name in TASK}, scores=scores, file=path.name,
                            **{name: date.fromisoformat(run[name]) if name == "date" else run[name] for name in RUN})
                if task.name not in found or found[task.name].date <= task.date:
                    found[task.name] = task
        except KeyError as error:
            raise ResultError(f"{path.name}: field or baseline {error} is missing; write the file with `minengine accuracy`") from error
        except (ValueError, TypeError) as error:
            raise ResultError(f"{path.name}: {error}; write the file with `minengine accuracy`") from error
    return found


def score_entry(kv_cache_dtype: str, row_bytes: int, outcomes: list[str | float], baseline: list[str | float] | None) -> dict[str, Any]:
    """One format's entry in the file; `baseline` holds the outcomes that it is compared with, None where it is the baseline."""
    read = _outcomes(outcomes)
    return {"kv_cache_dtype": kv_cache_dtype, "row_bytes": row_bytes, "outcomes": outcomes, "mean": _ends(interval(read)),
            "difference": None if baseline is None else _ends(difference(read, _outcomes(baseline)))}


def _ends(estimate: Estimate) -> list[float]:
    return [round(value, 6) for value in (estimate.value, estimate.low, estimate.high)]


def _score(entry: Mapping[str, Any]) -> Score:
    outcomes = _outcomes(entry["outcomes"])
    mean, apart = ([None if ends is None else Estimate(*ends, outcomes.n, outcomes.contexts)] for ends in (entry["mean"], entry["difference"]))
    return Score(entry["kv_cache_dtype"], entry["row_bytes"], outcomes, mean[0], apart[0])


def _outcomes(entries: list[str | float]) -> Outcomes:
    """An entry a context: '1101' is four answers, a number one outcome."""
    return Outcomes(tuple(tuple(map(float, entry)) if isinstance(entry, str) else (float(entry),) for entry in entries))
