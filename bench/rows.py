"""What four bits a value cost a CPU: a decode step of glm-mini over 4-bit rows against 16-bit ones, and quantising what is appended.

Two engines of the same weights and prompts take turns, step by step, in one process.
"""
from __future__ import annotations

import time
from typing import Any

from .harness import Bench, Variant
from .table import Row, at_most, figure, ratio

BATCH, CONTEXT, STEPS, WARM_UP_STEPS = 16, 4096, 40, 4
CHUNK = 512  # tokens of a prefill step
DTYPES = ("bfloat16", "nvfp4_fp8_ds_mla")


def rows(bench: Bench) -> list[Row]:
    steps = bench.run(Variant("glm-mini's rows", "bench.rows:steps")).result
    paths = bench.run(Variant("native and staged attention", "bench.rows:attention_paths")).result
    at = f"glm-mini, {BATCH} requests x {CONTEXT:,} tokens"
    wide, narrow = (steps[dtype] for dtype in DTYPES)
    return [
        ratio(f"decode step over 4-bit rows against 16-bit ones: {at}", narrow["decode_ms"], wide["decode_ms"], at_most(1.5), "ms"),
        figure("quantising rows and index keys, share of a 4-bit prefill step", narrow["quantise_percent"], at_most(3.0), "%",
               f"chunks of {CHUNK} tokens, of the first {CONTEXT:,} of each prompt"),
        ratio("attention over the chosen 4-bit rows, native against staged", paths["native_ms"], paths["staged_ms"], at_most(1.0), "ms",
              f"{BATCH} queries x {paths['chosen']} rows x {paths['heads']} heads, the same rows"),
    ]


def _engine(threads: int, kv_cache_dtype: str):
    from minengine import LLM

    return LLM("glm-mini", device="cpu", dtype="float32", num_threads=threads, kv_cache_dtype=kv_cache_dtype, max_num_seqs=BATCH,
               max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False).llm_engine


def _ids(seed: int) -> list[int]:
    import numpy as np

    from minengine.workload.recall import Recall

    return Recall().episode(np.random.default_rng(seed), CONTEXT, 64, 1).context.tolist()


class _Stopwatch:
    """Adds up the time spent in a function."""

    def __init__(self, call) -> None:
        self.call, self.spent_s = call, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = self.call(*args, **options)
        self.spent_s += time.perf_counter() - start
        return out


def steps(threads: int) -> dict[str, Any]:
    from minengine import SamplingParams

    engines = {dtype: _engine(threads, dtype) for dtype in DTYPES}
    samples: dict[str, dict[str, list[float]]] = {dtype: {"decode_ms": [], "quantise_percent": []} for dtype in DTYPES}
    for dtype, engine in engines.items():
        writes = engine.kv.write, engine.kv.write_indexer = _Stopwatch(engine.kv.write), _Stopwatch(engine.kv.write_indexer)
        for seed in range(BATCH):
            engine.add_request(str(seed), {"prompt_token_ids": _ids(seed)}, SamplingParams(max_tokens=2 * CONTEXT, temperature=0.0, ignore_eos=True))
        while any(r.num_tokens - r.num_computed_tokens > 1 for r in engine.requests.values()):
            before, start = sum(w.spent_s for w in writes), time.perf_counter()
            engine.step()
            samples[dtype]["quantise_percent"].append((sum(w.spent_s for w in writes) - before) / (time.perf_counter() - start) * 100)
    for _ in range(STEPS + WARM_UP_STEPS):
        for dtype, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            samples[dtype]["decode_ms"].append((time.perf_counter() - start) * 1e3)
    return {dtype: {**kept, "decode_ms": kept["decode_ms"][WARM_UP_STEPS:]} for dtype, kept in samples.items()}


def attention_paths(threads: int) -> dict[str, Any]:
    """Attention alone, over one layer's rows of that engine's shape, each path on the same list."""
    import torch

    from minengine.kv.rows import row_format
    from minkernels.sparse_mla import sparse_mla_decode

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    config = _engine(threads, DTYPES[1]).config
    rank, rope, chosen, heads = config.kv_lora_rank, config.qk_rope_head_dim, config.index_topk, config.num_attention_heads
    blocks, size = BATCH * CONTEXT // 64, 64
    fmt = row_format(DTYPES[1], rank, rope)
    pages = fmt.quantize(torch.randn(blocks, size, rank, generator=generator), torch.randn(blocks, size, rope, generator=generator))
    q = torch.randn(BATCH, heads, rank + rope, generator=generator) * (rank + rope) ** -0.5
    slots = torch.stack([torch.randperm(CONTEXT, generator=generator)[:chosen] + i * CONTEXT for i in range(BATCH)])
    samples: dict[str, list[float]] = {"native_ms": [], "staged_ms": []}
    with torch.inference_mode():
        for _ in range(STEPS + WARM_UP_STEPS):
            for path in ("native", "staged"):
                start = time.perf_counter()
                sparse_mla_decode(q, pages, slots, rank, DTYPES[1], path=path, backend="torch")
                samples[f"{path}_ms"].append((time.perf_counter() - start) * 1e3)
    return {name: values[WARM_UP_STEPS:] for name, values in samples.items()} | {"chosen": chosen, "heads": heads}
