"""Prefill and decode on one engine, on two, and apart, with the same two threads: the gaps between tokens, first tokens, and tokens a second.

`python -m bench apart` prints the rows; `python -m bench.apart` also keeps the result in `book/results/`. Eight streams in a closed loop, each with
a new prompt as soon as its last answer has ended; answers have 24 tokens on average. The longer the prompts, the larger the part of prefill in the work.
All systems stand ready in one process's care and take turns, there and back, so that a disturbance meets all of them. Idle ones sleep.
"""
from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any, Sequence

from minengine.workload.stats import median, percentile

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, figure, ratio

ROUNDS, WARM_S, WINDOW_S = 3, 0.6, 1.8
HISTORY = 512
CASES = {**{str(n): dict(prompt_tokens=n) for n in (16, 64, 128, 256, 384)}, "turns": dict(prompt_tokens=16, history_tokens=HISTORY)}
SYSTEMS = {
    "one": (dict(prefill=0, decode=1), "one engine with both threads"),
    "two": (dict(prefill=0, decode=2), "two engines of one thread"),
    "two-small": (dict(prefill=0, decode=2, max_num_batched_tokens=64), "two engines of one thread with a budget of 64 tokens"),
    "apart": (dict(prefill=1, decode=1, load_admission="event"), "one prefill and one decode worker of one thread"),
}
AGAINST = [name for name in SYSTEMS if name != "apart"]
OPTIONS = dict(model="smollm2", device="cpu", dtype="float32", max_model_len=2048, max_num_seqs=16)
BUDGET = 512  # of a step, where a system names none
VALUES = {  # of one window
    "p90-ms": ("90th percentile of the gaps between a request's tokens", "ms"),
    "p50-ms": ("median gap between a request's tokens", "ms"),
    "second-ms": ("median gap between a first token and a second", "ms"),
    "ttft-ms": ("median time to the first token", "ms"),
    "tok-s": ("tokens of answers", "tok/s"),
}
MOVED = {"mb": ("bytes", "MB"), "pieces": ("pieces, as asked", "pieces"), "descriptors": ("descriptors, by NIXL's count", "descriptors"), "ms": ("time", "ms")}
COMMAND = "python -m bench.apart"


def rows(bench: Bench, rounds: int = ROUNDS) -> list[Row]:
    return _table(_measure(bench, rounds, list(CASES)))


def _measure(bench: Bench, rounds: int, cases: Sequence[str]) -> dict[str, Any]:
    return bench.run(Variant("prefill and decode apart", "bench.apart:streams", {"rounds": rounds, "cases": cases}, limit_s=3600)).result


# --- in the child ------------------------------------------------------------------------------------------


def streams(threads: int, rounds: int, cases: Sequence[str]) -> dict[str, Any]:
    """{"work": {case: (prefill, decode seconds of a request)}, "seen": {case: {system: {value: [one a round]}}}, "moved": {case: {what: [...]}}, ...}."""
    from minengine import Cluster
    from minengine.disagg.closed_loop import Load, run

    loads = {case: Load(**CASES[case]) for case in cases}
    work = _work(loads)
    seen: dict[str, Any] = {case: {name: {value: [] for value in VALUES} for name in SYSTEMS} for case in loads}
    moved: dict[str, Any] = {case: {what: [] for what in MOVED} for case in loads}
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(Cluster(num_threads=threads, **{"max_num_batched_tokens": BUDGET, **OPTIONS, **how}))
                    for name, (how, _) in SYSTEMS.items()}
        for name, cluster in clusters.items():
            for case in dict.fromkeys((cases[0], cases[-1])):  # warm up, and make the sessions' histories known to the caches
                run(cluster, loads[case], warm_s=0, window_s=0, seed=-1)
        for turn in range(rounds):
            back = turn % 2 == 1
            for case in reversed(loads) if back else loads:
                for name in reversed(clusters) if back else clusters:
                    one = run(clusters[name], loads[case], warm_s=WARM_S, window_s=WINDOW_S, seed=turn)
                    found = {"p90-ms": 1e3 * percentile(one.gaps_s, 90), "p50-ms": 1e3 * median(one.gaps_s), "ttft-ms": 1e3 * median(one.ttft_s),
                             "second-ms": 1e3 * median(one.second_s), "tok-s": one.tokens_per_s}
                    for value in VALUES:
                        seen[case][name][value].append(found[value])
                    if n := one.moved.get("landed"):
                        each = {"mb": one.moved["nbytes"] / 1e6, "pieces": one.moved["asked"], "descriptors": one.moved["nixl_descriptors"],
                                "ms": 1e3 * one.moved["seconds"]}
                        for what in MOVED:
                            moved[case][what].append(each[what] / n)
        workers = {name: [[w.role, w.num_threads, w.transfer.partition(": ")[2]] for w in cluster.workers] for name, cluster in clusters.items()}
    return {"work": work, "seen": seen, "moved": moved, "workers": workers}


