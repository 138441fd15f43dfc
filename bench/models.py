"""The engines under test, set up alike: smollm2's weights in float32, on the CPU, with a given number of threads. Imported by children only."""
from __future__ import annotations

from typing import Any

from .export_hf import export
from .harness import OUT

__all__ = ["HF_DIRECTORY", "KV_BYTES", "ours", "prepare_peers", "transformers_model"]

HF_DIRECTORY = OUT / "smollm2"
KV_BYTES = 1 << 30  # for 32 requests at once: what every engine that asks is given


def prepare_peers(threads: int) -> dict[str, Any]:
    """Write the directory that peers load, so that no variant's time holds it."""
    return {"directory": str(export(HF_DIRECTORY))}


def ours(threads: int, **options: Any):
    """A `minengine.LLM`."""
    from minengine import LLM

    return LLM("smollm2", device="cpu", dtype="float32", num_threads=threads, **options)


def transformers_model(threads: int):
    """A `LlamaForCausalLM` with the attention that transformers chooses by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(HF_DIRECTORY, dtype=torch.float32).eval()
