"""One step's work as tensors: what the runner hands to a model.

Tokens of all requests lie end to end. Requests that decode (one token each) come first, so that their
attention is one batched call; prefill chunks follow, each a contiguous run of tokens.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Batch", "PrefillChunk"]


@dataclass(slots=True)
class PrefillChunk:
    """A run of tokens of one request: rows `start:end` of the batch, after `context_len` cached tokens."""

    start: int
    end: int
    context_len: int  # tokens whose KV is in the cache already
    block_ids: Tensor  # (ceil((context_len + end - start) / block_size),) int64


@dataclass(slots=True)
class Batch:
    input_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    slots: Tensor  # (T,) int64: block * block_size + offset, where each token's row is written
    logits_indices: Tensor  # (S,) int64: the tokens whose logits are sampled
    num_decodes: int = 0  # D: the first D tokens are decodes
    decode_block_tables: Tensor | None = None  # (D, M) int64, padded with block 0
    decode_seq_lens: Tensor | None = None  # (D,) int64, the new token included
    max_decode_len: int = 0  # max of decode_seq_lens, known without a device sync
    prefills: list[PrefillChunk] = field(default_factory=list)
    scratch: dict = field(default_factory=dict)  # what layers of one step share: attention masks, the last top-k
