"""Options of a replay that cannot be, or that its target would ignore, are refused before anything begins."""
from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ..config import ConfigError
from ..engine_args import EngineArgs

__all__ = ["TARGETS", "check", "demand_writable"]

TARGETS = ("engine", "sim", "both")
EVERYWHERE = {"model", "seed", "block_size"}  # of an engine's options, those that mean something for a server too


def check(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: the option, what is wrong with it, and the remedy.
    """
    def demand(ok: bool, name: str, remedy: str) -> None:
        if not ok:
            value = getattr(args, name)
            raise ConfigError(f"{name}={str(value) if isinstance(value, Path) else value!r}: {remedy}")

    is_url = args.target not in TARGETS
    demand(not is_url or "://" in args.target, "target", f"use {', '.join(TARGETS)} or a URL such as http://127.0.0.1:8000")
    if not 0 <= args.warm_s < args.duration_s < float("inf"):
        raise ConfigError(f"duration_s={args.duration_s!r}, warm_s={args.warm_s!r}: use a time, and less of it for warming up")
    for name in ("requests", "plot_sessions", "gpus"):
        demand(getattr(args, name) is None or getattr(args, name) >= 1, name, "use a whole number, 1 or more")
    needs = {"gpus": (is_url, "--target URL"), "api_key_file": (is_url, "--target URL"), "timeout": (is_url, "--target URL"),
             "machine": (args.target in ("sim", "both"), "--target sim or both"), "plot_sessions": (args.plot is not None, "--plot"),
             "cold_tokens": (args.cold_per_s != 0, "--cold-per-s"), "cold_output_tokens": (args.cold_per_s != 0, "--cold-per-s")}
    for name, (is_there, what) in needs.items():
        demand(is_there or getattr(args, name) in (None, 0), name, f"does nothing without {what}; leave it out or add that")
    if is_url:
        own = {one.name: one.default for one in fields(EngineArgs) if one.name not in EVERYWHERE} | {"prefill": 0, "decode": 0}
        for name, default in own.items():
            demand(getattr(args, name) == default, name, "is an engine's, and the target is a server: start that with it, and leave it out here")
    demand(not args.prefill or bool(args.decode), "prefill", "needs decode=1 or more: somebody has to write the answers")
    demand(args.plot is None or args.plot.suffix == ".svg", "plot", "is drawn as SVG; use a name that ends in .svg")
    for name in ("json", "plot"):
        if getattr(args, name) is not None:
            demand_writable(name, getattr(args, name))


def demand_writable(name: str, path: Path) -> None:
    """What cannot be written is known before the replay, not after it. Leaves nothing behind.

    Raises:
        ConfigError: it cannot be written.
    """
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{name}={str(path)!r}: cannot be written ({error.strerror}); name a file in a folder that is there") from error
    if not was_there:
        path.unlink()
