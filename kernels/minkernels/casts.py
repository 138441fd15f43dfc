"""Floats to and from the bytes of a cache row, saturating instead of overflowing."""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOAT_TINY", "PLAIN", "as_bytes", "finite", "from_bytes", "store"]

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # rows that are kept as they are, in that dtype
FLOAT_TINY = 2.0**-126  # the smallest normal float32


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, 16 bits saturating, infinities too; x itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    if dtype.itemsize > 2:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)  # in float32: float16's limit is no bfloat16, and would round beyond itself


def finite(x: Tensor) -> Tensor:
    """float32 within +-1.875 * 2^127: beyond it rounding to E4M3's three bits would reach 2^128 on the way back."""
    limit = 1.875 * 2.0**127
    return x.float().clamp(-limit, limit)


def as_bytes(x: Tensor) -> Tensor:
    """(..., n) -> (..., n * itemsize) uint8."""
    return x.contiguous().view(torch.uint8)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., n * itemsize) uint8 part of a row -> (..., n); copied, since a part need not be aligned."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)
