"""The GLM of `minengine.model`, differentiable: whole sequences, no cache, keys and values of every head written out.

The engine attends in absorbed form to rows in a paged cache; this is the same model as its authors' papers define it,
so each is the other's check. Parameters carry the Hugging Face names; `weights` gives them as a checkpoint holds them.

The indexers learn by imitation (DeepSeek-V3.2, section 2.1.1): each is pulled towards the mean attention of the
layers that will use its choice, by the Kullback-Leibler divergence, and no gradient passes from it into the model.

Shapes: B sequences, T tokens, H heads, R kv_lora_rank, Hi index heads, Q queries that an indexer learns from.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import GlmConfig
from ..model.indexer import KEY_NORM_EPS
from ..model.mla import LATENT_NORM_EPS
from ..model.rope import inverse_frequencies, rotations

__all__ = ["Lesson", "Network"]

CHOICE_ROWS = 512  # queries whose index scores are held at once


@dataclass
class Lesson:
    """What one forward pass carries from layer to layer, and brings home for the loss."""

    queries: Tensor | None = None  # (B, Q) positions from which the indexers learn; None: they do not
    top_k: int | None = None  # attend to the indexer's best so many only; None: to all
    visible: Tensor | None = None  # (B, 1, T, T) bool: the last full layer's choice
    scores: list[Tensor] = field(default_factory=list)  # one a full layer: (B, Q, T) log-probabilities
    attention: list[list[Tensor]] = field(default_factory=list)  # for each: the (B, Q, T) attention of the layers that follow it

    def index_loss(self) -> Tensor:
        """KL(attention || indexer), summed over full layers, mean over queries."""
        total = torch.zeros(())
        for log_q, layers in zip(self.scores, self.attention):
            p = torch.stack(layers).mean(0)
            total = total + (torch.special.xlogy(p, p) - p * log_q).sum(-1).mean()
        return total


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class IndexerNet(nn.Module):
    def __init__(self, config: GlmConfig) -> None:
        super().__init__()
        self.heads, self.width, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.wq_b = linear(config.q_lora_rank, self.heads * self.width)
        self.wk = linear(config.hidden_size, self.width)
        self.k_norm = nn.LayerNorm(self.width, KEY_NORM_EPS)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def keys(self, x: Tensor, cis: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, d)."""
        return _rotate_first(self.k_norm(self.wk(x)).unsqueeze(2), cis, self.rope).squeeze(2)

    def forward(self, x: Tensor, c_q: Tensor, cis: Tensor, keys: Tensor, last: Tensor) -> Tensor:
        """Scores of the queries x (B, Q, hidden), c_q (B, Q, q_lora_rank) at positions `last` (B, Q) -> (B, Q, T), -inf after them."""
        queries = _rotate_first(self.wq_b(c_q).unflatten(-1, (self.heads, self.width)), cis, self.rope)  # (B, Q, Hi, d)
        dots = (queries.flatten(1, 2) @ keys.mT).relu().unflatten(1, (-1, self.heads))  # (B, Q, Hi, T)
        head_weights = self.weights_proj(x).unsqueeze(2) * (self.heads * self.width) ** -0.5  # (B, Q, 1, Hi)
        hidden = torch.arange(keys.shape[1]) > last.unsqueeze(-1)  # (B, Q, T)
        return (head_weights @ dots).squeeze(2).masked_fill(hidden, float("-inf"))


