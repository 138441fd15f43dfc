"""A weight matrix, kept in the memory order that the processor multiplies fastest by.

On x86 CPUs oneDNN reorders a matrix once, into blocks that its kernels read in sequence. Why it is faster: a plain
product of few rows streams the matrix against its grain. It wins at every batch size, most at 2 to 16 rows (2 to 4
times, where the plain product is slower than for one row) and 2 times at 512. It costs a copy of a matrix that is also
used in its plain order (a tied embedding), and some milliseconds when a number of rows is first met, for its kernels to
be generated. Elsewhere, and on CUDA, the product is `F.linear`.
"""
from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Linear"]

PACKED_FROM = 1 << 18  # values; a oneDNN call costs about 8 us more, which a smaller matrix does not earn back
PACKED_FOR_ROWS = 16  # from 4 on any number gives the same blocking; that for one row is up to 1.4 times slower at 2 to 4 rows


class Linear:
    """y = x W^T for a weight (out, in), without bias.

    `reduce` is for a rank that has some of the inputs: it adds up all ranks' parts of an output before `add_to` adds that.
    """

    def __init__(self, weight: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self.reduce = reduce
        self.packed = _packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + x W^T`, written into `residual` (T, out)."""
        if self.reduce is not None:
            return residual.add_(self.reduce(self(x)))
        if self.packed:
            return residual.add_(self(x))
        return residual.addmm_(x, self.weight.t())


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN has float32 or bfloat16 kernels for this machine, and the matrix is worth a call to them."""
    here = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    if not here or weight.device.type != "cpu" or weight.numel() < PACKED_FROM:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
