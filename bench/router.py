"""Routing by what is cached, on real agent sessions: block hit rates and shares of the work over four workers, by policy and by tier size.

`python -m bench router` prints the rows; `python -m bench.router` measures tiers too and keeps everything in `book/results/`. Nothing is timed:
the results follow from the traces and the seeds alone, which draw when each session starts and how ties fall.
"""
from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, at_least, at_most, figure, ratio

WORKERS, SEEDS, TIER_SEEDS = 4, 5, 3
ROOM = 0.1  # of each worker, of all unique blocks
TIERS = (0.1, 0.25, 0.5, 1.0)  # of the tier, of all unique blocks
LOADS = {"requests": "requests", "asked": "prompt blocks", "computed": "computed blocks"}
CASES = {  # name -> policy, options of the replay
    "random": ("random", {}),
    "round_robin": ("round_robin", {}),
    "random, sticky": ("random", {"sticky": True}),
    "kv_aware, not sticky": ("kv_aware", {"sticky": False}),
    "kv_aware": ("kv_aware", {}),
}


def rows(bench: Bench) -> list[Row]:
    found = bench.run(Variant("router", "bench.router:measure", {"tiers": False})).result
    hits, loads = found["hit rate"], found["max over mean"]
    return [
        ratio("blocks found, kv_aware against random", hits["kv_aware"], hits["random"], at_least(1.4), "of all blocks",
              f"{WORKERS} workers, each with room for {ROOM:.0%} of {found['unique blocks']:,} unique blocks; {found['traces']}"),
        ratio("the same with unlimited room", hits["kv_aware, all fits"], hits["random, all fits"], None, "of all blocks", "what random routing alone loses"),
        *(ratio(f"blocks found, {case} against random", hits[case], hits["random"], None, "of all blocks")
          for case in CASES if case not in ("random", "kv_aware")),
        *(figure(f"busiest worker's {what} over the mean, kv_aware", loads[load]["kv_aware"], at_most(1.5) if load != "computed" else None, "x")
          for load, what in LOADS.items()),
    ]


def measure(threads: int = 2, tiers: bool = True) -> dict[str, Any]:
    """Samples by case, one a seed; `threads` replays at a time."""
    source, sessions, unique = _load()
    room = int(unique * ROOM)
    cases = {name: (policy, {"blocks_each": room, **options}) for name, (policy, options) in CASES.items()}
    for policy in ("random", "kv_aware"):
        cases[f"{policy}, all fits"] = policy, {}
        for share in TIERS if tiers else ():
            cases[f"{policy}, tier {share:.0%}"] = policy, {"blocks_each": room, "host_blocks": int(unique * share)}
    tasks = [(name, seed, *case) for name, case in cases.items() for seed in range(TIER_SEEDS if "tier" in name else SEEDS)]
    found: dict[str, Any] = {"traces": source, "sessions": sessions, "unique blocks": unique, "hit rate": {}, "device hit rate": {},
                             "max over mean": {load: {} for load in LOADS}}
    with ProcessPoolExecutor(threads) as processes:
        for name, hit_rate, device_hit_rate, loads in processes.map(_one, tasks):
            found["hit rate"].setdefault(name, []).append(hit_rate)
            found["device hit rate"].setdefault(name, []).append(device_hit_rate)
            for load, value in loads.items():
                found["max over mean"][load].setdefault(name, []).append(value)
            print(f"{name}: {hit_rate:.4f} found", file=sys.stderr, flush=True)
    return found


@cache
def _sessions() -> tuple[str, list[Any], Any]:
    from minengine.simulate.replay_cache import Chains
    from minengine.workload.traces import find_traces, read_agentx

    source = find_traces()
    return source.name, list(read_agentx(source.agentx)), Chains()


def _load() -> tuple[str, int, int]:
    from minengine.simulate.replay_cache import num_unique_blocks

    name, sessions, chains = _sessions()
    return name, len(sessions), num_unique_blocks(sessions, chains)


def _one(task: tuple[str, int, str, dict[str, Any]]) -> tuple[str, float, float, dict[str, float]]:
    from minengine.simulate.replay_cache import replay_cache

    name, seed, policy, options = task
    _, sessions, chains = _sessions()
    replay = replay_cache(sessions, policy, workers=WORKERS, seed=seed, chains=chains, **options)
    return name, replay.hit_rate, replay.device_hit_rate, {load: replay.max_over_mean(load) for load in LOADS}


def main() -> None:
    """Measure everything and keep it."""
    found = measure()
    hits, devices = found["hit rate"], found["device hit rate"]
    where = (f"{WORKERS} workers, each with room for a tenth of {found['unique blocks']:,} unique blocks; "
             f"{found['sessions']} sessions of {found['traces']}")

    def name(*parts: str) -> str:
        return "router-" + "-".join(parts).replace(", ", "-").replace(" ", "-").replace("%", "")

    def said(case: str) -> str:
        return f"{case.split(',')[0]}, {WORKERS} workers where everything fits" if case.endswith("all fits") else f"{case}; {where}"

    gains = {case: [a / b for a, b in zip(hits[case], hits["random"])] for case in CASES if case != "random"}
    gains["kv_aware, all fits"] = [a / b for a, b in zip(hits["kv_aware, all fits"], hits["random, all fits"])]
    kept = keep("router", "python -m bench.router", [
        *(measurement(name("hit-rate", case), f"Blocks found, on a device or in a tier: {said(case)}", "share of blocks", rates)
          for case, rates in hits.items()),
        *(measurement(name("device-hit-rate", case), f"Blocks found on a device: {said(case)}", "share of blocks", rates)
          for case, rates in devices.items() if "tier" in case),
        *(measurement(name("gain", case), f"Blocks found, over those of random routing with the same seed: {said(case)}", "x", ratios)
          for case, ratios in gains.items()),
        *(measurement(name("load", load, case), f"Busiest worker's {LOADS[load]} over the mean of all: {said(case)}", "x", samples)
          for load, cases in found["max over mean"].items() for case, samples in cases.items() if case in CASES),
    ])
    print(kept.name)


if __name__ == "__main__":
    main()