class AttentionNet(nn.Module):
    def __init__(self, config: GlmConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope, self.rope, self.rank, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank, config.v_head_dim
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, self.rank + self.rope)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, config.hidden_size)
        self.indexer = IndexerNet(config) if config.indexer_types[layer] == "full" else None

    def forward(self, x: Tensor, cis: Tensor, lesson: Lesson) -> Tensor:
        """x: (B, T, hidden), normalised; cis: (B, T, 1, rope/2)."""
        c_q = self.q_a_layernorm(self.q_a_proj(x))  # (B, T, q_lora_rank)
        c_kv, k_rope = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), dim=-1)
        q_nope, q_rope = self.q_b_proj(c_q).unflatten(-1, (self.heads, -1)).split((self.nope, self.rope), dim=-1)
        k_nope, v = self.kv_b_proj(self.kv_a_layernorm(c_kv)).unflatten(-1, (self.heads, -1)).split((self.nope, self.value), dim=-1)
        q = torch.cat((q_nope, _rotate(q_rope, cis)), dim=-1).transpose(1, 2)  # (B, H, T, nope + rope)
        k_rope = _rotate(k_rope.unsqueeze(2), cis).expand(-1, -1, self.heads, -1)  # one rotary key for all heads
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2)  # (B, H, T, nope + rope)
        v = v.transpose(1, 2)  # (B, H, T, value)
        if self.indexer is not None:
            self._index(x.detach(), c_q.detach(), cis, lesson)
        if lesson.queries is not None:
            lesson.attention[-1].append(_mean_attention(q.detach(), k.detach(), lesson.queries))
        sparse = lesson.top_k is not None and x.shape[1] > lesson.top_k
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=lesson.visible if sparse else None, is_causal=not sparse)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _index(self, x: Tensor, c_q: Tensor, cis: Tensor, lesson: Lesson) -> None:
        """Score what the lesson asks for and, where attention is sparse, choose for every query."""
        keys = self.indexer.keys(x, cis)
        if lesson.queries is not None:
            asked = (_rows(part, lesson.queries) for part in (x, c_q, cis))
            lesson.scores.append(self.indexer(*asked, keys, lesson.queries).log_softmax(-1).clamp(min=-1e4))  # finite: 0 * -inf is NaN
            lesson.attention.append([])
        if lesson.top_k is None or x.shape[1] <= lesson.top_k:
            return
        lesson.visible = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        with torch.no_grad():
            for start in range(0, x.shape[1], CHOICE_ROWS):
                part = slice(start, start + CHOICE_ROWS)
                last = torch.arange(x.shape[1])[part].expand(x.shape[0], -1)
                scores = self.indexer(x[:, part], c_q[:, part], cis[:, part], keys, last)  # (B, rows, T)
                best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(lesson.top_k, dim=-1).indices, True)
                lesson.visible[:, 0, part] = best & scores.isfinite()


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, width), linear(hidden, width), linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoENet(nn.Module):
    """Every expert computes every token and counts by its weight: at a few small experts that is faster than sorting tokens."""

    def __init__(self, config: GlmConfig) -> None:
        super().__init__()
        self.experts, self.top_k, self.width = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size
        self.scaling = config.routed_scaling_factor
        self.gate = linear(config.hidden_size, self.experts)
        self.register_buffer("correction", torch.zeros(self.experts))
        self.routed = SwiGLU(config.hidden_size, self.experts * self.width)  # the experts' matrices side by side
        self.shared_experts = SwiGLU(config.hidden_size, config.n_shared_experts * self.width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()  # (B, T, E)
        chosen = (scores + self.correction).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.scaling
        if self.training:
            self._balance(chosen)
        table = torch.zeros_like(scores).scatter(-1, chosen, weights).unsqueeze(-1)  # (B, T, E, 1)
        inner = F.silu(self.routed.gate_proj(x)) * self.routed.up_proj(x)  # (B, T, E * width)
        inner = (inner.unflatten(-1, (self.experts, self.width)) * table).flatten(-2)
        return self.routed.down_proj(inner) + self.shared_experts(x)

    @torch.no_grad()
    def _balance(self, chosen: Tensor, step: float = 1e-3) -> None:
        """Balance without an auxiliary loss (DeepSeek-V3, section 2.1.2): the correction of a busy expert falls, an idle one's rises."""
        load = chosen.flatten().bincount(minlength=self.experts).float()
        self.correction += step * (load.mean() - load).sign()


class LayerNet(nn.Module):
    def __init__(self, config: GlmConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = AttentionNet(config, layer)
        dense = config.mlp_layer_types[layer] == "dense"
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size) if dense else MoENet(config)

    def forward(self, x: Tensor, cis: Tensor, lesson: Lesson) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cis, lesson)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """`forward` gives logits; `first` keeps the first layer's output for a helper task."""

    def __init__(self, config: GlmConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LayerNet(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(0.5 if into_residual else 1.0) * parameter.shape[1] ** -0.5)
        nn.init.normal_(self.embed_tokens.weight)

    def forward(self, ids: Tensor, positions: Tensor, at: Tensor | None = None, lesson: Lesson | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the tokens after those `at` (B, n) (default: all), and the first layer's output.

        Args:
            ids, positions: (B, T) int64.

        Returns:
            (B, n, vocab), (B, T, hidden).
        """
        lesson = Lesson() if lesson is None else lesson
        inverse = inverse_frequencies(self.config.rope_theta, self.config.qk_rope_head_dim, ids.device)
        cis = rotations(positions.flatten(), inverse).view(*positions.shape, 1, -1)  # (B, T, 1, rope/2)
        x = self.embed_tokens(ids)
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x, cis, lesson)
            first = x if number == 0 else first
        if at is not None:
            x = _rows(x, at)
        return self.lm_head(self.norm(x)), first

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint, under its Hugging Face names, one tensor an expert's matrix."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            name = name if name.startswith("lm_head") else f"model.{name}"
            if name.endswith(".correction"):
                tensors[name.replace("correction", "gate.e_score_correction_bias")] = tensor
            elif ".routed." in name:
                prefix, matrix = name.split(".routed.")
                count, axis = self.config.n_routed_experts, 1 if matrix.startswith("down_proj") else 0
                tensors.update({f"{prefix}.experts.{expert}.{matrix}": part.contiguous() for expert, part in enumerate(tensor.chunk(count, axis))})
            else:
                tensors[name] = tensor
        return tensors


def _rotate(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate neighbouring pairs: x (B, T, H, d), cis (B, T, 1, d/2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * cis).flatten(-2)


def _rotate_first(x: Tensor, cis: Tensor, width: int) -> Tensor:
    """The same for the first `width` values of each head."""
    return torch.cat((_rotate(x[..., :width], cis), x[..., width:]), dim=-1)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x (B, T, ...), at (B, n) -> (B, n, ...)."""
    return x[torch.arange(len(x)).unsqueeze(1), at]


@torch.no_grad()
def _mean_attention(q: Tensor, k: Tensor, queries: Tensor) -> Tensor:
    """Attention of some queries, mean over heads: q, k (B, H, T, d), queries (B, Q) -> (B, Q, T)."""
    some = _rows(q.transpose(1, 2), queries).transpose(1, 2)  # (B, H, Q, d)
    scores = some @ k.mT * q.shape[-1] ** -0.5  # (B, H, Q, T)
    hidden = torch.arange(k.shape[2]) > queries.unsqueeze(-1)  # (B, Q, T)
    return scores.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1).mean(1)
