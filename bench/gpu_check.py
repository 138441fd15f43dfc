"""`make gpu-check`: what a card shows. First the tests that need one, then the kernels' times; one file under `book/results/`.

Runs from a bare checkout: torch, Triton, numpy and pytest will do. It needs no network and no model but those of this repository.
"""
from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minengine.arithmetic import Card, decode_floor
from minengine.workload.stats import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "book" / "results"
COMMAND = "make gpu-check"
PATHS = ("native", "staged", "fp8")
CLAIMS = {"native": "kernel_native_us", "staged": "kernel_staged_us", "fp8": "kernel_fp8_us"}  # of the source's point


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: book/results)")
    parser.add_argument("--commit", help="the repository's commit in 40 hexadecimal digits, where there is no git to ask")
    parser.add_argument("--only", choices=("tests", "times"), help="leave the other half out; no file is written without both")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device; run it on a GPU box with a CUDA build of torch", file=sys.stderr)
        return 1
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not re.fullmatch("[0-9a-f]{40}", commit):
        parser.error(f"--commit='{commit}': this folder has no git history that says what is measured; give the commit in 40 hexadecimal digits")
    start = time.monotonic()
    if args.only != "times":
        tests = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf8")]
        if failed := subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests], cwd=ROOT).returncode:
            print("gpu-check: the card computes something wrong, so its times say nothing; none was taken", file=sys.stderr)
            return failed
    if args.only == "tests":
        return 0
    measurements = measure(log=lambda text: print(text, flush=True))
    found = targets(measurements, has_convert=torch.cuda.get_device_capability()[0] == 10)
    print("\n" + "\n".join(found))
    if args.only is None:
        print(f"\nwritten: {write(args.out, torch.cuda.get_device_name(), commit, measurements)}")
    print(f"{time.monotonic() - start:.0f} s")
    return 0


def measure(log) -> dict[str, dict[str, Any]]:
    """{name: measurement}: the card's own rates, then every case by every path, each with its floor."""
    from .gpu_kernels import CASES, POINT, TOP_K, Pool, flash_mla
    from .gpu_timing import copy_bandwidth, matrix_rate

    found: dict[str, dict[str, Any]] = {}

    def keep(name: str, what: str, unit: str, samples: list[float], scale: float = 1.0, claim: str | None = None) -> float:
        s = summary([sample * scale for sample in samples])
        found[name] = {"name": name, "what": what, "unit": unit, "n": s.n, "median": s.median, "spread": [s.low, s.high], "claim": claim}
        log(f"{name:72} {s.median:10.2f} {unit} ({s.low:.2f} to {s.high:.2f})")
        return s.median

    moved = keep("copy bandwidth", "Bytes a second of a copy in the card's memory, read and written", "TB/s", copy_bandwidth(), 1e-12)
    computed = keep("matrix rate", "Of a product of float16 matrices of 8,192", "TFLOP/s", matrix_rate(), 1e-12)
    card = Card("this card, measured", 1e12 * moved, 1e12 * computed, COMMAND)
    pool = Pool()
    for case in CASES:
        for path in PATHS:
            samples = pool.samples(case, path)
            claim = CLAIMS[path] if case == POINT else None
            keep(f"{path}: {case.name}", "One launch of sparse MLA decode attention, in a CUDA graph", "µs", samples, 1e6, claim)
            floor = decode_floor(path, card, case.tokens, case.heads, TOP_K, case.fill).time_s
            keep(f"{path}, share of its floor: {case.name}", "Floor over time: bytes over the copy bandwidth, operations over the matrix rate",
                 "", [floor / sample for sample in samples])
        peer = flash_mla(pool, case)
        if isinstance(peer, str):
            log(f"  {peer}")
        else:
            keep(f"FlashMLA: {case.name}", "One launch of FlashMLA's sparse decode on 656-byte rows", "µs", peer, 1e6)
    return found


def targets(found: dict[str, dict[str, Any]], has_convert: bool) -> list[str]:
    """The targets of this project, each met or missed by how much; `has_convert`: the card turns E2M1 into float16 by an instruction."""
    def median(path: str, case: str) -> float:
        return found[f"{path}: {case}"]["median"]

    point, many, quarter = ("15 tokens, 16 heads, 100% full, cold L2", "256 tokens, 16 heads, 100% full, cold L2",
                            "256 tokens, 16 heads, 25% full, cold L2")
    judged = [
        ("native over staged at 15 tokens", median("native", point) / median("staged", point), 0.68 if has_convert else 0.75, True),
        ("native over fp8 at 15 tokens", median("native", point) / median("fp8", point), 0.9 if has_convert else 1.1, True),
        ("native over fp8 at 256 tokens", median("native", many) / median("fp8", many), 0.8, True),
        ("native's share of its floor at 256 tokens", found[f"native, share of its floor: {many}"]["median"], 0.6, False),
        ("a list 25% full over a full one, native, 256 tokens", median("native", quarter) / median("native", many), 0.45, True),
    ]
    return [f"{'met   ' if (value <= limit if at_most else value >= limit) else 'MISSED'} {what}: {value:.3f}, target at {'most' if at_most else 'least'} {limit}"
            for what, value, limit, at_most in judged]


def write(folder: Path, card: str, commit: str, measurements: dict[str, dict[str, Any]]) -> Path:
    """One file a card; names begin with the card's, since they must be unique over all files."""
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    path = folder / f"gpu-{slug}.json"
    run = {
        "machine": card, "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "triton")}},
        "commit": commit, "command": COMMAND, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "measurements": [{**one, "name": f"{slug}/{one['name']}"} for one in measurements.values()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    return path


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
