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

import torch
from torch import Tensor

from .casts import FLOAT_TINY, PLAIN, as_bytes, finite, from_bytes, store
from .checks import FLOATS, INDICES, need, need_whole
from .fp4 import E4M3_MAX, GROUP, e4m3_decode, e4m3_encode, nvfp4_dequantize, nvfp4_quantize
from .launch import use_triton

__all__ = ["ROW_FORMATS", "gather_dequant", "gather_dequant_torch", "gather_to_fp8", "gather_to_fp8_torch", "pack", "pages_place", "quantize_rows",
           "row_width", "scatter", "take", "unpack"]

INTERLEAVED_RANK = 512
FP8_DS_MLA_GROUP = 128  # values that share one FP32 scale
LANES = 4  # group s = 4 * column + lane, byte = 8 * lane + column
COLUMNS = INTERLEAVED_RANK // GROUP // LANES
ROW_FORMATS = ("nvfp4_fp8_ds_mla", "fp8", "fp8_ds_mla")


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
    return torch.cat((packed, as_bytes(scales), as_bytes(store(rope.float(), torch.bfloat16))), dim=-1)


def _unpack_fp8_ds_mla(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    latent, scales, rope_key = rows.split((rank, _scale_bytes(rank), 2 * rope), dim=-1)
    scale = from_bytes(scales, torch.float32).repeat_interleave(FP8_DS_MLA_GROUP, dim=-1)[..., :rank]
    return store(e4m3_decode(latent) * scale, dtype), store(from_bytes(rope_key, torch.bfloat16), dtype)


def _scale_bytes(rank: int) -> int:
    return 4 * -(-rank // FP8_DS_MLA_GROUP)


_FORMATS = {"nvfp4_fp8_ds_mla": (_pack_nvfp4, _unpack_nvfp4), "fp8": (_pack_fp8, _unpack_fp8),
            "fp8_ds_mla": (_pack_fp8_ds_mla, _unpack_fp8_ds_mla)}


# --- rows in pages -------------------------------------------------------------------------------------------

def quantize_rows(latent: Tensor, rope: Tensor, pages: Tensor, slots: Tensor, row_format: str, backend: str = "auto") -> None:
    """Quantise tokens and store each in its slot of a paged cache; the kernel needs no host sync.

    Args:
        latent, rope: (T, R), (T, P) float32, float16 or bfloat16, any strides.
        pages: (B, N, row) uint8, any strides but the last, which is 1; overwritten where a slot says so.
        slots: (T,) int32 or int64, slot = block * N + offset, no two alike; an entry outside 0..B*N-1, such as -1, is written nowhere.
        row_format: one of ROW_FORMATS.
        backend: "torch", "triton" (a GPU, or TRITON_INTERPRET=1 set before Triton is imported), or "auto": Triton
            on a GPU where it is installed, else torch. Both give the same bytes.

    Raises:
        ValueError: an argument of the wrong type, shape, stride or device, an unknown format or backend, or a 4-bit row whose R is no
            multiple of 16.
        ImportError: backend="triton" without Triton.
    """
    need("latent", latent, ("tokens", "kv_lora_rank"), FLOATS, pages.device)
    need("rope", rope, (latent.shape[0], "qk_rope_head_dim"), FLOATS, pages.device)
    need("slots", slots, (latent.shape[0],), INDICES, pages.device)
    _check(pages, row_format, latent.shape[-1], rope.shape[-1])
    if not use_triton(backend, pages):
        return scatter(pages, slots, pack(latent, rope, row_format))
    from . import quantize_kernel as kernel

    latent, rope = (part if part.stride(-1) == 1 else part.contiguous() for part in (latent, rope))
    if len(slots) and pages.numel():
        kernel.quantize_rows_kernel[(len(slots),)](
            latent, rope, pages, slots.contiguous(), latent.stride(0), rope.stride(0), *pages_place(pages), FORMAT=row_format,
            **kernel.constants(latent.shape[-1], rope.shape[-1], latent.shape[-1] == INTERLEAVED_RANK), num_warps=kernel.NUM_WARPS)


def gather_dequant(pages: Tensor, slots: Tensor, row_format: str = "nvfp4_fp8_ds_mla", kv_lora_rank: int = 512, qk_rope_head_dim: int = 64,
                   dtype: torch.dtype = torch.float16, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Read the listed rows of a paged cache and unpack them.

    Args:
        pages, slots, row_format, backend: as in `quantize_rows`, slots (M,) in any order; an entry outside the pool gives zeros.
        dtype: of the result, float32, float16 or bfloat16; numbers beyond its range saturate. All values of the 4-bit and the unscaled format are exact in
            float16, bfloat16 and float32.

    Returns:
        (M, R) latent and (M, P) rope.

    Raises:
        ValueError, ImportError: as `quantize_rows`.
    """
    need("slots", slots, ("entries",), INDICES, pages.device)
    _check(pages, row_format, kv_lora_rank, qk_rope_head_dim)
    if dtype not in FLOATS:
        raise ValueError(f"dtype={dtype}: use torch.float32, torch.float16 or torch.bfloat16")
    if not use_triton(backend, pages) or not pages.numel():
        return gather_dequant_torch(pages, slots, row_format, kv_lora_rank, qk_rope_head_dim, dtype)
    from . import rows_kernel as kernel

    latent = torch.empty(len(slots), kv_lora_rank, dtype=dtype, device=pages.device)
    rope = torch.empty(len(slots), qk_rope_head_dim, dtype=dtype, device=pages.device)
    if len(slots):
        kernel.gather_dequant_kernel[(len(slots),)](
            pages, slots.contiguous(), latent, rope, *pages_place(pages), FORMAT=row_format,
            **kernel.constants(kv_lora_rank, qk_rope_head_dim, kv_lora_rank == INTERLEAVED_RANK), num_warps=kernel.NUM_WARPS)
    return latent, rope


def gather_dequant_torch(pages: Tensor, slots: Tensor, row_format: str, kv_lora_rank: int, qk_rope_head_dim: int,
                         dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `gather_dequant` must return, in plain torch."""
    rows, _ = take(pages, slots)  # zero bytes are zeros in every format
    return unpack(rows, row_format, kv_lora_rank, qk_rope_head_dim, dtype)


def gather_to_fp8(pages: Tensor, slots: Tensor, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, backend: str = "auto") -> Tensor:
    """Read the listed 4-bit rows of a paged cache and turn them into unscaled fp8 ones; latent values saturate at 448.

    Args, Raises: as `gather_dequant`.

    Returns:
        (M, R + P) uint8, zero bytes for an entry outside the pool.
    """
    need("slots", slots, ("entries",), INDICES, pages.device)
    _check(pages, "nvfp4_fp8_ds_mla", kv_lora_rank, qk_rope_head_dim)
    if not use_triton(backend, pages) or not pages.numel():
        return gather_to_fp8_torch(pages, slots, kv_lora_rank, qk_rope_head_dim)
    from . import rows_kernel as kernel

    out = torch.empty(len(slots), kv_lora_rank + qk_rope_head_dim, dtype=torch.uint8, device=pages.device)
    if len(slots):
        kernel.gather_to_fp8_kernel[(len(slots),)](
            pages, slots.contiguous(), out, *pages_place(pages),
            **kernel.constants(kv_lora_rank, qk_rope_head_dim, kv_lora_rank == INTERLEAVED_RANK), num_warps=kernel.NUM_WARPS)
    return out


def gather_to_fp8_torch(pages: Tensor, slots: Tensor, kv_lora_rank: int, qk_rope_head_dim: int) -> Tensor:
    """What `gather_to_fp8` must return, in plain torch."""
    rows, _ = take(pages, slots)
    latent, _ = unpack(rows, "nvfp4_fp8_ds_mla", kv_lora_rank, qk_rope_head_dim)
    rope = rows[:, kv_lora_rank // 2 :][:, :qk_rope_head_dim]  # E4M3 in both rows
    return torch.cat((e4m3_encode(latent), rope), dim=-1)


def scatter(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows (T, row) in their slots of pages (B, N, row), both of one dtype; waits for the device if that is a GPU."""
    slots = slots.long()
    inside = (slots >= 0) & (slots < pages.shape[0] * pages.shape[1])
    if not inside.all():
        slots, rows = slots[inside], rows[inside]
    block_size = pages.shape[1]
    if pages.stride(0) == block_size * pages.stride(1):  # one stride from slot to slot: no division, one copy a row
        flat = pages.as_strided((pages.shape[0] * block_size, pages.shape[2]), pages.stride()[1:])
        flat.index_copy_(0, slots, rows)
    else:
        pages[slots // block_size, slots % block_size] = rows


def take(pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The listed rows of pages (B, N, row): slots (...) -> (..., row), zeros for no entry, and (...) bool, True for no entry.

    It never waits for a device.
    """
    blocks, block_size, width = pages.shape
    missing = (slots < 0) | (slots >= blocks * block_size)
    flat = slots.masked_fill(missing, 0).long().flatten()
    if blocks * block_size == 0:
        rows = pages.new_zeros(len(flat), width)
    elif not pages.stride(1) or pages.stride(0) % pages.stride(1):
        rows = pages[flat // block_size, flat % block_size]
    else:
        # Blocks lie a whole number of rows apart, so one row index does: index_select copies whole rows, several times faster on a CPU.
        step = pages.stride(0) // pages.stride(1)
        every = pages.as_strided(((blocks - 1) * step + block_size, width), pages.stride()[1:])
        rows = every.index_select(0, flat if step == block_size else flat // block_size * step + flat % block_size)
    rows.masked_fill_(missing.reshape(-1, 1), 0)  # row 0 stood in for no entry; what is in it may be no number
    return rows.view(*slots.shape, width), missing


def row_width(row_format: str, rank: int, rope: int) -> int:
    """Elements of a row of a known format: bytes where it is packed, values where it is plain."""
    return {"nvfp4_fp8_ds_mla": rank // 2 + rope + rank // GROUP, "fp8_ds_mla": rank + _scale_bytes(rank) + 2 * rope}.get(row_format, rank + rope)


def _check(pages: Tensor, row_format: str, rank: int, rope: int) -> None:
    if row_format not in ROW_FORMATS:
        raise ValueError(f"row_format='{row_format}': use one of {', '.join(ROW_FORMATS)}")
    need_whole("kv_lora_rank", rank, 1)
    need_whole("qk_rope_head_dim", rope, 1)
    if row_format == "nvfp4_fp8_ds_mla" and rank % GROUP:
        raise ValueError(f"kv_lora_rank={rank}: a 4-bit row needs a multiple of {GROUP}")
    width = row_width(row_format, rank, rope)
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[-1] != width or pages.stride(-1) != 1:
        got = f"{tuple(pages.shape)} {pages.dtype}, strides {pages.stride()}"
        raise ValueError(f"pages must be (blocks, block_size, {width}) uint8 with contiguous rows; got {got}")


def pages_place(pages: Tensor) -> tuple[int, int, int, int]:
    """What a kernel needs to find a slot's row: slots in the pool, slots a block, and the strides of a block and a slot."""
    return pages.shape[0] * pages.shape[1], pages.shape[1], pages.stride(0), pages.stride(1)
