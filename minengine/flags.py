"""Command-line flags from the fields of a dataclass: what a field is called, takes and defaults to is said once, there."""
from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, Mapping, Sequence

from .config import HEAD_DTYPES, KV_CACHE_LAYOUTS, LATENT_DTYPES
from .engine_args import EngineArgs

__all__ = ["add_engine_flags", "add_flags"]

ENGINE_HELP = {
    "dtype": "of weights and activations (default: auto, float32 on a CPU and bfloat16 on CUDA)",
    "device": "cpu, cuda or cuda:N (default: auto, CUDA where torch sees it)",
    "kv_cache_dtype": f"format of the cache's rows: of a latent {', '.join(LATENT_DTYPES)}; of heads {', '.join(HEAD_DTYPES)}, or K's and V's apart as in "
                      "q8_0:q4_0 (default: auto, as --dtype)",
    "kv_cache_layout": "order in memory of layers (L), blocks (B), heads (H), tokens (N) and the bytes of a row (C)",
    "block_size": "tokens of a block, a power of two from 16 to 1024",
    "kv_cache_memory_bytes": "the cache's size (default: what max_num_seqs requests of max_model_len take, 256 MiB at most)",
    "num_gpu_blocks_override": "the cache's size in blocks, on a CPU too (default: by --kv-cache-memory-bytes)",
    "max_model_len": "tokens of a request, prompt and answer (default: the model's positions, or as many as the cache holds)",
    "max_num_batched_tokens": "tokens of one step",
    "max_num_seqs": "requests that run at once",
    "long_prefill_token_threshold": "tokens of one prompt in a step; 0 for no limit",
    "enable_prefix_caching": "keep the blocks of ended requests for those that begin alike",
    "enforce_eager": "on CUDA, run decode steps without CUDA graphs",
    "attention_backend": "triton's kernels or torch (default: auto, triton on CUDA for rows that the kernels read)",
    "load_admission": "when the KV of a request is loaded and noticed: poll, between steps; event, at once",
    "kv_load_failure_policy": "a request whose KV cannot be loaded: recompute it, or fail it",
    "kv_transfer": "from prefill to decode: pull, by the decoder once all is computed; push_layers, by prefill layer by layer",
    "kv_lease_s": "seconds that prefill keeps a request's blocks for its decoder",
    "kv_transfer_timeout_s": "seconds that moving a request's KV may take, until it is computed again",
    "host_tier_bytes": "size of the cache tier in host memory; 0 for none",
    "disk_tier_bytes": "size of the cache tier on disk; 0 for none",
    "tier_path": "folder of the tiers (default: one of this user's own)",
    "topology": "several ranks as one engine: TP4, TEP4, DEP4, TP4+DCP2 (default: what the next four come to)",
    "tensor_parallel_size": "ranks that split attention by heads",
    "data_parallel_size": "ranks that run attention for different requests; with --enable-expert-parallel",
    "enable_expert_parallel": "spread whole experts over the ranks",
    "decode_context_parallel_size": "of the tensor-parallel ranks, those that split the cached sequence",
    "num_threads": "CPU threads of torch, all ranks together (default: torch's choice)",
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of EngineArgs but the model and the seed, which mean something else to each command."""
    choices = {"dtype": ("auto", "float32", "bfloat16"), "kv_cache_layout": KV_CACHE_LAYOUTS, "attention_backend": ("auto", "torch", "triton"),
               "load_admission": ("poll", "event"), "kv_load_failure_policy": ("recompute", "fail"), "kv_transfer": ("pull", "push_layers")}
    add_flags(parser.add_argument_group("engine"), EngineArgs, ENGINE_HELP, choices)


def add_flags(group: Any, kind: type, about: Mapping[str, str], choices: Mapping[str, Sequence[str]] | None = None) -> None:
    """A flag for each field of `kind` that `about` describes. `choices` are shown only: what a field takes is for `kind` to check, in its own words."""
    for f in fields(kind):
        if f.name not in about:
            continue
        flag, told = "--" + f.name.replace("_", "-"), about[f.name]
        if isinstance(f.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=f"{told} (default: {'on' if f.default else 'off'})")
            continue
        convert = next((known for known in (int, float) if known.__name__ in str(f.type)), str)
        shown = "{%s}" % ",".join(choices[f.name]) if choices and f.name in choices else {int: "N", float: "S"}.get(convert, f.name.split("_")[-1].upper())
        group.add_argument(flag, type=convert, default=f.default, metavar=shown, help=told if "(default: " in told else f"{told} (default: {f.default})")
