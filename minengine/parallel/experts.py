"""Mixtures of experts over several ranks: a part of each expert everywhere, or whole experts somewhere.

    SplitMoE      each rank has some columns of every expert (TP)            one sum over the ranks
    SpreadMoE     each rank has some experts, and every token (TEP)          one sum over the ranks
    ExchangedMoE  each rank has some experts, and tokens of its own (DEP)    rows go to their experts and come back

Shapes: T tokens, k experts a token visits, E experts, e of them on this rank, n ranks, V visits that start here, W that arrive here.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..arithmetic.sharding import rank_share
from ..config import GlmConfig
from ..model.moe import MoE
from ..model.weights import WeightSource
from .comm import Parallel

__all__ = ["ExchangedMoE", "SplitMoE", "SpreadMoE", "parallel_moe"]


def parallel_moe(config: GlmConfig, prefix: str, weights: WeightSource, parallel: Parallel) -> MoE:
    """The mixture that the topology asks for; `config` is the model as it is on this rank."""
    ranks = parallel.ranks
    kind = ExchangedMoE if ranks.dp_size > 1 else SpreadMoE if ranks.ep_size > 1 else SplitMoE
    return kind(config, prefix, weights, parallel)


class SplitMoE(MoE):
    def __init__(self, config: GlmConfig, prefix: str, weights: WeightSource, parallel: Parallel) -> None:
        super().__init__(config, prefix, weights, parallel.ranks.experts(config.n_routed_experts))
        self._comm = parallel.everyone

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        weights, experts = self.router(x)  # (T, k) each, the same on all ranks
        part = self.shared(x, self.routed(x, weights.to(x.dtype), experts))  # (T, hidden), this rank's part of the sum
        return residual.add_(self._comm.all_reduce(part, "moe.out"))


class SpreadMoE(SplitMoE):
    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What this rank's experts add: (T, hidden)."""
        k = experts.shape[1]
        order = experts.flatten().argsort()  # (T*k,): visits, expert after expert
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        before, mine = sum(counts[: self.experts.start]), counts[self.experts.start: self.experts.stop]
        order = order[before: before + sum(mine)]  # (V,): the visits to experts that are here
        visits = self.visit(x.index_select(0, order // k), mine)  # (V, hidden)
        visits.mul_(weights.flatten().index_select(0, order).unsqueeze(-1))
        return torch.zeros_like(x).index_add_(0, order // k, visits)


class ExchangedMoE(MoE):
    def __init__(self, config: GlmConfig, prefix: str, weights: WeightSource, parallel: Parallel) -> None:
        super().__init__(config, prefix, weights, parallel.ranks.experts(config.n_routed_experts))
        self._comm = parallel.everyone
        self._held = [len(rank_share(config.n_routed_experts, self._comm.size, rank)) for rank in range(self._comm.size)]

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, k = experts.shape
        order = experts.flatten().argsort()  # (V,): visits, expert after expert, and so rank after rank
        counts = experts.flatten().bincount(minlength=self.num_experts)  # (E,)
        visits = self._exchange(x.index_select(0, order // k), counts)  # (V, hidden)
        scattered = torch.empty_like(visits).index_copy_(0, order, visits)  # (V, hidden), token after token again
        return torch.bmm(weights.unsqueeze(1), scattered.view(tokens, k, -1)).squeeze(1)

    def serve(self) -> None:
        """Let this rank's experts work for the others, without tokens of its own."""
        self._exchange(self.gate_up.new_empty(0, self.gate_up.shape[-1]), torch.zeros(self.num_experts, dtype=torch.int64, device=self.gate_up.device))

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows to their experts, wherever they are, and back.

        Args:
            rows: (V, hidden), expert after expert.
            counts: (E,) int64, rows for each expert.

        Returns:
            (V, hidden): what the experts made of them.
        """
        mine, ranks = len(self.experts), self._comm.size
        arriving = self._comm.all_to_all(counts, "moe.sizes", self._held, [mine] * ranks).view(ranks, mine)  # (n, e)
        sends, receives = [int(part.sum()) for part in counts.split(self._held)], arriving.sum(1).tolist()
        rows = self._comm.all_to_all(rows, "moe.dispatch", sends, receives)  # (W, hidden): rank after rank, of each expert after expert
        which = torch.arange(mine, device=counts.device).repeat(ranks).repeat_interleave(arriving.flatten())  # (W,)
        order = which.argsort()
        visits = self.visit(rows.index_select(0, order), arriving.sum(0).tolist())  # (W, hidden), expert after expert
        back = torch.empty_like(visits).index_copy_(0, order, visits)
        return self._comm.all_to_all(back, "moe.combine", receives, sends)
