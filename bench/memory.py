"""Row 7: what a process costs. Peak memory of `minengine generate`, the pool against what was asked for, the time to import."""
from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from .harness import Bench, Variant
from .table import Row, at_most, figure

PROCESSES = 3
PROMPT = "The capital of France is"
POOLS = [(64 << 20, dtype, layout) for dtype in ("float32", "bfloat16", "fp8", "nvfp4", "q8_0", "q4_0") for layout in ("LBNHC", "BLHNC")]


def rows(bench: Bench) -> list[Row]:
    peaks = [bench.run(Variant("minengine generate", "bench.memory:generate")).result["max_rss_gb"] for _ in range(PROCESSES)]
    pools = bench.run(Variant("pool sizes", "bench.memory:pools")).result["of_asked"]
    imports = [bench.run(Variant("import", "bench.memory:import_seconds")).result for _ in range(PROCESSES)]
    return [
        figure("peak memory of `minengine generate`, smollm2, float32", peaks, at_most(1.3), "GB", "GB of 1e9 bytes; torch included"),
        figure("KV pool, largest share of the bytes asked for", [max(pools)], at_most(1.0), "", f"{len(pools)} row formats and layouts"),
        figure("import minengine, beyond torch", [r["minengine_s"] for r in imports], at_most(0.3), "s"),
        figure("from minengine import LLM, beyond torch", [r["llm_s"] for r in imports], None, "s"),
    ]


def generate(threads: int) -> dict[str, Any]:
    """The command itself, as a child of this small process; the system reports its peak."""
    command = [sys.executable, "-m", "minengine.cli", "generate", PROMPT, "--device", "cpu", "--dtype", "float32", "--num-threads", str(threads),
               "--max-tokens", "64"]
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"minengine generate ended with exit code {child.returncode}")
    return {"max_rss_gb": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9}


def pools(threads: int) -> dict[str, Any]:
    """Bytes of the pool over the bytes asked for, for each format and layout; an odd amount, which no whole number of blocks fills."""
    from minengine import EngineArgs, LLMEngine
    from minengine.model.decoder import load_model

    model = load_model("smollm2")
    shares = []
    for asked, dtype, layout in POOLS:
        args = EngineArgs(device="cpu", kv_cache_dtype=dtype, kv_cache_layout=layout, kv_cache_memory_bytes=asked + 12345)
        shares.append(LLMEngine(args, model=model).kv.nbytes / args.kv_cache_memory_bytes)
    return {"of_asked": shares}


def import_seconds(threads: int) -> dict[str, Any]:
    """In an interpreter that has imported nothing of ours: this module has."""
    code = ("import torch, time; a = time.perf_counter(); import minengine; b = time.perf_counter(); minengine.LLM; c = time.perf_counter(); "
            "print(b - a, c - a)")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"minengine_s": float(printed[0]), "llm_s": float(printed[1])}
