"""`minengine toolcheck`: the suite from a terminal."""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shlex
import sys
import threading
from pathlib import Path
from typing import Sequence

from ..config import ConfigError
from ..results import run_facts
from .case import Case
from .cases import CATEGORIES, all_cases, select
from .client import Client, NoAnswer
from .own_server import own_server
from .run import Outcome, run, save, table

__all__ = ["add_arguments", "toolcheck"]

SHOWN = 10  # failing cases printed whole; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 (default: start one of its own)")
    parser.add_argument("--model", metavar="NAME", help="the name to ask for (default: the first listed), or what its own server loads (default: smollm2)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key a line, as the server's own; the first one is sent (default: none)")
    parser.add_argument("--tool-call-parser", choices=("glm", "llama"), help="of its own server (default: by its model)")
    parser.add_argument("--serve-flags", default="", metavar="FLAGS", help="more flags for its own server, as one text")
    parser.add_argument("--only", metavar="CATEGORY,...", help=f"of {', '.join(CATEGORIES)} (default: all)")
    parser.add_argument("--cases", type=int, metavar="N", help="so many, spread evenly (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the sampled cases (default: 0)")
    parser.add_argument("--list", action="store_true", help="print every case and what it checks, and send nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict, and the failing requests and answers")
    parser.add_argument("--concurrency", type=int, metavar="N", default=8, help="requests at a time (default: 8)")
    parser.add_argument("--max-tokens", type=int, metavar="N", default=160, help="of an answer, where the case does not say (default: 160)")
    parser.add_argument("--timeout", type=float, metavar="S", default=120.0, help="seconds for one answer (default: 120)")


def toolcheck(args: argparse.Namespace) -> int:
    """Run it; 0 when nothing failed, 1 when something did.

    Raises:
        ConfigError: an option that cannot be, or a server that does not answer.
    """
    try:
        cases = select(all_cases(args.seed), args.only.split(",") if args.only else (), args.cases)
        if args.list:
            print("\n".join(f"{case.id}: {case.checks}" for case in cases))
            return 0
        return _run(args, cases)
    except (ValueError, NoAnswer, OSError) as error:
        raise ConfigError(f"toolcheck: {error}") from error


def _run(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError("jsonschema is missing, and arguments are judged by it; install it with `pip install 'minengine[serve]'`")
    key = _first_key(args.api_key_file) if args.api_key_file else None
    if args.json:
        args.json.touch()  # what cannot be written is known before the run, not after it
    flags = [*shlex.split(args.serve_flags), *(["--tool-call-parser", args.tool_call_parser] if args.tool_call_parser else [])]
    if args.base_url and flags:
        raise ValueError("tool_call_parser, serve_flags: are of a server that it starts; leave them out beside --base-url")
    server = contextlib.nullcontext(args.base_url) if args.base_url else own_server(args.model or "smollm2", flags)
    with server as url:
        client = Client(url, key, args.timeout)
        names = client.models()
        model = args.model if args.base_url and args.model else names[0]
        if model not in names:
            raise ValueError(f"model={model}: the server lists {', '.join(names)}; use one of these")
        outcomes = run(cases, client, model, max_tokens=args.max_tokens, concurrency=args.concurrency, progress=_Progress(len(cases)))
    print(table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.verdict.kind != "ok"]
    checks = {case.id: case.checks for case in cases}
    for outcome in failed[:SHOWN]:
        print(f"\n{outcome.verdict.kind}: {outcome.id} ({checks[outcome.id]})\n  {outcome.verdict.detail}")
        print(f"  request: {json.dumps(outcome.request, ensure_ascii=False)}")
    if len(failed) > SHOWN:
        print(f"\nand {len(failed) - SHOWN} more; --json FILE writes all")
    if args.json:
        command = f"minengine toolcheck --seed {args.seed} --max-tokens {args.max_tokens}" + (f" --serve-flags={shlex.quote(shlex.join(flags))}" if flags else "")
        save(args.json, outcomes, model=model, flags=flags, seed=args.seed, max_tokens=args.max_tokens, **run_facts(command))
    return 1 if failed else 0


def _first_key(path: Path) -> str:
    """Of a file as `minengine serve` takes it: one key a line, `#` begins a comment line."""
    lines = map(str.strip, path.read_text(encoding="utf-8-sig").splitlines())
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise ValueError(f"api_key_file={path}: holds no key; write one a line")
    return key


class _Progress:
    """One line on a terminal's stderr; silent elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.failed, self.lock = total, 0, 0, threading.Lock()

    def __call__(self, outcome: Outcome) -> None:
        with self.lock:
            self.done += 1
            self.failed += outcome.verdict.kind != "ok"
            if sys.stderr.isatty():
                end = "\n" if self.done == self.total else ""
                print(f"\r{self.done} of {self.total} cases, {self.failed} failed", end=end, file=sys.stderr, flush=True)
