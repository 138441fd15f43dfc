"""MLA rows that kernels read: how they are packed, and how a list of rows is gathered from pages and unpacked.

Bytes of a row of rank R and rope width P:

- `nvfp4_fp8_ds_mla` (352 at R=512, P=64): R/2 of E2M1 latent, P of E4M3 rope (no scale), R/16 of E4M3 latent scales.
  At rank 512 the scales are interleaved as in vLLM: that of group s is byte 8*(s&3)+(s>>2), so that four lanes read
  eight neighbouring bytes each; at other ranks byte s.
- `fp8` (576): R of E4M3 latent, P of E4M3 rope, no scales.
- `fp8_ds_mla` (656, FlashMLA's): R of E4M3 latent, one power-of-two FP32 scale per 128 of them, P of BF16 rope.
- `float32`, `bfloat16`: R + P values of that dtype.
"""
from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import Tensor

from minkernels.casts import FLOAT_TINY, PLAIN, as_bytes, finite, from_bytes, store
from minkernels.fp4 import E4M3_MAX, GROUP, e4m3_decode, e4m3_encode, nvfp4_dequantize, nvfp4_quantize

__all__ = ["gather_dequant_rows", "gather_dequant_rows_torch", "pack", "unpack"]

INTERLEAVED_RANK = 512
FP8_DS_MLA_GROUP = 128  # values that share one FP32 scale
LANES = 4  # group s = 4 * column + lane, byte = 8 * lane + column
COLUMNS = INTERLEAVED_RANK // GROUP // LANES
NO_TRITON = "Triton is not installed, so the Triton kernels cannot run here; install it with: pip install 'minengine[kernels]'"


def pack(latent: Tensor, rope: Tensor, row_format: str) -> Tensor:
    """(..., R), (..., P) float -> (..., row) rows: uint8, or the dtype of a plain format.

    Raises:
        ValueError: an unknown format, or a 4-bit row whose R is no multiple of 16.
    """
    if row_format in PLAIN:
        return store(torch.cat((latent, rope), dim=-1), PLAIN[row_format])
    return _FORMATS[row_format][0](latent, rope)


