"""From samples to a file of `book/results/`: what the pages show of a measurement that was not made while they were built."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable

from minengine.results import RESULTS, file_name, read_results, run_facts
from minengine.workload.stats import summary

__all__ = ["keep", "measurement"]


def measurement(name: str, what: str, unit: str, samples: Iterable[float], claim: str | None = None) -> dict[str, Any]:
    """One entry of the file: median and middle half of the samples."""
    s = summary(samples)
    return {"name": name, "what": what, "unit": unit, "n": s.n, "median": s.median, "spread": [s.low, s.high], "claim": claim}


def keep(kind: str, command: str, measurements: list[dict[str, Any]], folder: str | Path = RESULTS) -> Path:
    """Write `kind`-MACHINE.json, in place of an older one of this machine.

    Raises:
        ResultError: with it the folder can no longer be read.
    """
    run = {**run_facts(command), "measurements": measurements}
    path = Path(folder) / file_name(f"{kind}-", run["machine"])
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    read_results(folder)
    return path
