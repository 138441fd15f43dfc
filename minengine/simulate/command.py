"""`minengine simulate`: one deployment, a sweep over many, the published one beside its figures, or this machine measured to be simulated."""
from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..progress import progress
from ..workload.closed_loop import GAPS, STARTS
from ..workload.metrics import MetricError
from ..workload.report import DEFINITIONS, table
from ..workload.sessions import TraceError
from .deployment import Deployment
from .points import DEFAULTS, RUN, key, points, run_point

__all__ = ["add_arguments", "run"]

PRESET = "prime-inference"
TAKES = {"preset": ("quick", "trace", "out"), "calibrate": ("quick", "model", "out"), "sweep": ("processes", "cluster", "out")}
APART = ("prefill", "prefills", "decode", "decoders", "prefill_cached_tokens", "decode_max_num_batched_tokens")  # which engines that do both have not
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


DEPLOYMENT_YML = """\
prefill: DEP8
decode: TP4
decoders: 4
host_tier_bytes: 2000000000000
model_options: {draft_tokens: 4, tokens_per_step: 3.33}
"""
GRID_YML = """\
deployment: {prefill: DEP8, decode: TP4}              # fields of a deployment, for all points
run: {duration_s: 1200, warm_s: 300, gap_cap_s: 10}   # the load, and: trace, slo: {e2e_tok_s: 100}
grid: {decoders: [2, 3, 4], concurrency: [32, 64]}    # every combination of these
points: [{decoders: 4, concurrency: 66}]              # and these
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.set_defaults(typed=())  # the command line sets it: how to repeat the run
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "".join(f"{told}:\n\n" + "".join(f"  {line}\n" for line in text.splitlines()) + "\n" for told, text in (
        ("a file for --deployment", DEPLOYMENT_YML), ("a file for --sweep", GRID_YML)))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=[PRESET], help="print what was reported of the published deployment beside what is predicted")
    what.add_argument("--sweep", type=Path, metavar="GRID.yml", help="run many points: deployment, run, grid and points, as shown below")
    what.add_argument("--calibrate", action="store_true", help="measure an engine on this machine, so that it can be simulated")
    parser.add_argument("--out", metavar="FILE", help="of a sweep: a line a finished point, from which a second run goes on (default: GRID.jsonl); of a "
                        "calibration: the machine's file; else: settings, metrics and a record a request, as JSON")
    given = {"default": argparse.SUPPRESS}
    parser.add_argument("--quick", action="store_true", help="of a preset or a calibration: less, to see that it works")
    parser.add_argument("--model", help="of a calibration (default: smollm2)", **given)
    parser.add_argument("--trace", metavar="TRACE", help="agentx, mooncake, generated, or a path (default: agentx)", **given)
    parser.add_argument("--processes", type=int, metavar="N", help="points of a sweep at once (default: one a core)")
    parser.add_argument("--cluster", metavar="ADDRESS", help="run a sweep on this Ray cluster")
    loop = parser.add_argument_group("load")
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
        ConfigError: a setting that is not possible, one that what was asked for does not take, or a trace that cannot be read.
    """
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "typed") and value is not None and value is not False}
    _check_flags(given)
    if args.out is not None:
        _check_writable(Path(args.out))
    try:
        if args.preset is not None:
            from .prime import main

            return main(args.quick, args.out, None if given.get("trace") == "agentx" else given.get("trace"))
        if args.calibrate:
            from .calibrate import FILE, main as calibrate

            return calibrate(given.get("model", "smollm2"), args.out or FILE, args.quick)
        return _sweep(args) if args.sweep is not None else _one(args)
    except (TraceError, MetricError) as error:
        raise ConfigError(str(error)) from error