def unpack(rows: Tensor, row_format: str, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(..., row) rows -> (..., R) latent, (..., P) rope; plain rows of `dtype` come back as views."""
    if row_format in PLAIN:
        return store(rows, dtype).split((kv_lora_rank, qk_rope_head_dim), dim=-1)
    return _FORMATS[row_format][1](rows, kv_lora_rank, qk_rope_head_dim, dtype)


# --- nvfp4_fp8_ds_mla ----------------------------------------------------------------------------------------

def _pack_nvfp4(latent: Tensor, rope: Tensor) -> Tensor:
    packed, scales = nvfp4_quantize(latent)  # (..., R/2), (..., R/16)
    if latent.shape[-1] == INTERLEAVED_RANK:
        scales = scales.unflatten(-1, (COLUMNS, LANES)).transpose(-1, -2).flatten(-2)
    return torch.cat((packed, e4m3_encode(rope), scales), dim=-1)


def _unpack_nvfp4(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed, rope_key, scales = rows.split((rank // 2, rope, rank // GROUP), dim=-1)
    if rank == INTERLEAVED_RANK:
        scales = scales.unflatten(-1, (LANES, COLUMNS)).transpose(-1, -2).flatten(-2)
    return nvfp4_dequantize(packed, scales, dtype), e4m3_decode(rope_key, dtype)


# --- fp8: E4M3 without a scale -------------------------------------------------------------------------------

def _pack_fp8(latent: Tensor, rope: Tensor) -> Tensor:
    return e4m3_encode(torch.cat((latent, rope), dim=-1))


def _unpack_fp8(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return e4m3_decode(rows, dtype).split((rank, rope), dim=-1)


# --- fp8_ds_mla ----------------------------------------------------------------------------------------------

def _pack_fp8_ds_mla(latent: Tensor, rope: Tensor) -> Tensor:
    """The last group is shorter where the rank is no multiple of 128.

    scale = the least power of two that brings the group's largest magnitude to 448 or below.
    """
    rank = latent.shape[-1]
    padded = torch.nn.functional.pad(finite(latent), (0, -rank % FP8_DS_MLA_GROUP))
    groups = padded.unflatten(-1, (padded.shape[-1] // FP8_DS_MLA_GROUP, FP8_DS_MLA_GROUP))
    wanted = groups.abs().amax(-1).div_(E4M3_MAX).clamp_(min=FLOAT_TINY)  # (..., groups)
    mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2^exponent, .5 <= mantissa < 1
    scales = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
    packed = e4m3_encode(groups / scales.unsqueeze(-1)).flatten(-2)[..., :rank]
    return torch.cat((packed, as_bytes(scales), as_bytes(store(rope, torch.bfloat16))), dim=-1)


def _unpack_fp8_ds_mla(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    latent, scales, rope_key = rows.split((rank, 4 * -(-rank // FP8_DS_MLA_GROUP), 2 * rope), dim=-1)
    scale = from_bytes(scales, torch.float32).repeat_interleave(FP8_DS_MLA_GROUP, dim=-1)[..., :rank]
    return store(e4m3_decode(latent) * scale, dtype), store(from_bytes(rope_key, torch.bfloat16), dtype)


_FORMATS = {"nvfp4_fp8_ds_mla": (_pack_nvfp4, _unpack_nvfp4), "fp8": (_pack_fp8, _unpack_fp8),
            "fp8_ds_mla": (_pack_fp8_ds_mla, _unpack_fp8_ds_mla)}


def gather_dequant_rows(pages: Tensor, slots: Tensor, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, dtype: torch.dtype = torch.float16,
                        backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Read the listed rows of a paged cache and unpack them.

    Args:
        pages: (B, N, R/2 + P + R/16) uint8, any strides but the last, which is 1.
        slots: (M,) int32 or int64, slot = block * N + offset; an entry outside 0..B*N-1, such as -1, gives zeros.
        dtype: of the result; every value of the format is exact in float16, bfloat16 and float32.
        backend: "torch", "triton" (a GPU, or TRITON_INTERPRET=1 set before Triton is imported), or "auto": Triton
            on a GPU where it is installed, else torch.
    Returns:
        (M, R) latent and (M, P) rope, contiguous.
    Raises:
        ValueError: pages of the wrong type, width, stride or device, or an unknown backend.
        ImportError: backend="triton" without Triton.
    """
    width = kv_lora_rank // 2 + qk_rope_head_dim + kv_lora_rank // GROUP
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[-1] != width or pages.stride(-1) != 1:
        got = f"{tuple(pages.shape)} {pages.dtype}, strides {pages.stride()}"
        raise ValueError(f"pages must be (blocks, block_size, {width}) uint8 with contiguous rows; got {got}")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend='{backend}': use auto, torch or triton")
    installed = importlib.util.find_spec("triton") is not None
    if backend == "triton" and not installed:
        raise ImportError(NO_TRITON)
    if backend == "auto" and pages.is_cuda and not installed:
        warnings.warn(f"{NO_TRITON}. Using plain torch.", stacklevel=2)
    if backend == "torch" or not installed or (backend == "auto" and not pages.is_cuda):
        return gather_dequant_rows_torch(pages, slots, kv_lora_rank, qk_rope_head_dim, dtype)
    from minkernels import rows_kernel

    if not pages.is_cuda and isinstance(rows_kernel.gather_dequant_rows_kernel, rows_kernel.triton.JITFunction):
        raise ValueError(f"backend='triton' needs pages on a GPU, got {pages.device}; use backend='torch', "
                         "or set TRITON_INTERPRET=1 before Triton is imported")
    latent = torch.empty(len(slots), kv_lora_rank, dtype=dtype, device=pages.device)
    rope = torch.empty(len(slots), qk_rope_head_dim, dtype=dtype, device=pages.device)
    if len(slots):
        rows_kernel.gather_dequant_rows_kernel[(len(slots),)](
            pages, slots.contiguous(), latent, rope, pages.shape[0] * pages.shape[1], pages.shape[1], pages.stride(0), pages.stride(1),
            **rows_kernel.constants(kv_lora_rank, qk_rope_head_dim, kv_lora_rank == INTERLEAVED_RANK), num_warps=rows_kernel.NUM_WARPS,
        )
    return latent, rope


def gather_dequant_rows_torch(pages: Tensor, slots: Tensor, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `gather_dequant_rows` must return, in plain torch."""
    block_size = pages.shape[1]
    slots = slots.long()
    missing = (slots < 0) | (slots >= pages.shape[0] * block_size)
    slots = slots.masked_fill(missing, 0)
    latent, rope = unpack(pages[slots // block_size, slots % block_size], "nvfp4_fp8_ds_mla", kv_lora_rank, qk_rope_head_dim, dtype)
    return latent.masked_fill_(missing[:, None], 0), rope.masked_fill_(missing[:, None], 0)
