"""`minengine simulate`: one deployment, a sweep over many, the published one beside its figures, or this machine measured to be simulated."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..workload.closed_loop import GAPS, STARTS
from ..workload.metrics import MetricError
from ..workload.report import DEFINITIONS, table
from ..workload.sessions import TraceError
from .deployment import Deployment
from .points import RUN, points, run_point

__all__ = ["add_arguments", "run"]

PRESET = "prime-inference"
ABOUT = {
    "prefill": "topology of the engines that prefill", "prefills": "how many of them", "decode": "topology of the decoders", "decoders": "how many of them",
    "topology": "of engines that do both, in place of the four above", "engines": "how many of those", "machine": "a name, or the path of a .yml file",
    "kv_cache_dtype": "format of the cache's rows", "kv_cache_layout": "order in memory, by which what moves is cut", "block_size": "tokens of a block",
    "max_num_batched_tokens": "tokens of a rank and step", "decode_max_num_batched_tokens": "the same of decoders, if it is another number",
    "max_num_seqs": "requests that run at once on a rank", "long_prefill_token_threshold": "tokens of one prompt in a step; 0 for no limit",
    "prefill_cached_tokens": "of a prefill rank's pool (default: as the memory ladder has it)",
    "cached_tokens": "of the pool of a rank that decodes (default: as the memory ladder has it)", "load_admission": "poll or event",
    "host_tier_bytes": "size of the tier that engines which prefill share; 0 for none", "router_policy": "kv_aware, round_robin or random",
    "first_token": "counts when the prefill engine has it, or when the decoder has admitted the request: prefill or decode",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=[PRESET], help="print what was reported of the published deployment beside what is predicted")
    what.add_argument("--sweep", type=Path, metavar="GRID.yml", help="run many points: deployment, run, grid and points, as minengine/simulate/points.py says")
    what.add_argument("--calibrate", action="store_true", help="measure an engine on this machine, so that it can be simulated")
    parser.add_argument("--out", metavar="FILE", help="of a sweep: a line a finished point, from which a second run goes on (default: GRID.jsonl); of a "
                        "calibration: the machine's file; else: settings, metrics and a record a request, as JSON")
    parser.add_argument("--quick", action="store_true", help="of a preset or a calibration: less, to see that it works")
    parser.add_argument("--model", default="smollm2", help="of a calibration (default: smollm2)")
    parser.add_argument("--trace", default="agentx", metavar="TRACE", help="agentx, mooncake, generated, or a path (default: agentx)")
    parser.add_argument("--processes", type=int, metavar="N", help="points of a sweep at once (default: one a core)")
    parser.add_argument("--cluster", metavar="ADDRESS", help="run a sweep on this Ray cluster")
    loop = parser.add_argument_group("load")
    given = {"default": argparse.SUPPRESS}
    loop.add_argument("--concurrency", type=int, metavar="N", help="live sessions, each with its subagents (default: 66)", **given)
    loop.add_argument("--duration-s", type=float, metavar="S", help="simulated seconds, --warm-s among them (default: 3600)", **given)
    loop.add_argument("--warm-s", type=float, metavar="S", help="seconds at the beginning that do not count (default: 0)", **given)
    loop.add_argument("--gap-cap-s", type=float, metavar="S", help="longest gap between requests that is replayed (default: 300)", **given)
    loop.add_argument("--gaps", choices=GAPS, help="think times as recorded, or bounded by the time between two starts (default: recorded)", **given)
    loop.add_argument("--start-at", choices=STARTS, help="where the first sessions begin (default: beginning)", **given)
    loop.add_argument("--start-within-s", type=float, metavar="S", help="they begin at moments drawn within this time (default: 0)", **given)
    loop.add_argument("--cold-per-s", type=float, metavar="X", help="requests a second from outside the sessions, with no past (default: 0)", **given)
    loop.add_argument("--cold-tokens", type=int, metavar="N", help="tokens of each of them", **given)
    loop.add_argument("--cold-output-tokens", type=int, metavar="N", help="tokens of their answers", **given)
    loop.add_argument("--seed", type=int, metavar="N", help="of all that is drawn (default: 0)", **given)
    loop.add_argument("--slo-e2e-tok-s", type=float, metavar="X", help="goodput: output tokens over the whole latency, at least")
    group = parser.add_argument_group("deployment")
    group.add_argument("--deployment", type=Path, metavar="FILE.yml", help="fields of a deployment, also those that have no flag")
    for field in fields(Deployment):
        if field.name in ABOUT:
            told = ABOUT[field.name]
            told += "" if "(default" in told or field.default is None else f" (default: {field.default})"
            whole = str(field.type).startswith("int")
            group.add_argument("--" + field.name.replace("_", "-"), type=int if whole else str, metavar="N" if whole else field.name.split("_")[-1].upper(),
                               help=told, **given)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns the exit code.

    Raises:
        ConfigError: a setting that is not possible, or a trace that cannot be read.
    """
    try:
        if args.preset is not None:
            from .prime import main

            return main(args.quick, args.out, None if args.trace == "agentx" else args.trace)
        if args.calibrate:
            from .calibrate import FILE, main as calibrate

            return calibrate(args.model, args.out or FILE, args.quick)
        return _sweep(args) if args.sweep is not None else _one(args)
    except (TraceError, MetricError) as error:
        raise ConfigError(str(error)) from error


