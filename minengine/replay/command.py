"""`minengine replay`: a trace in a closed loop against the engine, a server behind a URL, the simulator, or the engine and the simulator."""
from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ConfigError
from ..engine_args import EngineArgs
from ..flags import add_engine_flags
from ..progress import progress
from ..workload.closed_loop import GAPS, STARTS, ClosedLoop
from ..workload.metrics import MetricError
from ..workload.opening import open_sessions
from ..workload.report import DEFINITIONS, Slo, few_requests, report, table
from ..workload.scaling import scaled_sessions
from ..workload.traces import Session, Skipped, TraceError
from .checks import TARGETS, check
from .drive import Replay, replay

if TYPE_CHECKING:
    from ..simulate import Deployment

__all__ = ["add_arguments", "run"]

THIS_MACHINE = "this-machine"
PLOTTED = 24  # sessions
TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--trace", default="agentx", metavar="TRACE", help="agentx, mooncake (the ones at hand), generated (agents drawn from a model that "
                        "was fitted to the public ones), or a path: a folder of AgentX sessions, one of them, .jsonl of either format, .csv (default: agentx)")
    parser.add_argument("--target", default="engine", metavar="TARGET", help="engine, in this process; sim, the simulator of one engine with the costs of "
                        "--machine; both; or the URL of an OpenAI-compatible server (default: engine)")
    parser.add_argument("--model", help="of the engine (default: smollm2), or the name to ask a server for (default: the first it lists)")
    loop = parser.add_argument_group("replay")
    loop.add_argument("--concurrency", type=int, default=66, metavar="N", help="live sessions, each with its subagents (default: 66)")
    loop.add_argument("--scale", type=float, default=1.0, metavar="X", help="factor on lengths of prompts and answers (default: 1, as recorded)")
    loop.add_argument("--output-scale", type=float, metavar="X", help="another factor for answers (default: --scale)")
    loop.add_argument("--duration-s", type=float, default=300.0, metavar="S", help="seconds to replay, --warm-s among them (default: 300)")
    loop.add_argument("--warm-s", type=float, default=0.0, metavar="S", help="seconds at the beginning that do not count (default: 0)")
    loop.add_argument("--requests", type=int, metavar="N", help="end when so many have ended (default: only by the time)")
    loop.add_argument("--gap-cap-s", type=float, default=300.0, metavar="S", help="longest gap between requests that is replayed (default: 300)")
    loop.add_argument("--gaps", choices=GAPS, default="recorded", help="think times as recorded, or bounded by the time between two starts")
    loop.add_argument("--start-at", choices=STARTS, default="beginning", help="where the first sessions begin (default: beginning)")
    loop.add_argument("--start-within-s", type=float, default=0.0, metavar="S", help="they begin at moments drawn within this time (default: 0)")
    loop.add_argument("--cold-per-s", type=float, default=0.0, metavar="X", help="requests a second from outside the sessions, with no past (default: 0)")
    loop.add_argument("--cold-tokens", type=int, default=0, metavar="N", help="tokens of each of them, not scaled")
    loop.add_argument("--cold-output-tokens", type=int, default=0, metavar="N", help="tokens of their answers, not scaled")
    loop.add_argument("--seed", type=int, default=0, metavar="N", help="of the order and of all that is drawn (default: 0)")
    loop.add_argument("--skip-bad", action="store_true", help="count malformed lines and sessions, and go on without them")
    slo = parser.add_argument_group("goodput: what a request must not miss")
    slo.add_argument("--slo-ttft-s", type=float, metavar="S", help="time to first token, at most")
    slo.add_argument("--slo-itl-s", type=float, metavar="S", help="inter-token latency, at most")
    slo.add_argument("--slo-e2e-tok-s", type=float, metavar="X", help="output tokens over the whole latency, at least")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write settings, metrics with their definitions, and a record a request")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw a lane a session, with --target both the engine above the simulator (.svg)")
    out.add_argument("--plot-sessions", type=int, metavar="N", help=f"sessions in the drawing, the first ones (default: {PLOTTED})")
    where = parser.add_argument_group("target")
    where.add_argument("--machine", help="whose step costs the simulator takes, by name or path; one that was measured with another model is taken only if it "
                       f"is named here (default: {THIS_MACHINE})")
    where.add_argument("--prefill", type=int, default=0, metavar="N", help="worker processes that only read prompts (default: 0)")
    where.add_argument("--decode", type=int, default=0, metavar="N", help="worker processes that write answers (default: 0, the engine is in this process)")
    where.add_argument("--gpus", type=int, metavar="N", help="that the server at the URL has, for throughput a GPU (default: 1)")
    where.add_argument("--api-key-file", type=Path, metavar="FILE", help="the first line is the key for the URL (default: none)")
    where.add_argument("--timeout", type=float, metavar="S", help=f"seconds for one answer from the URL (default: {TIMEOUT_S:g})")
    add_engine_flags(parser)
    parser.set_defaults(typed=())
    parser.epilog = ("One rank with one CPU thread (the default on a CPU) is replayed on the engine's own clock: seconds that its thread works, and those "
                     "in which it has nothing to do, which pass at once. Anything else takes the wall's time.")


