"""`python -m bench.sizing`: simulate the points that the Pareto explorer has at once, and keep them as book/results/sizing.json.

Nothing is measured: the same code gives the same file but for its date. Each point takes a core some seconds.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minengine.results import RESULTS, SIZING, run_facts
from minengine.simulate.grid import stored
from minengine.simulate.machine import machine
from minengine.simulate.prime import deployment, loop
from minengine.simulate.rack_fit import preset
from minengine.simulate.sizing import DEFAULTS, point
from minengine.workload.agent_scaling import scaled_to
from minengine.workload.generator import AgentModel

WINDOW_S = 600  # after the preset's time for warming up; half of its window
RATIOS = {2: (16, 32, 48, 64), 3: (24, 48, 60, 72, 96), 4: (32, 42, 54, 64, 66, 80, 96), 6: (48, 66, 96, 128)}  # sessions, by decoders of four GPUs
FEWER = {2: (32, 64), 3: (48, 72), 4: (48, 66, 96)}
WIDER = ("TP8", "DEP8")
WIDE = {1: (32, 64), 2: (48, 66, 96)}  # by decoders of eight GPUs
VARIED: tuple[tuple[dict[str, Any], int], ...] = (  # one thing changed; longer gaps leave room for more sessions, so many times as many
    ({"kv_cache_dtype": "fp8"}, 1), ({"max_num_batched_tokens": 8192}, 1), ({"prefill": "TEP8"}, 1),
    ({"gap_cap_s": 30}, 2), ({"gap_cap_s": 300}, 4),
)


def settings() -> Iterator[dict[str, Any]]:
    """Of every point, each once."""
    for change, times, groups in (({}, 1, RATIOS), *((change, times, FEWER) for change, times in VARIED), *(({"decode": name}, 1, WIDE) for name in WIDER)):
        for decoders, counts in groups.items():
            for count in sorted({*(times * count for count in counts), *([66] if 66 in counts else [])}):
                yield {**DEFAULTS, **change, "decoders": decoders, "sessions": count}


def given() -> dict[str, Any]:
    """What the points share: the preset's deployment and loop, and agents with its mean lengths; nothing that has to be looked up in a file."""
    options, loads, workload = deployment().mapping(), loop(), preset()["workload"]
    shared = {name: value for name, value in options.items() if name not in DEFAULTS} | {"machine": machine(options["machine"]).mapping()}
    rest = {name: value for name, value in loads.items() if name not in (*DEFAULTS, "concurrency", "duration_s", "warm_s")}
    agents = scaled_to(AgentModel.shipped(), workload["input_tokens"], workload["output_tokens"])
    return {"deployment": shared, "loop": rest, "agents": agents.mapping(), "warm_s": loads["warm_s"], "window_s": WINDOW_S}


def _one(task: tuple[dict[str, Any], Mapping[str, Any]]) -> dict[str, Any]:
    asked, shared = task
    return {"settings": asked, "value": point(**asked, **shared)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sizing", description="Simulate the grid of deployments that the Pareto explorer shows.")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="points at once (default: as many as there are cores)")
    parser.add_argument("--out", type=Path, default=RESULTS / SIZING, help="the file to write")
    args = parser.parse_args()
    shared, asked = given(), list(settings())
    with multiprocessing.Pool(args.jobs) as pool:
        points = list(tqdm(pool.imap(_one, [(one, shared) for one in asked]), total=len(asked), unit="point", file=sys.stderr))
    facts = run_facts("python -m bench.sizing")
    text = json.dumps({**facts, "given": shared, "points": points}, separators=(",", ":"))
    args.out.write_text(text.replace('{"settings"', '\n{"settings"') + "\n", encoding="utf-8")  # a line a point
    stored(args.out)
    print(f"{len(points)} points in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
