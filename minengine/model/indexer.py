"""DeepSeek sparse attention's indexer: a cheap score for every cached token, of which the best `index_topk` are attended to.

    score[q, t] = sum_h w[q, h] * relu(query[q, h] . key[t] / sqrt(d)),   w = weights_proj(x) / sqrt(heads)

(DeepSeek-V3.2 technical report, section 2.1, with the two square roots of the released code.) A `full` layer
keeps one index key a token and chooses; a `shared` layer attends to what the last full layer chose. A query
that sees `index_topk` tokens or fewer attends to all of them: where no query of a call sees more, nothing is
scored, but keys are still written, for the queries to come.

Shapes: T tokens, Hi index heads, d index_head_dim, D decodes, n queries of a chunk, K index_topk. A choice is
(queries, K) positions in the request, in no order, -1 where fewer than K are visible.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minkernels.indexer import indexer_topk

from ..config import ConfigError, GlmConfig
from ..kv.cache import KVCache
from .batch import Batch, PrefillChunk
from .rope import rotate_
from .weights import WeightSource

__all__ = ["Indexer"]

KEY_NORM_EPS = 1e-6  # fixed in the released code, whatever rms_norm_eps says


class Indexer:
    """The indexer of one `full` layer; `index` counts the full layers before it."""

    def __init__(self, config: GlmConfig, layer: int, weights: WeightSource) -> None:
        heads, width = config.index_n_heads, config.index_head_dim
        if width < config.qk_rope_head_dim:
            raise ConfigError(f"index_head_dim={width} is less than qk_rope_head_dim={config.qk_rope_head_dim}, which it holds; correct config.json")
        prefix = f"model.layers.{layer}.self_attn.indexer"
        self.index = config.indexer_types[:layer].count("full")
        self.heads, self.width, self.rope, self.top_k = heads, width, config.qk_rope_head_dim, config.index_topk
        self.query_proj = weights.take(f"{prefix}.wq_b.weight", (heads * width, config.q_lora_rank))
        self.key_proj = weights.take(f"{prefix}.wk.weight", (width, config.hidden_size))
        self.key_norm = weights.take(f"{prefix}.k_norm.weight", (width,)), weights.take(f"{prefix}.k_norm.bias", (width,))
        # Both square roots are in these weights: relu(s * a) = relu(s) * a for a > 0.
        self.head_proj = weights.take(f"{prefix}.weights_proj.weight", (heads, config.hidden_size), torch.float32) * (heads * width) ** -0.5

    def write(self, x: Tensor, cis: Tensor, slots: Tensor, kv: KVCache) -> None:
        """Cache the index keys of x (T, hidden); cis (T, 1, rope/2), slots (T,)."""
        keys = F.layer_norm(F.linear(x, self.key_proj), (self.width,), *self.key_norm, KEY_NORM_EPS)  # (T, d)
        rotate_(keys.unsqueeze(1)[..., : self.rope], cis)  # the rotated part comes first
        kv.write_indexer(self.index, slots, keys)

    def choose_for_decodes(self, x: Tensor, c_q: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """One query a request: x (D, hidden), c_q (D, q_lora_rank) -> choice (D, K). No host sync."""
        return self._choose(x, c_q, cis, batch.decode_block_tables, batch.decode_seq_lens, None, batch.max_decode_len, kv)

    def choose_for_chunk(self, x: Tensor, c_q: Tensor, cis: Tensor, chunk: PrefillChunk, kv: KVCache) -> Tensor:
        """Neighbouring queries of one request: x (n, hidden), c_q (n, q_lora_rank) -> choice (n, K)."""
        seen = chunk.context_len + x.shape[0]
        visible = torch.arange(chunk.context_len + 1, seen + 1, device=x.device)  # (n,): a token sees itself
        return self._choose(x, c_q, cis, chunk.block_ids[None], visible, torch.zeros_like(visible), seen, kv)

    def _choose(self, x: Tensor, c_q: Tensor, cis: Tensor, tables: Tensor, visible: Tensor, rows: Tensor | None, seen: int, kv: KVCache) -> Tensor:
        """visible (Q,): query q sees positions below visible[q], at most `seen`, by table rows[q] of tables (G, M) -> (Q, K)."""
        pages = kv.indexer_pages(self.index)
        return indexer_topk(*self.queries(x, c_q, cis), pages, tables, visible, self.top_k, rows, seen, kv.backend).long()

    def queries(self, x: Tensor, c_q: Tensor, cis: Tensor) -> tuple[Tensor, Tensor]:
        """(T, Hi, d) rotated queries, and (T, Hi) float32 weights of their heads."""
        queries = F.linear(c_q, self.query_proj).unflatten(-1, (self.heads, self.width))  # (T, Hi, d)
        rotate_(queries[..., : self.rope], cis)
        return queries, F.linear(x.float(), self.head_proj)
