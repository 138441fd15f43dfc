"""The 4-bit MLA row: how it is packed, and how a list of rows is gathered from pages and unpacked.

Bytes of a row of rank R and rope width P (352 at R=512, P=64): R/2 of E2M1 latent, P of E4M3 rope (no scale),
R/16 of E4M3 latent scales. At rank 512 the scales are interleaved as in vLLM's `nvfp4_fp8_ds_mla`: that of
group s is byte 8*(s&3)+(s>>2), so that four lanes read eight neighbouring bytes each; at other ranks byte s.
"""
from __future__ import annotations

import torch
from torch import Tensor

from minkernels.fp4 import GROUP, e4m3_decode, e4m3_encode, nvfp4_dequantize, nvfp4_quantize

__all__ = ["pack_row", "unpack_row"]

INTERLEAVED_RANK = 512
LANES = 4  # group s = 4 * column + lane, byte = 8 * lane + column


def pack_row(latent: Tensor, rope: Tensor) -> Tensor:
    """(..., R), (..., P) float -> (..., R/2 + P + R/16) uint8.

    Raises:
        ValueError: R is no multiple of 16.
    """
    packed, scales = nvfp4_quantize(latent)  # (..., R/2), (..., R/16)
    if latent.shape[-1] == INTERLEAVED_RANK:
        scales = scales.unflatten(-1, (INTERLEAVED_RANK // GROUP // LANES, LANES)).transpose(-1, -2).flatten(-2)
    return torch.cat((packed, e4m3_encode(rope), scales), dim=-1)


def unpack_row(rows: Tensor, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(..., R/2 + P + R/16) uint8 -> (..., R) latent, (..., P) rope."""
    packed, rope, scales = rows.split((kv_lora_rank // 2, qk_rope_head_dim, kv_lora_rank // GROUP), dim=-1)
    if kv_lora_rank == INTERLEAVED_RANK:
        scales = scales.unflatten(-1, (LANES, INTERLEAVED_RANK // GROUP // LANES)).transpose(-1, -2).flatten(-2)
    return nvfp4_dequantize(packed, scales, dtype), e4m3_decode(rope, dtype)
