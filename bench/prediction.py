"""What the simulator predicts of the real engine: the same sessions in both, with prices of steps that were measured on something else.

`python -m bench prediction` prints the rows; `python -m bench.prediction` also keeps the result in `book/results/`. Prices come from the calibration's
own scenes (`minengine simulate --calibrate`), which know no trace. Then sessions of the traces, made shorter by a stated factor, are replayed in a closed
loop on the engine, and on the simulator; nothing of the replay is told to the simulator but its sessions and the engine's options. Times are compared over the requests that both have
ended. One thread; seconds are those of the engine's thread, and those in which it had nothing to do.
"""
from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, at_most, figure

MODELS = ("smollm2", "glm-mini")
SETTINGS = {  # live sessions, tokens of a step
    "4-sessions": (4, 512),
    "8-sessions": (8, 256),
}
SCALE, OUTPUT_SCALE, GAP_CAP_S = 0.02, 0.06, 2.0
BLOCK_SIZE, POOL_TOKENS, DURATION_S = 16, 65_536, 60.0
ROUNDS = 3
METRICS = {"ttft_s_mean": "mean time to first token", "itl_s_mean": "mean inter-token latency", "output_tok_s": "output tokens a second",
           "e2e_tok_s_user": "E2E tokens a second of a user, mean"}


def rows(bench: Bench) -> list[Row]:
    found = _measure(bench)
    lines = []
    for model, one in found.items():
        lines.append(figure(f"{model}: a step against its price, error without sign", [100 * one["fit_error"]], None, "%"))
        for setting, runs in one["runs"].items():
            lines += [figure(f"{model}, {setting}: {what}, how far the prediction is off", [100 * abs(run[metric][0] / run[metric][1] - 1) for run in runs],
                             at_most(15.0), "%") for metric, what in METRICS.items()]
    return lines


def _measure(bench: Bench, rounds: int = ROUNDS, duration_s: float = DURATION_S, scenes: int | None = None) -> dict[str, Any]:
    return {model: bench.run(Variant(f"prediction, {model}", "bench.prediction:compared",
                                     {"model": model, "rounds": rounds, "duration_s": duration_s, "scenes": scenes, "threads": 1})).result for model in MODELS}


def compared(model: str, threads: int, rounds: int, duration_s: float, scenes: int | None) -> dict[str, Any]:
    """Of each setting and round, each metric as [predicted, measured]."""
    from minengine.simulate.calibrate import Scenes, calibrate

    found = calibrate(model, scenes=replace(Scenes(), **({"count": scenes} if scenes else {})), threads=threads, device="cpu", dtype="float32")
    runs = {name: [both(model, found.mapping(), sessions, budget, seed, duration_s) for seed in range(rounds)]
            for name, (sessions, budget) in SETTINGS.items()}
    return {"fit_error": found.errors.median, "prices": found.prices, "runs": runs}


def both(model: str, machine: dict[str, Any], concurrency: int, budget: int, seed: int, duration_s: float) -> dict[str, list[float]]:
    """One replay on the engine, and on the simulator."""
    from minengine.engine_args import EngineArgs
    from minengine.replay.drive import replay
    from minengine.replay.engine import EngineTarget
    from minengine.simulate import Deployment, simulate
    from minengine.workload.closed_loop import ClosedLoop
    from minengine.workload.report import report
    from minengine.workload.scaling import scaled_sessions
    from minengine.workload.traces import find_traces, read_agentx

    sessions = scaled_sessions(list(read_agentx(find_traces().agentx)), SCALE, BLOCK_SIZE, OUTPUT_SCALE)
    loop = {"concurrency": concurrency, "gap_cap_s": GAP_CAP_S, "seed": seed, "start_at": "anywhere"}
    target = EngineTarget(EngineArgs(model=model, device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_num_batched_tokens=budget,
                                     max_num_seqs=32, num_gpu_blocks_override=POOL_TOKENS // BLOCK_SIZE))
    seen = replay(ClosedLoop(sessions, **loop), target, duration_s)
    failed = next((record.error for record in seen.records if record.error), None)
    if seen.stopped or failed:
        raise RuntimeError(f"the replay ended early ({seen.stopped}), or a request failed ({failed})")
    deployment = Deployment(topology="TP1", machine=machine, block_size=BLOCK_SIZE, cached_tokens=POOL_TOKENS, max_num_batched_tokens=budget, max_num_seqs=32)
    told = simulate(deployment, sessions, duration_s=duration_s, **loop)
    ended = [{(one.session, one.agent, one.number) for one in records if one.end_s is not None and one.end_s <= duration_s} for records in (told.records, seen.records)]
    same = ended[0] & ended[1]  # the last ones may have ended in one of them only: times are those of the same requests

    def of_same(records: list[Any]) -> dict[str, Any]:
        return report([one for one in records if (one.session, one.agent, one.number) in same], duration_s, 1)

    predicted, measured = of_same(told.records), of_same(seen.records)
    throughput = report(told.records, duration_s, 1)["output_tok_s"], report(seen.records, duration_s, 1)["output_tok_s"]
    found = {metric: [predicted[metric], measured[metric]] for metric in METRICS} | {"output_tok_s": list(throughput)}
    return {**found, "requests": [len(ended[0]), len(ended[1])], "hit_rate": [predicted["hit_rate"], measured["hit_rate"]]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prediction", description="The simulator against the engine, on sessions that neither was fitted to.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"seeds of each setting (default: {ROUNDS})")
    args = parser.parse_args()
    bench = Bench(threads=1)
    found = _measure(bench, args.rounds)
    kept = []
    for model, one in found.items():
        kept.append(measurement(f"prediction-{model}-fit", f"median error of a step's price, {model}", "fraction", [one["fit_error"]]))
        for setting, runs in one["runs"].items():
            for metric, what in METRICS.items():
                name = f"prediction-{model}-{setting}-{metric.replace('_', '-')}"
                kept.append(measurement(name, f"{what}, predicted over measured: {model}, {setting}", "ratio", [run[metric][0] / run[metric][1] for run in runs]))
                kept.append(measurement(f"{name}-measured", f"{what}, on the engine: {model}, {setting}", "tok/s" if "tok" in metric else "s", [run[metric][1] for run in runs]))
    worst = max((run.foreign_cores for run in bench.runs if run.foreign_cores is not None), default=None)
    if worst is not None:
        kept.append(measurement("prediction-foreign-cores", "cores that other programs kept busy", "cores", [worst]))
    print(keep("prediction", "python -m bench.prediction", kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
