"""Mixture of experts: a sigmoid router (`noaux_tc`), routed SwiGLU experts, one shared expert.

Routing is DeepSeek-V3's (technical report, section 2.1.2): each expert has a score of its own, a learnt bias
corrects which experts are chosen but never how much they weigh, and with `n_group` > 1 only the experts of
the `topk_group` best groups are candidates.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError, GlmConfig
from .mlp import DenseMLP
from .weights import WeightSource

__all__ = ["MoE", "Router"]

# On CUDA up to this many tokens take a path without a host sync. So few rows an expert leave a GPU bound by
# reading weights (its operations a byte are a few hundred), so that computing all experts costs what reading does.
SYNC_FREE_TOKENS = 256


class Router:
    """Which experts a token visits, and how much each weighs. Computed in float32 whatever the model's dtype."""

    def __init__(self, config: GlmConfig, prefix: str, weights: WeightSource) -> None:
        experts = config.n_routed_experts
        size, rest = divmod(experts, config.n_group)
        if rest or (config.n_group > 1 and size < 2) or not 1 <= config.num_experts_per_tok <= size * config.topk_group:
            raise ConfigError(f"num_experts_per_tok={config.num_experts_per_tok} cannot be chosen from topk_group={config.topk_group} of "
                              f"n_group={config.n_group} groups (of 2 or more) of n_routed_experts={experts}; correct config.json")
        self.top_k, self.groups, self.top_groups = config.num_experts_per_tok, config.n_group, config.topk_group
        self.normalise, self.scaling = config.norm_topk_prob, config.routed_scaling_factor
        self.weight = weights.take(f"{prefix}.weight", (experts, config.hidden_size), torch.float32)
        self.bias = weights.take(f"{prefix}.e_score_correction_bias", (experts,), torch.float32)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, hidden) -> weights (T, k) float32, experts (T, k) int64."""
        scores = F.linear(x.float(), self.weight).sigmoid_()  # (T, E)
        choice = scores + self.bias  # (T, E)
        if self.groups > 1:
            choice = self._keep_best_groups(choice)
        experts = choice.topk(self.top_k, dim=-1, sorted=False).indices  # (T, k)
        weights = scores.gather(-1, experts)  # (T, k), without the bias
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # the addend keeps 0/0 from being NaN
        return weights * self.scaling, experts

    def _keep_best_groups(self, choice: Tensor) -> Tensor:
        """A group is worth the sum of its two best experts; those of the other groups become -inf. (T, E) -> (T, E)."""
        grouped = choice.unflatten(-1, (self.groups, -1))  # (T, G, E/G)
        worth = grouped.topk(2, dim=-1).values.sum(-1)  # (T, G)
        best = worth.topk(self.top_groups, dim=-1, sorted=False).indices  # (T, g)
        dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)  # (T, G)
        return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


class MoE:
    """`residual + routed experts + shared expert`. Three ways to the same sum, chosen by device and number of tokens."""

    def __init__(self, config: GlmConfig, prefix: str, weights: WeightSource, experts: range | None = None) -> None:
        """`experts`: those whose matrices are here; None: all of them."""
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.num_experts, self.width = config.n_routed_experts, width
        self.experts = range(self.num_experts) if experts is None else experts
        self.avoids_sync = weights.device.type == "cuda"
        self.router = Router(config, f"{prefix}.gate", weights)
        self.shared = DenseMLP(f"{prefix}.shared_experts", weights)
        # Filled expert by expert: loading holds one expert twice, not all of them.
        self.gate_up = torch.empty(len(self.experts), 2 * width, hidden, dtype=weights.dtype, device=weights.device)
        self.down = torch.empty(len(self.experts), width, hidden, dtype=weights.dtype, device=weights.device)  # transposed
        for at, expert in enumerate(self.experts):
            name = f"{prefix}.experts.{expert}"
            self.gate_up[at, :width] = weights.take(f"{name}.gate_proj.weight", (width, hidden))
            self.gate_up[at, width:] = weights.take(f"{name}.up_proj.weight", (width, hidden))
            self.down[at] = weights.take(f"{name}.down_proj.weight", (hidden, width)).t()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Written into `residual`.

        Args:
            x: (T, hidden), normalised.
            residual: (T, hidden), overwritten.
        """
        weights, experts = self.router(x)  # (T, k) each
        return self.shared(x, residual.add_(self.routed(x, weights.to(x.dtype), experts)))

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What the routed experts add: x (T, hidden), weights and experts (T, k) -> (T, hidden)."""
        if not self.avoids_sync or x.shape[0] > SYNC_FREE_TOKENS:
            return self._grouped(x, weights, experts)
        if 3 * experts.numel() < self.num_experts:  # a gathered matrix is read, written and read again
            return self._gathered(x, weights, experts)
        return self._all_experts(x, weights, experts)

    def visit(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows through the experts that are here: (V, hidden), counts[i] of them for the i-th, one after the other -> (V, hidden)."""
        visits = torch.empty_like(rows)  # (V, hidden)
        start = 0
        for at, count in enumerate(counts):
            if count:
                part = slice(start, start := start + count)
                torch.mm(self._activate(F.linear(rows[part], self.gate_up[at])), self.down[at], out=visits[part])
        return visits

    def _grouped(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Tokens sorted by expert, one product for each expert that has any. One host sync on CUDA: the counts."""
        tokens, k = experts.shape
        order = experts.flatten().argsort()  # (T*k,): visits, expert after expert
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        visits = self.visit(x.index_select(0, order // k), counts)  # (T*k, hidden)
        scattered = torch.empty_like(visits).index_copy_(0, order, visits)  # (T*k, hidden), token after token again
        return torch.bmm(weights.unsqueeze(1), scattered.view(tokens, k, -1)).squeeze(1)

    def _gathered(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The chosen experts' matrices side by side: for so few tokens that most experts are not visited."""
        tokens, k = experts.shape
        chosen = experts.flatten()  # (T*k,)
        rows = x.repeat_interleave(k, dim=0, output_size=tokens * k).unsqueeze(-1)  # (T*k, hidden, 1)
        inner = self._activate(torch.bmm(self.gate_up[chosen], rows).squeeze(-1))  # (T*k, width)
        visits = torch.bmm(inner.unsqueeze(1), self.down[chosen])  # (T*k, 1, hidden)
        return torch.bmm(weights.unsqueeze(1), visits.view(tokens, k, -1)).squeeze(1)

    def _all_experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Every expert on every token, weighed 0 where it was not chosen: for a few tokens that visit most experts."""
        table = weights.new_zeros(x.shape[0], self.num_experts).scatter_(-1, experts, weights)  # (T, E)
        inner = self._activate(torch.bmm(x.expand(self.num_experts, -1, -1), self.gate_up.mT))  # (E, T, width)
        inner *= table.t().unsqueeze(-1)  # weighing before the linear map is weighing after it
        return inner.transpose(0, 1).flatten(1) @ self.down.flatten(0, 1)  # (T, E*width) @ (E*width, hidden)

    def _activate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: (..., 2 * width) -> (..., width)."""
        gate, up = gate_up.split(self.width, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)