def run(args: argparse.Namespace) -> int:
    """Replay, print the report, write the files; 0, or 1 when the replay ended before its time or every request failed.

    Raises:
        ConfigError: an option that cannot be, a trace that cannot be read, or a server that does not answer.
    """
    try:
        return _run(args)
    except (TraceError, MetricError, OSError) as error:
        raise ConfigError(f"replay: {error}") from error


def _run(args: argparse.Namespace) -> int:
    check(args)
    is_url = args.target not in TARGETS
    limits = {"ttft_s": args.slo_ttft_s, "itl_s": args.slo_itl_s, "e2e_tok_s": args.slo_e2e_tok_s}
    slo = Slo(**limits) if any(limit is not None for limit in limits.values()) else None
    skipped = Skipped() if args.skip_bad else None
    trace, told = open_sessions(args.trace, skip_bad=skipped, seed=args.seed)
    sessions = scaled_sessions(trace, args.scale, args.block_size, args.output_scale)
    options = {"concurrency": args.concurrency, "gap_cap_s": args.gap_cap_s, "gaps": args.gaps, "start_at": args.start_at, "seed": args.seed,
               "start_within_s": args.start_within_s, "cold_per_s": args.cold_per_s, "cold_tokens": args.cold_tokens,
               "cold_output_tokens": args.cold_output_tokens}
    loop = ClosedLoop(sessions, **options)
    engine = None if is_url else _engine_args(args)
    simulated = _deployment(args, engine) if args.target in ("sim", "both") else None
    lengths = f"lengths x {args.scale:g}" + (f", answers x {args.output_scale:g}" if args.output_scale else "")
    print(f"{told}; {lengths}, {args.concurrency} live sessions, gaps of {args.gap_cap_s:g} s at most")
    replays, gpus = [], 1
    if args.target != "sim":
        target, gpus = _url_target(args) if is_url else _engine_target(args, engine)
        replays.append(_replay(args, loop, target))
    if simulated is not None:
        replays.append(_simulated(args, *simulated, sessions, options, slo))
    reports = {one.label: one.metrics or report(one.records, max(one.seconds - args.warm_s, 1e-9), gpus, start_s=args.warm_s, slo=slo) for one in replays}
    print(table(reports))
    for told in (few_requests(reports), *(one.note for one in replays)):
        if told is not None:
            print(told)
    _say(replays, skipped)
    if args.json is not None:
        settings = {"model": target.model if is_url else engine.model, **options, "slo": limits, **(_engine_settings(engine) if engine is not None else {}),
                    **({"deployment": simulated[0].mapping()} if simulated is not None else {})}
        _write_json(args, settings, replays, reports)
    if args.plot is not None:
        from .figure import timelines

        args.plot.write_text(timelines({one.label: one.records for one in replays}, max(one.seconds for one in replays), most=args.plot_sessions or PLOTTED),
                             encoding="utf-8")
    return int(any(one.stopped or one.all_failed for one in replays))


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    given = {name: getattr(args, name) for name in EngineArgs.__dataclass_fields__ if name not in ("model", "seed")}
    engine = EngineArgs(**given, model=args.model or "smollm2", seed=args.seed)
    if engine.num_threads is None and engine.ranks.gpus == 1 and not args.decode:
        from ..machine import device_named

        if device_named(engine.device).type == "cpu":
            engine = replace(engine, num_threads=1)
    return engine


def _engine_target(args: argparse.Namespace, engine: EngineArgs) -> tuple[Any, int]:
    """The engine or the cluster, and how many GPUs, or what stands for them, it has."""
    from .engine import EngineTarget, runs_on_one_thread
    from .wall import FrontTarget

    if args.decode:
        from ..disagg.front import AsyncCluster
        from ..disagg.plan import ClusterArgs

        return FrontTarget(AsyncCluster(engine, ClusterArgs(prefill=args.prefill, decode=args.decode), max_num_waiting=1 << 30)), \
            (args.prefill + args.decode) * engine.ranks.gpus
    if runs_on_one_thread(engine):
        return EngineTarget(engine), 1
    from ..async_llm import AsyncLLM

    return FrontTarget(AsyncLLM.from_engine_args(engine, max_num_waiting=1 << 30)), engine.ranks.gpus


def _url_target(args: argparse.Namespace) -> tuple[Any, int]:
    from .url import UrlTarget

    key = next(iter(args.api_key_file.read_text(encoding="utf-8").split()), None) if args.api_key_file else None
    target = UrlTarget(args.target, args.model, key, TIMEOUT_S if args.timeout is None else args.timeout)
    how = {"tokens": "as token ids, of exactly the trace's lengths", "text": "as text, a common word for each token: the server's own count is reported"}
    early = "" if target.ignores_eos else "; answers may end early, as ignore_eos is unknown there"
    print(f"{target.model} at {args.target}: prompts {how[target.asks]}{early}")
    return target, args.gpus or 1


