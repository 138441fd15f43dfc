"""The dense SwiGLU MLP: down(silu(gate(x)) * up(x))."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .weights import WeightSource

__all__ = ["DenseMLP"]


class DenseMLP:
    """Also GLM's shared expert. The gate and up projections are one matrix, so that they are one product."""

    def __init__(self, prefix: str, weights: WeightSource) -> None:
        gate = weights.take(f"{prefix}.gate_proj.weight")  # (width, hidden)
        up = weights.take(f"{prefix}.up_proj.weight", tuple(gate.shape))
        self.width = gate.shape[0]
        self.gate_up = torch.cat((gate, up))  # (2 * width, hidden)
        self.down = weights.take(f"{prefix}.down_proj.weight", tuple(gate.T.shape)).t()  # (width, hidden), a view

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + mlp(x)`, written into `residual`.

        Args:
            x: (T, hidden), normalised.
            residual: (T, hidden), overwritten.
        """
        gate, up = F.linear(x, self.gate_up).split(self.width, dim=-1)  # (T, width) each
        return residual.addmm_(F.silu(gate, inplace=True).mul_(up), self.down)
