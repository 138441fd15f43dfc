"""Grouped-query attention (Ainslie et al. 2023) over a paged cache: G query heads share each key/value head.

Queries attend to what the cache gives back, their own token's row included, so a quantised cache is quantised for
everybody, and a prompt gives the same numbers however it is cut into chunks.

Shapes: T tokens, Hq query heads, H key/value heads, G = Hq / H, d head_dim, D decodes, n tokens of a chunk, S visible tokens.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import LlamaConfig
from ..kv.cache import KVCache
from .batch import Batch
from .rope import interleave_rows, rotate_
from .weights import WeightSource

__all__ = ["GroupedAttention"]


class GroupedAttention:
    def __init__(self, config: LlamaConfig, layer: int, weights: WeightSource) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, d = config.hidden_size, config.head_dim
        self.layer, self.head_dim = layer, d
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.groups = self.heads // self.kv_heads
        q, k, v = (weights.take(f"{prefix}.{name}_proj.weight", (n * d, hidden))
                   for name, n in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
        if not weights.rope_interleaved:
            q, k = interleave_rows(q, self.heads), interleave_rows(k, self.kv_heads)
        self.qkv = torch.cat((q, k, v))  # one product
        self.out = weights.take(f"{prefix}.o_proj.weight", (hidden, self.heads * d)).t()  # (Hq * d, hidden)

    def __call__(self, x: Tensor, cis: Tensor, batch: Batch, kv: KVCache, residual: Tensor) -> Tensor:
        """`residual + attention(x)`, written into `residual`; the tokens' rows are written to the cache first.

        Args:
            x: (T, hidden), normalised.
            cis: (T, 1, d/2), the tokens' rotations.
            residual: (T, hidden), overwritten.
        """
        qkv = F.linear(x, self.qkv).view(x.shape[0], -1, self.head_dim)  # (T, Hq + 2H, d)
        rotated = self.heads + self.kv_heads
        rotate_(qkv[:, :rotated], cis)  # queries and keys in one go
        kv.write(self.layer, batch.slots, qkv[:, self.heads: rotated], qkv[:, rotated:])
        q = qkv[:, : self.heads]
        parts = []  # (tokens, Hq * d) each, in the batch's order
        if batch.num_decodes:
            parts.append(self._decode(q[: batch.num_decodes], batch, kv))
        for number, chunk in enumerate(batch.prefills):
            parts.append(self._prefill(q[chunk.start: chunk.end], number, batch, kv))
        return residual.addmm_(parts[0] if len(parts) == 1 else torch.cat(parts), self.out)

    def _decode(self, q: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """One query a request: (D, Hq, d) -> (D, Hq * d). The queries of a group stand where a kernel expects a query sequence."""
        mask = batch.scratch.get("decode mask")
        if mask is None:
            mask = batch.scratch["decode mask"] = _decode_mask(batch, kv.block_size, q.dtype)
        k, v = kv.read_blocks(self.layer, batch.decode_block_tables)  # (D, S, H, d)
        q = q.unflatten(1, (self.kv_heads, self.groups))  # (D, H, G, d)
        out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)  # (D, H, G, d)
        return out.reshape(q.shape[0], -1)

    def _prefill(self, q: Tensor, number: int, batch: Batch, kv: KVCache) -> Tensor:
        """Neighbouring queries of one request: (n, Hq, d) -> (n, Hq * d)."""
        chunk = batch.prefills[number]
        n = chunk.end - chunk.start
        seen = chunk.context_len + n  # S
        k, v = (part[:seen].transpose(0, 1).unsqueeze(1).expand(-1, self.groups, -1, -1)  # (H, G, S, d), no copy
                for part in kv.read_blocks(self.layer, chunk.block_ids))
        q = q.transpose(0, 1).unflatten(0, (self.kv_heads, self.groups))  # (H, G, n, d)
        if not chunk.context_len:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = batch.scratch.get(("chunk mask", number))
            if mask is None:
                mask = batch.scratch["chunk mask", number] = _chunk_mask(chunk.context_len, n, q)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (H, G, n, d)
        return out.flatten(0, 1).transpose(0, 1).reshape(n, -1)


def _decode_mask(batch: Batch, block_size: int, dtype: torch.dtype) -> Tensor:
    """(D, 1, 1, S) to add to scores: 0 for tokens of the request, -inf past its end."""
    width = batch.decode_block_tables.shape[1] * block_size
    lens = batch.decode_seq_lens[:, None]
    hidden = torch.arange(width, device=lens.device) >= lens  # (D, S)
    return torch.zeros(hidden.shape, dtype=dtype, device=lens.device).masked_fill_(hidden, float("-inf"))[:, None, None]


def _chunk_mask(context_len: int, n: int, like: Tensor) -> Tensor:
    """(n, S) to add to scores: a token sees the context, the chunk's tokens before it, and itself."""
    mask = torch.full((n, context_len + n), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(context_len + 1)  # 0 on and below the diagonal of each query's own token