def _check_flags(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if one of them would not count."""
    what = next((name for name in TAKES if name in given), None)
    if what is None:
        wrong = [name for name in ("quick", "model", "processes", "cluster") if name in given]
        remedy = "belongs to " + " or ".join(f"--{name}" for name, takes in TAKES.items() if wrong and wrong[0] in takes)
    else:
        wrong = [name for name in given if name not in (what, *TAKES[what])]
        remedy = f"is nothing for --{what}, which takes {', '.join('--' + name for name in TAKES[what])}"
        remedy += "; put it into the file" if what == "sweep" else ""
    if wrong:
        raise ConfigError(f"{_flag(wrong[0])} {remedy}")
    for name in ("cold_tokens", "cold_output_tokens"):
        if name in given and not given.get("cold_per_s"):
            raise ConfigError(f"{_flag(name)} is of requests from outside, of which there are none; give --cold-per-s too")


def _check_writable(path: Path) -> None:
    """Raise ConfigError if a run's result would be lost at its end."""
    if path.is_dir():
        raise ConfigError(f"--out={path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out={path}: cannot be written, there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--out={path}: cannot be written; name another file")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Of the deployment, by its file and by flags.

    Raises:
        ConfigError: an unknown field, or one that the deployment's other fields leave without use.
    """
    asked = {name: value for name, value in vars(args).items() if name in {one.name for one in fields(Deployment)} and name != "model"}
    settings = {**_yaml(args.deployment, "--deployment"), **asked} if args.deployment is not None else asked
    default = {one.name: one.default for one in fields(Deployment)}
    changed = [name for name in settings if name in default and settings[name] != default[name]]
    if settings.get("topology") is not None:
        unused = [name for name in APART if name in changed]
        if unused:
            raise ConfigError(f"{unused[0]}={settings[unused[0]]!r}: is of engines that prefill or decode, and with topology={settings['topology']!r} there "
                              "are none; leave out one of the two")
    elif "engines" in changed:
        raise ConfigError(f"engines={settings['engines']!r}: is of engines that do both; give their topology too, or use prefills and decoders")
    return Deployment.of(settings).mapping()


def _one(args: argparse.Namespace) -> int:
    from .sweep import opened

    loop = {name: getattr(args, name) for name in RUN if hasattr(args, name)}
    slo = {"slo": {"e2e_tok_s": args.slo_e2e_tok_s}} if args.slo_e2e_tok_s is not None else {}
    (point,) = points({"deployment": _settings(args), "run": {**loop, **slo}, "points": [{}]})
    sessions, words = opened(point["run"]["trace"], loop.get("seed", 0))
    with progress("simulating", 100, "%") as tell:
        line = run_point(point, sessions, records=args.out is not None, progress=lambda share: tell(100 * share))
    if "error" in line:
        raise ConfigError(line["error"])
    print(f"{words}; {line['gpus']} GPU{'s' if line['gpus'] > 1 else ''}")
    print(table({"simulated": line["metrics"]}))
    counts = line["counts"]
    print(f"\n{counts['requests_out']:,} requests, {counts['tokens_out']:,} tokens, {counts['steps']:,} steps in {counts['events']:,} events; "
          f"{counts['dummies']:,} dummy forwards, {counts['preemptions']:,} preemptions, {counts['evictions']:,} blocks evicted; digest {line['digest'][:16]}")
    if args.out:
        from ..results import run_facts

        facts = run_facts(shlex.join(["minengine", *args.typed]))
        _write(args.out, json.dumps({**facts, **line, "definitions": {name: list(about) for name, about in DEFINITIONS.items()}}, indent=1) + "\n")
    if "failures" in line:
        print(_failures(line), file=sys.stderr)
    elif not line["metrics"]["requests"]:
        counted = {**DEFAULTS, **loop}
        print(f"minengine: no request ended within the {counted['duration_s'] - counted['warm_s']:g} s that count; use a longer --duration-s", file=sys.stderr)
    return int(not line["metrics"]["requests"])


def _failures(line: Mapping[str, Any]) -> str:
    failed, of = line["failures"]["requests"], line["counts"]["requests_in"]
    return (f"minengine: {failed} of {of} requests failed; the first: {line['failures']['first']}; how large the pools are is said by "
            "prefill_cached_tokens and cached_tokens")


def _sweep(args: argparse.Namespace) -> int:
    from .sweep import finished, sweep

    asked = points(_yaml(args.sweep, "--sweep"))
    out = Path(args.out or args.sweep.with_suffix(".jsonl"))
    try:
        with progress("sweep", len(asked), "points") as tell:
            lines = sweep(asked, out, processes=args.processes, address=args.cluster, progress=lambda done, of: tell(done))
    except KeyboardInterrupt:
        done = finished(out)
        print(f"\nminengine: interrupted; {sum(key(one) in done for one in asked)} of {len(asked)} points are in {out}; the same command again goes on from "
              "there", file=sys.stderr)
        return 130
    failed = [line for line in lines if "error" in line]
    good = [line for line in lines if "error" not in line]
    names = _different(lines)
    shown = (*names, "gpus", "e2e_tok_s_user", "output_tok_s_gpu", "ttft_s_p50", "in_flight_mean", "hit_rate")
    rows = [shown, *([_shown({**line["deployment"], **line["run"], **line["metrics"], "gpus": line["gpus"]}.get(name)) for name in shown] for line in good)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
    print("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows))
    for line in lines:
        settings = {**line["deployment"], **line["run"]}
        where = ", ".join(f"{name}={settings.get(name)!r}" for name in names)
        if "error" in line:
            print(f"minengine: {where + ': ' if where and not line['error'].startswith(where) else ''}{line['error']}", file=sys.stderr)
        elif "failures" in line:
            print(_failures(line) + (f" ({where})" if where else ""), file=sys.stderr)
    print(f"{len(good)} points in {out}" + (f"; {len(failed)} failed, and are tried again next time" if failed else ""))
    return 2 if failed else 0


def _different(lines: list[dict[str, Any]]) -> list[str]:
    """Settings that are not the same in all points."""
    every = [{**line["deployment"], **line["run"]} for line in lines]
    return [name for name in dict.fromkeys(name for one in every for name in one) if len({json.dumps(one.get(name), sort_keys=True) for one in every}) > 1]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _yaml(path: Path, flag: str) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag}={path}: cannot be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}={path}: is no YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{flag}={path}: {'is empty' if found is None else 'holds no mapping'}; `minengine simulate --help` shows such a file")
    return found


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={path!r}: cannot be written ({error.strerror})") from error
