"""DeepSeek sparse attention's indexer: a cheap score for every cached token, of which the best `index_topk` are attended to.

    score[q, t] = sum_h w[q, h] * relu(query[q, h] . key[t] / sqrt(d)),   w = weights_proj(x) / sqrt(heads)

(DeepSeek-V3.2 technical report, section 2.1, with the two square roots of the released code.) A `full` layer
keeps one index key a token and chooses; a `shared` layer attends to what the last full layer chose. A query
that sees `index_topk` tokens or fewer attends to all of them: where no query of a call sees more, nothing is
scored, but keys are still written, for the queries to come.

Shapes: T tokens, Hi index heads, d index_head_dim, D decodes, n queries of a chunk, S visible tokens,
K = min(index_topk, S). A choice is (queries, K) positions in the request, in no order, -1 where fewer than K
are visible.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError, GlmConfig
from ..kv.cache import KVCache
from .batch import Batch, PrefillChunk
from .rope import rotate_
from .weights import WeightSource

__all__ = ["Indexer", "best_positions", "runs"]

KEY_NORM_EPS = 1e-6  # fixed in the released code, whatever rms_norm_eps says
# Queries go in runs: a run's intermediate values (scores of every head, gathered rows) are at most this many, 4 MiB
# in float32 on a CPU, 256 MiB on CUDA, or one query's where that is more. On a CPU memory that small is reused from
# call to call and stays in the cache (measured: 1.6 times faster than 64 MiB); on CUDA a run should fill the GPU.
RUN_VALUES = {"cpu": 2**20, "cuda": 2**26}


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
        queries, head_weights = self._queries(x, c_q, cis)
        seen = batch.max_decode_len
        choices = []
        for run in runs(x.shape[0], self.heads * seen, x.device):
            keys = kv.read_indexer_blocks(self.index, batch.decode_block_tables[run])[:, :seen].float()  # (r, S, d)
            scores = _scores(queries[run].unsqueeze(1), head_weights[run].unsqueeze(1), keys)  # (r, 1, S)
            choices.append(self._choose(scores.squeeze(1), batch.decode_seq_lens[run]))
        return choices[0] if len(choices) == 1 else torch.cat(choices)

    def choose_for_chunk(self, x: Tensor, c_q: Tensor, cis: Tensor, chunk: PrefillChunk, kv: KVCache) -> Tensor:
        """Neighbouring queries of one request: x (n, hidden), c_q (n, q_lora_rank) -> choice (n, K)."""
        queries, head_weights = self._queries(x, c_q, cis)
        seen = chunk.context_len + x.shape[0]
        visible = torch.arange(chunk.context_len + 1, seen + 1, device=x.device)  # (n,): a token sees itself
        keys = kv.read_indexer_blocks(self.index, chunk.block_ids)[None, :seen].float()  # (1, S, d)
        choices = []
        for run in runs(x.shape[0], self.heads * seen, x.device):
            scores = _scores(queries[None, run], head_weights[None, run], keys)  # (1, r, S)
            choices.append(self._choose(scores.squeeze(0), visible[run]))
        return choices[0] if len(choices) == 1 else torch.cat(choices)

    def _queries(self, x: Tensor, c_q: Tensor, cis: Tensor) -> tuple[Tensor, Tensor]:
        """(T, Hi, d) rotated queries and (T, Hi) weights of their heads, both float32."""
        queries = F.linear(c_q, self.query_proj).unflatten(-1, (self.heads, self.width))  # (T, Hi, d)
        rotate_(queries[..., : self.rope], cis)
        return queries.float(), F.linear(x.float(), self.head_proj)

    def _choose(self, scores: Tensor, visible: Tensor) -> Tensor:
        """scores (Q, S), overwritten; visible (Q,): query q sees positions below visible[q] -> (Q, K)."""
        hidden = torch.arange(scores.shape[1], device=scores.device) >= visible.unsqueeze(1)  # (Q, S)
        return best_positions(scores.masked_fill_(hidden, float("-inf")), min(self.top_k, scores.shape[1]))


def runs(queries: int, values_a_query: int, device: torch.device) -> list[slice]:
    """Cut `queries` into runs whose intermediate values stay within RUN_VALUES; a run has at least one query."""
    length = max(1, RUN_VALUES[device.type] // values_a_query)
    return [slice(start, min(start + length, queries)) for start in range(0, queries, length)]


def best_positions(scores: Tensor, k: int) -> Tensor:
    """The k best-scored positions, exactly; of equal scores the lower positions win.

    topk alone breaks ties as it likes. Here each score becomes an integer key, ordered as the float32 is, with the
    position, counted down, in the lower half: no two keys are equal.

    Args:
        scores: (Q, S) float32, -inf for what may not be chosen.

    Returns:
        (Q, k) int64 in no order; -1 where a row has fewer than k scores above -inf.
    """
    bits = (scores + 0.0).view(torch.int32)  # the sum turns -0.0, another bit pattern, into its equal 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: magnitude bits flipped, so that less is less
    down = torch.arange(0xFFFFFFFF, 0xFFFFFFFF - scores.shape[-1], -1, device=scores.device)  # (S,) int64
    chosen = (rising.long() << 32 | down).topk(k, dim=-1, sorted=False).indices  # (Q, k)
    return chosen.masked_fill_(scores.gather(-1, chosen) == float("-inf"), -1)


def _scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """queries (B, Q, Hi, d), head_weights (B, Q, Hi), keys (B, S, d), float32 -> (B, Q, S)."""
    batch, count, heads, _ = queries.shape
    dots = torch.bmm(queries.flatten(1, 2), keys.mT).relu_()  # (B, Q*Hi, S)
    summed = torch.bmm(head_weights.reshape(batch * count, 1, heads), dots.view(batch * count, heads, -1))  # (B*Q, 1, S)
    return summed.view(batch, count, -1)
