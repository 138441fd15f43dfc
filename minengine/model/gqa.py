"""Grouped-query attention (Ainslie et al. 2023) over a paged cache: G query heads share each key/value head.

Queries attend to what the cache gives back, their own token's row included, so a quantised cache is quantised for
everybody, and a prompt gives the same numbers however it is cut into chunks.

Shapes: T tokens, Hq query heads, H key/value heads, G = Hq / H, d head_dim, D decodes, r decodes of a run, n tokens of a
chunk, S visible tokens, N block_size.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minkernels.paged_attention import paged_decode

from ..config import LlamaConfig
from ..kv.cache import KVCache
from .batch import Batch, PrefillChunk
from .linear import Linear
from .rope import interleave_rows, rotate_
from .weights import WeightSource

__all__ = ["GroupedAttention"]

# Decodes attend in runs whose gathered rows are at most this many values: 8 MiB in float32 on a CPU, where memory that
# small is reused from layer to layer and stays in the cache (16 requests of 2,048 tokens: 5 times faster than one run).
# On CUDA a run should fill the GPU.
RUN_VALUES = {"cpu": 2**21, "cuda": 2**27}
# A run pads its requests to its longest; a further run costs a CPU about as much as gathering and scoring this many values.
SPLIT_VALUES = 2**17


class GroupedAttention:
    """`reduce`: see `Linear`; for a rank that has some of the heads."""

    def __init__(self, config: LlamaConfig, layer: int, weights: WeightSource, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, d = config.hidden_size, config.head_dim
        self.layer, self.head_dim = layer, d
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.groups = self.heads // self.kv_heads
        q, k, v = (weights.take(f"{prefix}.{name}_proj.weight", (n * d, hidden))
                   for name, n in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
        if not weights.rope_interleaved:
            q, k = interleave_rows(q, self.heads), interleave_rows(k, self.kv_heads)
        self.qkv = Linear(torch.cat((q, k, v)))  # one product
        self.out = Linear(weights.take(f"{prefix}.o_proj.weight", (hidden, self.heads * d)), reduce)  # (hidden, Hq * d)

    def __call__(self, x: Tensor, cis: Tensor, batch: Batch, kv: KVCache, residual: Tensor) -> Tensor:
        """`residual + attention(x)`, written into `residual`; the tokens' rows are written to the cache first.

        Args:
            x: (T, hidden), normalised.
            cis: (T, 1, d/2), the tokens' rotations.
            residual: (T, hidden), overwritten.
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # (T, Hq + 2H, d)
        rotated = self.heads + self.kv_heads
        rotate_(qkv[:, :rotated], cis)  # queries and keys in one go
        kv.write(self.layer, batch.slots, qkv[:, self.heads: rotated], qkv[:, rotated:])
        q = qkv[:, : self.heads]
        parts = []  # (tokens, Hq * d) each, in the batch's order
        if batch.num_decodes:
            parts.append(self._decode(q[: batch.num_decodes], batch, kv))
        for number, chunk in enumerate(batch.prefills):
            parts.append(self._prefill(q[chunk.start: chunk.end], number, batch, kv))
        return self.out.add_to(residual, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _decode(self, q: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """One query a request: (D, Hq, d) -> (D, Hq * d). The queries of a group stand where a kernel expects a query sequence."""
        if kv.backend == "triton":
            tables, lens = batch.decode_block_tables, batch.decode_seq_lens
            return paged_decode(q, kv.pages(self.layer), tables, lens, kv.kv_cache_dtype, backend=kv.backend).flatten(1)
        runs = batch.scratch.get("decode runs")
        if runs is None:
            runs = batch.scratch["decode runs"] = _decode_runs(batch, kv, q.dtype)
        q = q.unflatten(1, (self.kv_heads, self.groups))  # (D, H, G, d)
        if len(runs) == 1:
            return self._attend(q, runs[0], kv).reshape(q.shape[0], -1)
        out = q.new_empty(q.shape[0], self.heads * self.head_dim)
        for run in runs:
            out.index_copy_(0, run.which, self._attend(q.index_select(0, run.which), run, kv).reshape(len(run.which), -1))
        return out

    def _attend(self, q: Tensor, run: _Run, kv: KVCache) -> Tensor:
        """(r, H, G, d) -> (r, H, G, d)."""
        rows = (part[:, : run.length].transpose(1, 2) for part in run.rows.read(self.layer, kv))  # (r, H, S, d), views
        return F.scaled_dot_product_attention(q, *rows, attn_mask=run.mask)

    def _prefill(self, q: Tensor, number: int, batch: Batch, kv: KVCache) -> Tensor:
        """Neighbouring queries of one request: (n, Hq, d) -> (n, Hq * d)."""
        chunk = batch.prefills[number]
        n = chunk.end - chunk.start
        seen = chunk.context_len + n  # S
        plan = batch.scratch.get(("chunk", number))
        if plan is None:
            plan = batch.scratch["chunk", number] = _Rows.of(chunk.block_ids, seen, kv), _chunk_mask(chunk, q)
        rows, mask = plan
        k, v = (part[:seen].transpose(0, 1).unsqueeze(1).expand(-1, self.groups, -1, -1)  # (H, G, S, d), no copy
                for part in rows.read(self.layer, kv))
        q = q.transpose(0, 1).unflatten(0, (self.kv_heads, self.groups))  # (H, G, n, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # (H, G, n, d)
        return out.flatten(0, 1).transpose(0, 1).reshape(n, -1)


# --- a step's plan, made in its first layer and shared by all ---------------------------------------------


@dataclass(slots=True)
class _Rows:
    """Where visible rows lie: by block, or by slot where most of the last block would be read in vain."""

    blocks: Tensor  # (..., m)
    slots: Tensor | None  # (..., S)

    @classmethod
    def of(cls, blocks: Tensor, length: int, kv: KVCache) -> _Rows:
        size = kv.block_size
        if blocks.shape[-1] * size < 2 * length:
            return cls(blocks, None)
        slots = blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)  # (..., m, N)
        return cls(blocks, slots.flatten(-2)[..., :length])

    def read(self, layer: int, kv: KVCache) -> tuple[Tensor, Tensor]:
        """K and V, (..., S or more, H, d)."""
        return kv.read_blocks(layer, self.blocks) if self.slots is None else kv.read_slots(layer, self.slots)


@dataclass(slots=True)
class _Run:
    """Decodes that attend together, padded to the longest."""

    which: Tensor | None  # (r,) int64, their places in the batch; None: all, in order
    rows: _Rows  # (r, ...)
    length: int  # S
    mask: Tensor  # (r, 1, 1, S), added to scores: 0 for the request's tokens, -inf past its end


def _decode_runs(batch: Batch, kv: KVCache, dtype: torch.dtype) -> list[_Run]:
    tables, lens = batch.decode_block_tables, batch.decode_seq_lens
    row = sum(kv.fmt.widths) * kv.kv_layout.num_heads  # values of a token
    if lens.device.type == "cpu":
        groups = _similar(lens.tolist(), row)
    else:  # lengths cannot be read without waiting for the device
        size = max(1, RUN_VALUES["cuda"] // (batch.max_decode_len * row))
        groups = [(range(start, min(start + size, len(lens))), batch.max_decode_len) for start in range(0, len(lens), size)]
    runs = []
    for members, length in groups:
        which = None
        if len(groups) > 1:
            which = torch.arange(members.start, members.stop, device=lens.device) if isinstance(members, range) else torch.tensor(members)
        mine, ends = (tables, lens) if which is None else (tables[which], lens[which])
        beyond = torch.arange(length, device=lens.device) >= ends.unsqueeze(1)  # (r, S)
        mask = torch.zeros(beyond.shape, dtype=dtype, device=lens.device).masked_fill_(beyond, float("-inf"))
        runs.append(_Run(which, _Rows.of(mine[:, : -(-length // kv.block_size)], length, kv), length, mask[:, None, None]))
    return runs


def _similar(lens: list[int], row: int) -> list[tuple[list[int], int]]:
    """Cut decodes, longest first, into (members, longest): a run ends where it is full, or where padding the rest costs more than a run."""
    order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    groups, start = [], 0
    for at in range(1, len(order) + 1):
        longest = lens[order[start]]
        if (at == len(order) or (at + 1 - start) * longest * row > RUN_VALUES["cpu"]
                or (longest - lens[order[at]]) * (len(order) - at) * row > SPLIT_VALUES):
            groups.append((order[start:at], longest))
            start = at
    return groups


def _chunk_mask(chunk: PrefillChunk, q: Tensor) -> Tensor | None:
    """(n, S) to add to scores: a token sees the context, the chunk's tokens before it, and itself. None: plainly causal."""
    if not chunk.context_len:
        return None
    n = chunk.end - chunk.start
    mask = torch.full((n, chunk.context_len + n), float("-inf"), dtype=q.dtype, device=q.device)
    return mask.triu_(chunk.context_len + 1)  # 0 on and below the diagonal of each query's own token