def _replay(args: argparse.Namespace, loop: ClosedLoop, target: Any) -> Replay:
    with progress(target.label, args.duration_s, "s") as tell:
        return replay(loop, target, args.duration_s, most=args.requests,
                      tell=lambda now_s, ended, failed: tell(now_s, f"{ended} requests ended, {failed} failed"))


def _deployment(args: argparse.Namespace, engine: EngineArgs) -> tuple[Deployment, str | None]:
    """One engine like this one, its scheduler and its pool, and the machine's costs; and why its figures cannot be compared, if so.

    Raises:
        ConfigError: what is not simulated here, or a machine by default that was measured with another model.
    """
    from ..simulate import Deployment
    from ..simulate.machine import machine

    if engine.ranks.gpus > 1 or args.decode or engine.host_tier_bytes or engine.disk_tier_bytes:
        raise ConfigError("target=sim: simulates one engine of one rank and no tier here; use `minengine simulate` for deployments")
    name = args.machine or THIS_MACHINE
    costs = machine(name)
    deployment = Deployment(topology="TP1", machine=name, block_size=engine.block_size, cached_tokens=_pool(engine)[0],
                            max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs,
                            long_prefill_token_threshold=engine.long_prefill_token_threshold)
    priced = getattr(costs, "measured", {"model": deployment.model}).get("model", engine.model)
    if priced == engine.model:
        return deployment, None
    remedy = f"measure this one with: minengine simulate --calibrate --model {engine.model}"
    if args.machine is None:
        raise ConfigError(f"machine={name}: its steps are those of {priced}, and the model is {engine.model}, so the simulator's column could not be compared; "
                          f"{remedy} (or name a machine with --machine, to simulate nevertheless)")
    return deployment, f"NOT COMPARABLE: the simulator's steps are those of {priced} ({name}), and the model is {engine.model}; {remedy}"


def _simulated(args: argparse.Namespace, deployment: Deployment, note: str | None, sessions: Iterable[Session], options: dict[str, Any],
               slo: Slo | None) -> Replay:
    """In virtual time."""
    from ..simulate import simulate

    with progress("simulator", 100, "%") as tell:
        result = simulate(deployment, sessions, duration_s=args.duration_s, warm_s=args.warm_s, slo=slo, progress=lambda share: tell(100 * share), **options)
    return Replay("simulator", result.records, args.duration_s, metrics=result.metrics, note=note)


def _pool(engine: EngineArgs) -> tuple[int, str]:
    """Tokens that the pool of one rank holds, and the format of their rows."""
    from ..machine import device_named, dtype_named, size_pool
    from ..model.weights import open_model

    device = device_named(engine.device)
    dtype = dtype_named(engine.dtype, device)
    config, _ = open_model(engine.model, dtype, device)
    rows = dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    num_blocks, _ = size_pool(engine, config, rows, engine.block_size)
    return num_blocks * engine.block_size, str(rows).removeprefix("torch.")


def _engine_settings(engine: EngineArgs) -> dict[str, Any]:
    """Every option, and what the pool of one rank came to."""
    return {"engine": asdict(engine), **(dict(zip(("pool_tokens", "pool_rows"), _pool(engine))) if engine.ranks.gpus == 1 else {})}


def _say(replays: list[Replay], skipped: Skipped | None) -> None:
    """What went wrong, on stderr."""
    if skipped is not None and skipped.count:
        print(f"minengine: {skipped.count} malformed parts of the trace were passed over; the first: {skipped.first[0]}", file=sys.stderr)
    for one in replays:
        errors = [r.error for r in one.records if r.error is not None]
        if errors:
            print(f"minengine: {len(errors)} requests to the {one.label} failed; the first: {errors[0]}", file=sys.stderr)
        if one.stopped:
            print(f"minengine: the replay ended after {one.seconds:.0f} s: {one.stopped}", file=sys.stderr)


def _write_json(args: argparse.Namespace, options: dict[str, Any], replays: list[Replay], reports: dict[str, dict[str, float | None]]) -> None:
    from ..results import run_facts

    own = ("trace", "target", "scale", "duration_s", "warm_s", "requests", "skip_bad", "block_size", "prefill", "decode", "gpus")
    settings = {**{name: getattr(args, name) for name in own}, "output_scale": args.output_scale or args.scale, **options}
    text = {**run_facts(f"minengine {shlex.join(args.typed)}"), "settings": settings,
            "definitions": {name: {"unit": unit, "definition": what} for name, (unit, what) in DEFINITIONS.items()},
            "replays": [{"label": one.label, "seconds": one.seconds, "stopped": one.stopped, "note": one.note, "metrics": reports[one.label],
                         "records": [asdict(record) for record in one.records]} for one in replays]}
    args.json.write_text(json.dumps(text, default=str) + "\n", encoding="utf-8")
