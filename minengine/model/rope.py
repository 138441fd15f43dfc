"""Rotary position embedding as complex multiplication.

Neighbouring values (x[2i], x[2i+1]) are one complex number; position p turns it by the angle
p * theta^(-2i/d) (Su et al., RoFormer, section 3.2.2, where the pairs are neighbours too). One in-place
multiplication then rotates all heads of all tokens.
"""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse_frequencies", "interleave_rows", "rotate_", "rotations"]


def inverse_frequencies(theta: float, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Radians a position for each of the dim/2 pairs: (dim/2,) float32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rotations(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """exp(i * p * inv_freq): (T,) positions -> (T, 1, dim/2) complex64, one axis free for the heads.

    Computed each step, not looked up: a table for a million positions would take 256 MB.
    """
    angles = (positions.unsqueeze(-1) * inv_freq).unsqueeze(1)  # (T, 1, dim/2) float32
    return torch.polar(torch.ones((), device=angles.device), angles)


def rotate_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate in place. x: (T, H, dim), last axis dense; cis: (T, 1, dim/2). Half precision rotates in float32."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(cis)
        return x
    wide = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (T, H, dim/2)
    return x.copy_(torch.view_as_real(wide.mul_(cis)).flatten(-2))


def interleave_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder a projection's rows from half-split to neighbouring pairs, head by head.

    Hugging Face's Llama rotates (x[i], x[i + d/2]); with rows permuted so, the same rotation acts on neighbours.
    Queries and keys are permuted alike, so their dot products are the same.

    Args:
        weight: (num_heads * head_dim, hidden).
    """
    rows, hidden = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)
