"""Multi-head latent attention (DeepSeek-V2, section 2.1) in its absorbed form, over a cache that all heads share.

A token's row is (c_kv, k_rope): a latent of `kv_lora_rank` values and one rotated key. Keys and values of head h
are linear in the latent, k_h = W_uk[h] c_kv and v_h = W_uv[h] c_kv, so the two matrices move to the other side:

    q_h . k_h = (W_uk[h]^T q_h) . c_kv        sum_t p_t v_h[t] = W_uv[h] (sum_t p_t c_kv[t])

and attention works on the rows as they are cached: no key or value of any head is ever made. Queries attend to
what the cache gives back, their own token's row included, so a quantised cache is quantised for everybody.

Shapes: T tokens, H heads, R kv_lora_rank, D decodes, n queries of a chunk, S visible tokens, K chosen ones.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minkernels.indexer import runs
from minkernels.sparse_mla import sparse_mla_decode, sparse_mla_decode_torch

from ..config import ConfigError, GlmConfig
from ..kv.cache import KVCache
from .batch import Batch, PrefillChunk
from .indexer import Indexer
from .rope import rotate_
from .weights import WeightSource

__all__ = ["LatentAttention", "attend", "first", "slots_of", "unchosen"]

LATENT_NORM_EPS = 1e-6  # fixed in the released code for both low-rank norms, whatever rms_norm_eps says
# A chunk whose context is at most this many times index_topk masks out what was not chosen; a longer one gathers
# what was. On a CPU core gathering began to win between 1.5 times (4 heads, rank 32) and 4 times (16 heads, rank 512).
MASK_UP_TO = 2


class LatentAttention:
    """`reduce` is for a rank that has some of the heads: it adds up all ranks' parts of the output, (T, hidden)."""

    def __init__(self, config: GlmConfig, layer: int, weights: WeightSource, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self.reduce = reduce
        prefix = f"model.layers.{layer}.self_attn"
        hidden, heads, rank, rope = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        self.layer, self.heads, self.top_k = layer, heads, config.index_topk
        self.q_parts, self.down_parts = (nope, rope), (config.q_lora_rank, rank, rope)
        self.scale = (nope + rope) ** -0.5
        # Both down-projections read x: one product.
        self.down = torch.cat((weights.take(f"{prefix}.q_a_proj.weight", (config.q_lora_rank, hidden)),
                               weights.take(f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden))))
        self.q_norm = weights.take(f"{prefix}.q_a_layernorm.weight", (config.q_lora_rank,))
        self.kv_norm = weights.take(f"{prefix}.kv_a_layernorm.weight", (rank,))
        self.q_up = weights.take(f"{prefix}.q_b_proj.weight", (heads * (nope + rope), config.q_lora_rank))
        kv_up = weights.take(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), rank)).view(heads, nope + value, rank)
        self.w_uk, w_uv = kv_up.split((nope, value), dim=1)  # (H, nope, R), (H, value, R)
        self.w_uv = w_uv.mT  # (H, R, value)
        self.out = weights.take(f"{prefix}.o_proj.weight", (hidden, heads * value)).t()  # (H * value, hidden)
        if config.indexer_types[0] != "full":
            raise ConfigError(f"indexer_types[0]={config.indexer_types[0]!r}: a shared layer reuses the choice of a full one before it; "
                              "start with 'full'")
        self.indexer = Indexer(config, layer, weights) if config.indexer_types[layer] == "full" else None

    def __call__(self, x: Tensor, cis: Tensor, batch: Batch, kv: KVCache, residual: Tensor) -> Tensor:
        """`residual + attention(x)`, written into `residual`; the tokens' rows are written to the cache first.

        Args:
            x: (T, hidden), normalised.
            cis: (T, 1, rope/2), the tokens' rotations.
            residual: (T, hidden), overwritten.
        """
        c_q, c_kv, k_rope = F.linear(x, self.down).split(self.down_parts, dim=-1)  # (T, q_lora_rank), (T, R), (T, rope)
        k_rope = rotate_(k_rope.unsqueeze(1), cis)  # (T, 1, rope)
        c_kv = F.rms_norm(c_kv, self.kv_norm.shape, self.kv_norm, LATENT_NORM_EPS)
        self._write(x, cis, c_kv.unsqueeze(1), k_rope, batch, kv)
        c_q = F.rms_norm(c_q, self.q_norm.shape, self.q_norm, LATENT_NORM_EPS)
        q = F.linear(c_q, self.q_up).unflatten(-1, (self.heads, -1)).mul_(self.scale)  # (T, H, nope + rope)
        q_nope, q_rope = q.split(self.q_parts, dim=-1)
        q_rope = rotate_(q_rope, cis).transpose(0, 1)  # (H, T, rope)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.w_uk)  # (H, T, R)
        latent = self._attend(q_latent, q_rope, x, c_q, cis, batch, kv)  # (H, T, R)
        values = torch.bmm(latent, self.w_uv).transpose(0, 1).flatten(1)  # (T, H * value)
        if self.reduce is None:
            return residual.addmm_(values, self.out)
        return residual.add_(self.reduce(values @ self.out))

    def _write(self, x: Tensor, cis: Tensor, c_kv: Tensor, k_rope: Tensor, batch: Batch, kv: KVCache) -> None:
        """The tokens' rows into the cache: c_kv (T, 1, R), k_rope (T, 1, rope), and the index keys of x (T, hidden)."""
        kv.write(self.layer, batch.slots, c_kv, k_rope)
        if self.indexer is not None:
            self.indexer.write(x, cis, batch.slots, kv)

    def _attend(self, q_latent: Tensor, q_rope: Tensor, x: Tensor, c_q: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """Queries (H, T, R) and (H, T, rope) -> each head's mean latent (H, T, R)."""
        parts = []  # (H, tokens, R) each, in the batch's order
        if batch.num_decodes:
            part = slice(0, batch.num_decodes)
            slots = self._slots_for_decodes(x[part], c_q[part], cis[part], batch, kv)  # (D, K)
            parts.append(self._by_list(q_latent[:, part], q_rope[:, part], slots, kv))
        for number, chunk in enumerate(batch.prefills):
            part = slice(chunk.start, chunk.end)
            choice = self._choice_for_chunk(x[part], c_q[part], cis[part], number, batch, kv)
            parts.append(self._prefill(q_latent[:, part], q_rope[:, part], choice, chunk, kv))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _slots_for_decodes(self, x: Tensor, c_q: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """(D, K) slots of the rows that each decode attends to, -1 for none.

        A full layer chooses and shared layers find its list in the scratch; where every visible token is attended to, so do all layers.
        """
        scratch, tables = batch.scratch, batch.decode_block_tables
        if batch.max_decode_len <= self.top_k:
            if "every slot" not in scratch:
                scratch["every slot"] = slots_of(first(batch.decode_seq_lens, batch.max_decode_len), tables, kv.block_size)
            return scratch["every slot"]
        if self.indexer is not None:
            scratch["chosen slots"] = slots_of(self.indexer.choose_for_decodes(x, c_q, cis, batch, kv), tables, kv.block_size)
        return scratch["chosen slots"]

    def _choice_for_chunk(self, x: Tensor, c_q: Tensor, cis: Tensor, number: int, batch: Batch, kv: KVCache) -> Tensor | None:
        """(n, K) positions for the `number`-th prefill chunk; None: every visible token. Shared layers reuse a full one's choice."""
        chunk = batch.prefills[number]
        if chunk.context_len + x.shape[0] <= self.top_k:
            return None
        if self.indexer is not None:
            batch.scratch["chunk choice", number] = self.indexer.choose_for_chunk(x, c_q, cis, chunk, kv)
        return batch.scratch["chunk choice", number]

    def _prefill(self, q_latent: Tensor, q_rope: Tensor, choice: Tensor | None, chunk: PrefillChunk, kv: KVCache) -> Tensor:
        """Neighbouring queries of one request: (H, n, R), (H, n, rope) -> (H, n, R).

        Memory: the request's rows of one layer, S * (R + rope) values, and `runs` of queries over them.
        """
        heads, count, rank = q_latent.shape
        seen = chunk.context_len + count  # S
        if kv.backend == "triton":
            visible = torch.arange(chunk.context_len + 1, seen + 1, device=q_latent.device)
            positions = first(visible, seen) if choice is None else choice  # (n, K)
            return self._by_list(q_latent, q_rope, slots_of(positions, chunk.block_ids.expand(count, -1), kv.block_size), kv)
        latent, rope = (part[:seen, 0] for part in kv.read_blocks(self.layer, chunk.block_ids))  # (S, R), (S, rope)
        gather = choice is not None and seen > MASK_UP_TO * self.top_k
        outputs = []
        values = choice.shape[1] * (heads + rank + rope.shape[1]) if gather else heads * seen  # of one query
        for run in runs(count, values, latent.device):
            if gather:
                positions, absent = choice[run].clamp(min=0), choice[run] < 0  # (r, K)
                # index_select copies whole rows: several times faster on a CPU than indexing
                rows = (part.index_select(0, positions.flatten()).unflatten(0, positions.shape) for part in (latent, rope))  # (r, K, R), (r, K, rope)
                queries = q_latent[:, run].transpose(0, 1), q_rope[:, run].transpose(0, 1)  # (r, H, R), (r, H, rope)
                outputs.append(attend(*queries, *rows, absent.unsqueeze(1)).transpose(0, 1))  # (H, r, R)
                continue
            if choice is None:
                last = torch.arange(chunk.context_len + run.start, chunk.context_len + run.stop, device=latent.device)  # (r,)
                absent = torch.arange(seen, device=latent.device) > last.unsqueeze(1)  # (r, S)
            else:
                absent = unchosen(choice[run], seen)  # (r, S)
            queries = q_latent[:, run].reshape(1, -1, rank), q_rope[:, run].reshape(1, -1, rope.shape[1])  # (1, H*r, ...)
            output = attend(*queries, latent.unsqueeze(0), rope.unsqueeze(0), absent.unsqueeze(0))  # (1, H*r, R)
            outputs.append(output.view(heads, -1, rank))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _by_list(self, q_latent: Tensor, q_rope: Tensor, slots: Tensor, kv: KVCache) -> Tensor:
        """Each query over the rows in its list: (H, n, R), (H, n, rope), slots (n, K) with -1 for none -> (H, n, R).

        Every shape is known without a device sync.
        """
        q = torch.cat((q_latent, q_rope), dim=-1).transpose(0, 1)  # (n, H, R + rope)
        pages = kv.pages(self.layer)[:, :, 0]  # (B, N, row)
        if kv.backend == "triton":
            out, _ = sparse_mla_decode(q, pages, slots, q_latent.shape[-1], kv.kv_cache_dtype, backend=kv.backend)
        else:
            out, _ = sparse_mla_decode_torch(q, pages, slots, q_latent.shape[-1], kv.fmt.dequantize)
        return out.transpose(0, 1)


def attend(q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, absent: Tensor) -> Tensor:
    """Softmax attention of scaled queries over cached rows; a query that sees no row gives 0.

    Args:
        q_latent, q_rope: (B, H*n, R), (B, H*n, rope), the n queries of the first head first.
        latent, rope: (B, S, R), (B, S, rope).
        absent: (B, n, S) bool, True where a query does not see a row.

    Returns:
        (B, H*n, R): each head's mean latent. The softmax is computed in float32 at least.
    """
    scores = torch.baddbmm(torch.bmm(q_rope, rope.mT), q_latent, latent.mT)  # (B, H*n, S)
    by_head = scores.unflatten(1, (-1, absent.shape[1]))  # (B, H, n, S), a view
    absent = absent.unsqueeze(1)  # (B, 1, n, S)
    by_head.masked_fill_(absent, float("-inf"))
    weights = by_head.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights.masked_fill_(absent, 0.0)  # where all is -inf, the softmax gave NaN
    return torch.bmm(weights.flatten(1, 2).to(latent.dtype), latent)


def first(visible: Tensor, seen: int) -> Tensor:
    """(Q,) counts -> (Q, S): the positions below each query's count, -1 from there on."""
    positions = torch.arange(seen, device=visible.device)
    return positions.where(positions < visible.unsqueeze(1), -1)


def slots_of(positions: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Positions (Q, K), -1 for none; block tables (Q, M) -> cache slots (Q, K), -1 for none."""
    blocks = tables.gather(1, positions.clamp(min=0) // block_size)  # (Q, K)
    return torch.where(positions < 0, -1, blocks * block_size + positions % block_size)


def unchosen(choice: Tensor, seen: int) -> Tensor:
    """Positions (n, K), -1 for none -> (n, S) bool, False at the chosen."""
    mask = torch.ones(choice.shape[0], seen + 1, dtype=torch.bool, device=choice.device)  # the last column takes the -1s
    return mask.scatter_(1, choice.where(choice >= 0, seen), False)[:, :seen]
