"""The dense SwiGLU MLP: down(silu(gate(x)) * up(x))."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear
from .weights import WeightSource

__all__ = ["DenseMLP"]


class DenseMLP:
    """Also GLM's shared expert. The gate and up projections are one matrix, so that they are one product.

    `reduce`: see `Linear`; for a rank that has some columns of the MLP.
    """

    def __init__(self, prefix: str, weights: WeightSource, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        gate = weights.take(f"{prefix}.gate_proj.weight")  # (width, hidden)
        up = weights.take(f"{prefix}.up_proj.weight", tuple(gate.shape))
        self.width = gate.shape[0]
        self.gate_up = Linear(torch.cat((gate, up)))  # (2 * width, hidden)
        self.down = Linear(weights.take(f"{prefix}.down_proj.weight", tuple(gate.T.shape)), reduce)  # (hidden, width)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + mlp(x)`, written into `residual`.

        Args:
            x: (T, hidden), normalised.
            residual: (T, hidden), overwritten.
        """
        gate, up = self.gate_up(x).split(self.width, dim=-1)  # (T, width) each
        return self.down.add_to(residual, F.silu(gate).mul_(up))
