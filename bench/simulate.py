"""The cluster's simulator at the two sizes that it is meant for: an hour of 66 agents on 24 GPUs, and of 1,000 on 360, at full token counts.

The time is the core seconds of the process: one core, whatever else the machine does.
"""
from __future__ import annotations

from typing import Any

from .harness import Bench, Variant
from .table import Row, at_least, at_most, figure

HOUR = 3600
SIZES = {"66 agents, 24 GPUs": (66, 1, 3 * 60), "1,000 agents, 360 GPUs": (1000, 15, 45 * 60)}  # live sessions, groups, core seconds at most
GROUP = {"prefill": "DEP8", "decode": "TP4", "host_tier_bytes": 2 * 10 ** 12}  # eight GPUs, and four decoders of four
LARGEST = 6 * 2 ** 30


def rows(bench: Bench) -> list[Row]:
    found = []
    for name, (sessions, groups, limit_s) in SIZES.items():
        run = bench.run(Variant(name, "bench.simulate:hour", {"sessions": sessions, "groups": groups}, limit_s=4 * limit_s))
        result = run.result
        about = f"{result['requests']:,} requests, {result['steps']:,} steps, {result['traces']}"
        found += [figure(f"simulator, an hour of {name}", [run.cpu_s], at_most(limit_s), "core seconds", about),
                  figure(f"simulator, {name}", [HOUR / run.cpu_s], at_least(HOUR / limit_s), "simulated s/s"),
                  figure(f"simulator, {name}", [result["events"] / run.cpu_s], None, "events/s", "a stretch of steps is one event"),
                  figure(f"simulator, {name}", [result["steps"] / run.cpu_s], None, "steps/s"),
                  figure(f"simulator, {name}: memory", [run.max_rss_bytes / 2 ** 30], at_most(LARGEST / 2 ** 30), "GiB")]
    return found


def hour(threads: int, sessions: int, groups: int) -> dict[str, Any]:
    from minengine.simulate import Deployment, simulate
    from minengine.workload.traces import find_traces, read_agentx

    source = find_traces()
    deployment = Deployment(**{**GROUP, "prefills": groups, "decoders": 4 * groups, "host_tier_bytes": groups * GROUP["host_tier_bytes"]})
    result = simulate(deployment, list(read_agentx(source.agentx)), concurrency=sessions, duration_s=HOUR, gap_cap_s=10, start_at="anywhere",
                      start_within_s=30)
    return {"requests": result.counts["requests_out"], "steps": result.counts["steps"], "events": result.counts["events"], "traces": source.name,
            "digest": result.digest}