def _one(args: argparse.Namespace) -> int:
    from ..workload.opening import open_sessions

    asked = {name: value for name, value in vars(args).items() if name in {one.name for one in fields(Deployment)} and name != "model"}
    loop = {name: getattr(args, name) for name in RUN if hasattr(args, name) and name != "trace"}
    settings = {**_yaml(args.deployment), **asked} if args.deployment is not None else asked
    slo = {"slo": {"e2e_tok_s": args.slo_e2e_tok_s}} if args.slo_e2e_tok_s is not None else {}
    (point,) = points({"deployment": settings, "run": {"trace": args.trace, **loop, **slo}, "points": [{}]})
    sessions, words = open_sessions(args.trace, seed=loop.get("seed", 0))
    with _Bar(1000, "simulating") as bar:
        line = run_point(point, sessions, progress=lambda share: bar(round(1000 * share), 1000))
    if "error" in line:
        raise ConfigError(line["error"])
    print(f"{words}; {line['gpus']} GPU{'s' if line['gpus'] > 1 else ''}")
    print(table({"simulated": line["metrics"]}))
    counts = line["counts"]
    print(f"\n{counts['requests_out']:,} requests, {counts['tokens_out']:,} tokens, {counts['steps']:,} steps in {counts['events']:,} events; "
          f"{counts['dummies']:,} dummy forwards, {counts['preemptions']:,} preemptions, {counts['evictions']:,} blocks evicted; digest {line['digest'][:16]}")
    if args.out:
        _write(args.out, json.dumps({**line, "definitions": {name: list(about) for name, about in DEFINITIONS.items()}}, indent=1) + "\n")
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from .sweep import sweep

    asked = points(_yaml(args.sweep))
    out = args.out or args.sweep.with_suffix(".jsonl")
    with _Bar(len(asked), "points") as bar:
        lines = sweep(asked, out, processes=args.processes, address=args.cluster, progress=bar)
    failed = [line for line in lines if "error" in line]
    good = [line for line in lines if "error" not in line]
    names = _different(lines)
    shown = (*names, "gpus", "e2e_tok_s_user", "output_tok_s_gpu", "ttft_s_p50", "in_flight_mean", "hit_rate")
    rows = [shown, *([_shown({**line["deployment"], **line["run"], **line["metrics"], "gpus": line["gpus"]}.get(name)) for name in shown] for line in good)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
    print("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows))
    for line in failed:
        settings = {**line["deployment"], **line["run"]}
        print(f"minengine: {', '.join(f'{name}={settings.get(name)}' for name in names)}: {line['error']}", file=sys.stderr)
    print(f"{len(good)} points in {os.fspath(out)}")
    return 2 if failed else 0


def _different(lines: list[dict[str, Any]]) -> list[str]:
    """Settings that are not the same in all points."""
    every = [{**line["deployment"], **line["run"]} for line in lines]
    return [name for name in dict.fromkeys(name for one in every for name in one) if len({json.dumps(one.get(name), sort_keys=True) for one in every}) > 1]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: holds no mapping; see minengine/simulate/points.py")
    return found


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={path!r}: cannot be written ({error.strerror})") from error


class _Bar:
    """Progress on stderr, where that is a terminal."""

    def __init__(self, total: int, what: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=what, file=sys.stderr, disable=not sys.stderr.isatty(), unit="", leave=False)

    def __enter__(self) -> Callable[[int, int], None]:
        return self._to

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def _to(self, done: int, of: int) -> None:
        self._bar.update(done - self._bar.n)
