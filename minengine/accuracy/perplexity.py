"""Perplexity through the cache: every token is scored from rows that were written, and read back, in the engine's format."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..llm import LLM
from ..model.batch import Batch, PrefillChunk
from ..workload.texts import TEXTS, paragraphs
from .bootstrap import Outcomes

__all__ = ["perplexity", "token_nll"]

CHUNK = 256  # tokens scored together: their logits are 50 MB with smollm2's vocabulary


def perplexity(llm: LLM, window: int = 512, windows: int | None = None) -> Outcomes:
    """Nats a token of the public-domain texts, window by window; exp(mean) is the perplexity.

    Windows follow each other through both texts without overlap; a window's first token is given, the others are scored, each
    given those before it. A window is a context, with one outcome: the mean of its window - 1 tokens.

    Args:
        llm: a model with a tokenizer, idle; its prefix cache is emptied.
        windows: take the first few only.

    Raises:
        ValueError: a window longer than the texts or than the engine's cache.
    """
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("\n\n".join(text for name in TEXTS for text in paragraphs(name)), add_special_tokens=False)
    pieces = [ids[start: start + window] for start in range(0, len(ids) - window + 1, window)][:windows]
    if not pieces or window < 2:
        raise ValueError(f"window={window}: use 2 to {len(ids)} tokens, the texts' length")
    return Outcomes.of([float(token_nll(llm, piece).mean()) for piece in pieces], 1)


@torch.inference_mode()
def token_nll(llm: LLM, ids: Sequence[int]) -> Tensor:
    """-log p(token | tokens before it) of all tokens but the first: (T - 1,) float64.

    The rows go into the pool's first blocks, as a request's would, chunk by chunk; a token attends to what the cache gives back, its own row included.

    Raises:
        ValueError: the pool or the model's positions cannot hold the tokens, or the engine is at work.
    """
    engine = llm.llm_engine
    kv, model, total = engine.kv, engine.model, len(ids)
    if engine.has_unfinished_requests():
        raise ValueError("token_nll: the engine has requests in its cache; let them finish first")
    if total > min(engine.pool.num_blocks * kv.block_size, engine.max_model_len):
        raise ValueError(f"{total} tokens do not fit: the cache holds {engine.pool.num_blocks * kv.block_size}, a request {engine.max_model_len}")
    engine.reset_prefix_cache()  # its blocks are overwritten
    tokens = torch.tensor(ids, device=kv.device)
    blocks = torch.arange(-(-total // kv.block_size), device=kv.device)
    found = []
    for start in range(0, total, CHUNK):
        at = torch.arange(start, min(start + CHUNK, total), device=kv.device)  # positions, and slots: block i holds the i-th tokens
        chunk = PrefillChunk(0, len(at), start, blocks[: -(-(start + len(at)) // kv.block_size)])
        hidden = model.forward(Batch(tokens[at], at, at, at[:0], prefills=[chunk]), kv)  # (n, hidden)
        scored = min(len(at), total - 1 - start)  # the last token has nothing after it
        if scored > 0:
            logits = model.logits(hidden[:scored]).double()
            found.append(torch.nn.functional.cross_entropy(logits, tokens[start + 1: start + 1 + scored], reduction="none"))
    return torch.cat(found).cpu()
