"""Stored measurements, `book/results/*.json`: what a machine that does not build the book has measured.

One file is one run of one command on one machine. A chapter or the ledger shows such a value with its date and machine, and no
file is written by hand. `book/results/README.md` shows one. It needs a checkout, as the claims registry does.
"""
from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any, Callable, Mapping

__all__ = ["ACCURACY", "Check", "Measurement", "PREDICTIONS", "RESULTS", "RUN", "ResultError", "SIZING", "TOOLCHECK", "check_fields", "file_name",
           "read_results", "read_run", "run_facts"]

ACCURACY, TOOLCHECK, SIZING, PREDICTIONS = "accuracy-", "toolcheck-", "sizing.json", "predictions.json"  # files with readers of their own begin so
RESULTS = Path(__file__).resolve().parents[1] / "book" / "results"


class ResultError(ValueError):
    """A stored result that cannot be used; the message names the file, the measurement, the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    name: str  # unique over all files
    what: str
    unit: str
    n: int  # samples behind the median
    median: float
    spread: tuple[float, float]  # the middle half: 25th and 75th percentile
    claim: str | None  # the claim of book/claims.yml whose own value this is, if any
    machine: str  # the CPU's or GPU's name
    versions: Mapping[str, str]  # of what decides the speed, python and torch among it
    commit: str  # of this repository
    command: str  # what to run to measure again
    date: date
    file: str


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _day(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(date.fromisoformat(value))
    except ValueError:
        return False


Check = tuple[Callable[[Any], bool], str]
TEXT: Check = (_text, "a text that is not empty")
RUN: dict[str, Check] = {
    "machine": TEXT,
    "versions": (lambda v: isinstance(v, dict) and "python" in v and all(map(_text, v.values())), "versions by package, 'python' among them"),
    "commit": (lambda v: isinstance(v, str) and bool(re.fullmatch(r"[0-9a-f]{40}", v)), "a commit in 40 hexadecimal digits"),
    "command": TEXT,
    "date": (_day, "a day like 2026-01-31"),
    "measurements": (lambda v: isinstance(v, list) and bool(v) and all(isinstance(one, dict) for one in v), "a list of at least one measurement"),
}
MEASUREMENT: dict[str, Check] = {
    "name": TEXT,
    "what": TEXT,
    "unit": TEXT,
    "n": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "a whole number of samples, at least 1"),
    "median": (_number, "a finite number"),
    "spread": (lambda v: isinstance(v, list) and len(v) == 2 and all(map(_number, v)) and v[0] <= v[1], "a pair [25th percentile, 75th]"),
    "claim": (lambda v: v is None or _text(v), "a claim's id or null"),
}


def run_facts(command: str) -> dict[str, Any]:
    """What a stored file says of the run that made it, by `command`, now, here, with this code."""
    import torch

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-core {platform.machine()} CPU"
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULTS.parents[1], capture_output=True, text=True)
    return {"machine": machine, "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": asked.stdout.strip() if asked.returncode == 0 else "", "command": command, "date": date.today().isoformat()}


def file_name(kind: str, *parts: str) -> str:
    """`kind` and what tells its files apart, as in "accuracy-2-core-x86-64-cpu.json"."""
    return f"{kind}{re.sub('[^a-z0-9]+', '-', '-'.join(parts).lower()).strip('-')}.json"


def read_results(folder: str | Path = RESULTS) -> dict[str, Measurement]:
    """All stored measurements by name; none if the folder has no file. Accuracies, runs of the tool-call suite, points of simulated
    deployments and predictions are files of their own, read by `minengine.accuracy.stored`, `minengine.toolcheck.stored`, `minengine.simulate.grid` and
    `minengine.simulate.predictions`.

    Raises:
        ResultError: a file is no JSON, a field is missing, unknown or wrong, or a name is there twice.
    """
    found: dict[str, Measurement] = {}
    for path in sorted(Path(folder).glob("*.json")):
        if path.name.startswith((ACCURACY, TOOLCHECK, SIZING, PREDICTIONS)):
            continue
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ResultError(f"{path.name}: is no JSON ({error}); write it with the command that measures") from error
        check_fields(path.name, run, RUN)
        for one in run["measurements"]:
            where = f"{path.name}, measurement '{one.get('name', '?')}'"
            check_fields(where, one, MEASUREMENT)
            if not one["spread"][0] <= one["median"] <= one["spread"][1]:
                raise ResultError(f"{where}, field 'spread': {one['spread']} leaves out the median {one['median']}; give the middle half")
            if one["name"] in found:
                raise ResultError(f"{where}, field 'name': is in {found[one['name']].file} too; keep the newer file")
            shared = {field: run[field] for field in ("machine", "versions", "commit", "command")}
            given = {**one, **shared, "spread": tuple(one["spread"]), "date": date.fromisoformat(run["date"])}
            found[one["name"]] = Measurement(**given, file=path.name)
    return found


def read_run(path: str | Path, checks: Mapping[str, Check], command: str, **entries: Mapping[str, Check]) -> dict[str, Any]:
    """A stored file that has a reader of its own, its fields checked.

    Args:
        command: that writes it.
        entries: fields that are lists, and what each entry of theirs has.

    Raises:
        ResultError: there is none, or a field is missing, unknown or wrong.
    """
    path = Path(path)
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path.name}: cannot be opened ({error.strerror}); {command} writes it, in a checkout") from error
    except ValueError as error:
        raise ResultError(f"{path.name}: is no JSON ({error}); write it with {command}") from error
    check_fields(path.name, run, checks)
    for field, wanted in entries.items():
        for i, one in enumerate(run[field]):
            check_fields(f"{path.name}, {field}[{i}]", one, wanted)
    return run


def check_fields(where: str, given: Any, checks: Mapping[str, Check]) -> None:
    """Raise ResultError unless `given` is an object with just these fields, each as its check wants it; `where` begins the message."""
    if not isinstance(given, dict):
        raise ResultError(f"{where}: is no object; it has the fields {', '.join(checks)}")
    for field, (is_right, wanted) in checks.items():
        if field not in given:
            raise ResultError(f"{where}, field '{field}': is missing; give {wanted}")
        if not is_right(given[field]):
            raise ResultError(f"{where}, field '{field}': is {given[field]!r}; give {wanted}")
    for field in given.keys() - checks.keys():
        raise ResultError(f"{where}, field '{field}': is unknown; use {', '.join(checks)}")