def _work(loads: dict[str, Any]) -> dict[str, Any]:
    """Of one engine of one thread, in seconds of that thread: what other programs do meanwhile does not count."""
    import time

    from minengine import EngineArgs, LLMEngine
    from minengine.disagg.closed_loop import work

    engine = LLMEngine(EngineArgs(num_threads=1, max_num_batched_tokens=BUDGET, **OPTIONS), clock=time.thread_time)
    return {case: work(engine, load) for case, load in loads.items()}


# --- what it says ------------------------------------------------------------------------------------------


def _cuts(result: dict[str, Any], case: str, against: str) -> list[float]:
    """Percent of that system's p90 that is missing apart, round by round."""
    seen = result["seen"][case]
    return [100 * (1 - apart / other) for apart, other in zip(seen["apart"]["p90-ms"], seen[against]["p90-ms"])]


def _shares(result: dict[str, Any], case: str) -> list[float]:
    """Percent of prefill in the work of a request."""
    return [100 * prefill / (prefill + decode) for prefill, decode in zip(*result["work"][case])]


def _about(case: str) -> str:
    if case == "turns":
        return f"turns of {CASES[case]['prompt_tokens']} new tokens in sessions with a cached past of {HISTORY} and more"
    return f"cold prompts of {case} tokens"


def _table(result: dict[str, Any]) -> list[Row]:
    table = []
    for case, seen in result["seen"].items():
        note = f"prefill is {median(_shares(result, case)):.0f}% of the work"
        for name in AGAINST:
            table.append(ratio(f"p90 gap apart against {SYSTEMS[name][1]}, {_about(case)}", seen["apart"]["p90-ms"], seen[name]["p90-ms"], None, "ms", note))
        table.append(ratio(f"first token apart against two engines, {_about(case)}", seen["apart"]["ttft-ms"], seen["two"]["ttft-ms"], None, "ms"))
        table.append(ratio(f"tokens a second apart against two engines, {_about(case)}", seen["apart"]["tok-s"], seen["two"]["tok-s"], None, "tok/s"))
        if result["moved"][case]["mb"]:
            table.append(figure(f"moved a request, {_about(case)}", result["moved"][case]["mb"], None, "MB"))
    return table


def _kept(result: dict[str, Any], noise: list[float]) -> list[dict[str, Any]]:
    found = [measurement("apart-foreign-cores", "Cores that other programs kept busy meanwhile: a quiet machine has none", "cores", noise)] if noise else []
    for case, seen in result["seen"].items():
        prefill, decode = ([1e3 * one for one in part] for part in result["work"][case])
        what = f"{_about(case)}, answers of 24 on average, 8 streams in a closed loop"
        found += [measurement(f"apart-share-{case}", f"Part of prefill in the work of a request: {what}", "%", _shares(result, case)),
                  measurement(f"apart-work-prefill-{case}", f"Seconds of one thread for a prompt alone: {_about(case)}", "ms", prefill),
                  measurement(f"apart-work-decode-{case}", f"A request's part of the decode steps of one thread: {what}", "ms", decode)]
        for name in SYSTEMS:
            for value, (says, unit) in VALUES.items():
                found.append(measurement(f"apart-{name}-{value}-{case}", f"{says}, {SYSTEMS[name][1]}: {what}", unit, seen[name][value]))
        for name in AGAINST:
            found.append(measurement(f"apart-cut-{name}-{case}", f"Cut of the p90 gap against {SYSTEMS[name][1]}: {what}", "%", _cuts(result, case, name)))
        for one, (says, unit) in MOVED.items():
            if result["moved"][case][one]:
                found.append(measurement(f"apart-moved-{one}-{case}", f"Moved from prefill to decode a request, {says}: {_about(case)}", unit, result["moved"][case][one]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="of each system in all (default: 2)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"windows of each system and load (default: {ROUNDS})")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (default: all), in this order")
    args = parser.parse_args()
    bench = Bench(args.threads)
    result = _measure(bench, args.rounds, args.cases)
    from .table import render

    print(render(_table(result)))
    for name, workers in result["workers"].items():
        print(f"{name}: " + ", ".join(f"{role} ({threads} thread{'s' * (threads > 1)}{'; ' + how if how else ''})" for role, threads, how in workers))
    noise = [run.foreign_cores for run in bench.runs if run.foreign_cores is not None]
    command = " ".join([COMMAND, *(f"--{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in vars(args).items()
                                      if value != parser.get_default(name))])
    print(keep("apart", command, _kept(result, noise)).name)


if __name__ == "__main__":
    main()
