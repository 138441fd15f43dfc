"""How a measurement is taken: every variant in a process of its own, there and back (A B B A), on a machine whose other load is noted.

A variant is a function `module:name` that returns a JSON-able dict. It runs through `bench.child`, in any Python that has
its packages, so peers with environments of their own are measured the same way. This process never imports torch: it stays
small, takes no core, and its memory cannot be mistaken for a child's.
"""
from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Mapping, Sequence

__all__ = ["Bench", "BenchError", "Run", "Variant", "host_facts"]

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"


class BenchError(RuntimeError):
    """A variant that failed; the message names it and ends with what it printed last."""


@dataclass(frozen=True)
class Variant:
    name: str
    call: str  # "module:function"
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the function
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 900.0  # what it may take


@dataclass(frozen=True)
class Run:
    """One process, from spawn to exit."""

    variant: str
    result: dict[str, Any]
    wall_s: float
    cpu_s: float  # user and system time of the process and the children it waited for
    max_rss_bytes: int
    foreign_cores: float | None  # cores kept busy by everybody else, and by grandchildren that nobody waited for; None where the system does not say


class Bench:
    """Runs variants and keeps every run for the report."""

    def __init__(self, threads: int = 2, out: Path = OUT, log=lambda text: print(text, file=sys.stderr, flush=True)) -> None:
        self.threads = threads
        self.out = out
        self.log = log
        self.runs: list[Run] = []
        out.mkdir(parents=True, exist_ok=True)

    def there_and_back(self, variants: Sequence[Variant], rounds: int = 1) -> dict[str, list[dict[str, Any]]]:
        """A B B A: each variant runs first as often as last, so that a drift of the machine favours nobody.

        Returns:
            the results of each variant, in the order taken.
        """
        results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
        for _ in range(rounds):
            for variant in (*variants, *reversed(variants)):
                results[variant.name].append(self.run(variant).result)
        return results

    def run(self, variant: Variant) -> Run:
        """
        Raises:
            BenchError: the process failed or ran longer than its limit.
        """
        with tempfile.TemporaryDirectory() as folder:
            answer, printed = Path(folder) / "result.json", Path(folder) / "printed"
            options = {"threads": self.threads, **variant.options}
            spec = {"call": variant.call, "options": options, "spawned_s": time.time(), "result": str(answer)}
            env = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), **variant.env}
            busy, start = _busy_s(), time.perf_counter()
            with open(printed, "wb") as sink:
                child = subprocess.Popen([variant.python, "-m", "bench.child", json.dumps(spec)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                                         stdout=sink, stderr=subprocess.STDOUT)
                alarm = threading.Timer(variant.limit_s, child.kill)
                alarm.start()
                _, status, usage = os.wait4(child.pid, 0)
                alarm.cancel()
                child.returncode = os.waitstatus_to_exitcode(status)
            wall_s = time.perf_counter() - start
            if child.returncode or not answer.is_file():
                tail = printed.read_text(errors="replace").strip().splitlines()[-15:]
                raise BenchError("\n".join([f"{variant.name} ended with exit code {child.returncode}; it printed last:", *tail]))
            cpu_s = usage.ru_utime + usage.ru_stime
            foreign = None if busy is None else max(0.0, (_busy_s() - busy - cpu_s) / wall_s)
            scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB elsewhere
            run = Run(variant.name, json.loads(answer.read_text()), wall_s, cpu_s, usage.ru_maxrss * scale, foreign)
        self.runs.append(run)
        self.log(f"  {variant.name}: {wall_s:.1f} s" + ("" if foreign is None else f", {foreign:.2f} cores busy with something else"))
        return run


def _busy_s() -> float | None:
    """Core-seconds that this machine has worked since it started, from Linux's own count."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, idle, iowait, *rest = (int(x) for x in stat.readline().split()[1:9])
    except OSError:
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def host_facts() -> dict[str, Any]:
    """What the figures depend on: machine, versions, and the commit with its dirty flag."""
    def git(*args: str) -> str | None:
        try:
            return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cpu": _cpu_name(), "cores": os.cpu_count(), "machine": platform.machine(), "system": platform.platform(),
        "python": platform.python_version(), **{name: installed(name) for name in ("torch", "transformers", "numpy")},
        "commit": git("rev-parse", "--short=12", "HEAD"), "dirty": None if changes is None else bool(changes),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            facts = dict([part.strip() for part in line.split(":", 1)] for line in info if ":" in line)
    except OSError:
        return platform.processor()
    return f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family')}, model {facts.get('model')})"
