"""Sparse MLA decoding: absorbed queries attend to a list of cached rows each, whatever format the rows are kept in.

Native: the kernel reads the cached bytes and unpacks them on chip. Staged: the listed 4-bit rows are first written out as FP8 rows, which a
second kernel attends to: more bytes moved, for a kernel that need not know four bits.

Shapes: T queries, H heads, R kv_lora_rank, P qk_rope_head_dim, K entries of a list, B blocks of N rows.
"""
from __future__ import annotations

from functools import partial
from typing import Callable

import torch
from torch import Tensor

from .casts import PLAIN
from .checks import FLOATS, need_whole
from .launch import use_triton
from .rows import ROW_FORMATS, gather_to_fp8, row_width, take, unpack

__all__ = ["choose_splits", "sparse_mla_decode", "sparse_mla_decode_torch"]

MAX_SPLITS = 64
SPLIT_COST = 1.5  # tiles whose time a split costs beyond its own tiles: its queries, its part of the result, the merge
RUN_VALUES = {"cpu": 1 << 21, "cuda": 1 << 26}  # intermediate values of a run of queries in plain torch


def sparse_mla_decode(q: Tensor, pages: Tensor, slots: Tensor, kv_lora_rank: int, row_format: str, *, path: str = "native",
                      num_splits: int | None = None, one_launch: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Softmax attention of every query over the rows that its list names.

    Operands are float16 where queries have 16 bits, saturating at 65504, and float32 where they are float32; sums are float32.

    Args:
        q: (T, H, R + P) float32, float16 or bfloat16, absorbed and already scaled.
        pages: (B, N, row), any strides but the last, which is 1: uint8 bytes, or the plain row's own dtype.
        slots: (T, K) int32 or int64, slot = block * N + offset; an entry outside 0..B*N-1, such as -1, is no entry. One named twice counts twice.
        row_format: "nvfp4_fp8_ds_mla", "fp8", "fp8_ds_mla", "bfloat16" or "float32".
        path: "native", or "staged" for nvfp4_fp8_ds_mla.
        num_splits: programs that share a query's list; None: chosen by `choose_splits`. The torch way ignores it, and one_launch.
        one_launch: the last program of a query merges the parts; else a second launch does. Calls on one GPU must then be ordered, as those of
            one stream are: they share counters. The first call cannot be inside a CUDA graph's recording, later ones can.
        backend: "torch", "triton" (a GPU, or TRITON_INTERPRET=1 set before Triton is imported), or "auto".

    Returns:
        (T, H, R) of q's dtype, and (T, H) float32: the natural logarithm of the sum of exponentials. No valid entry: 0 and +inf.

    Raises:
        ValueError: an argument of the wrong type, shape or device, named.
        ImportError: backend="triton" without Triton.
    """
    _check(q, pages, slots, kv_lora_rank, row_format, path, num_splits)
    if path == "staged":
        pages, slots = _stage(pages, slots, kv_lora_rank, q.shape[-1] - kv_lora_rank, backend)
        row_format = "fp8"
    if not use_triton(backend, pages):
        widths = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": q.shape[-1] - kv_lora_rank}
        return sparse_mla_decode_torch(q, pages, slots, kv_lora_rank, partial(unpack, row_format=row_format, **widths))
    from . import sparse_mla_kernel

    return sparse_mla_kernel.launch(q, pages, slots, kv_lora_rank, row_format, num_splits, one_launch)


def choose_splits(programs: int, tiles: int, sms: int) -> int:
    """Into how many parts each program's list of `tiles` tiles is cut when `programs` lists share `sms` multiprocessors.

    A power of two, so that few kernels are compiled. The programs run in waves of one a multiprocessor; the least
    waves * (tiles of a part + SPLIT_COST) wins, the fewest parts of equals.
    """
    best, least = 1, None
    for splits in (1 << n for n in range(min(tiles, MAX_SPLITS).bit_length())):
        waves = -(-programs * splits // sms)
        time = waves * (-(-tiles // splits) + (SPLIT_COST if splits > 1 else 0.0))
        if least is None or time < least:
            best, least = splits, time
    return best


def sparse_mla_decode_torch(q: Tensor, pages: Tensor, slots: Tensor, kv_lora_rank: int,
                            dequantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What `sparse_mla_decode` must return, in plain torch and float32, for rows of any format; runs of queries bound its memory.

    dequantize: (..., row) rows -> (..., R) latent and (..., P) rope, float32. It never waits for a device.
    """
    tokens, heads, width = q.shape
    out = q.new_empty(tokens, heads, kv_lora_rank)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    run = max(1, RUN_VALUES[q.device.type] // max(1, slots.shape[1] * (width + heads)))
    for start in range(0, tokens, run):
        part = slice(start, start + run)
        rows, missing = take(pages, slots[part])  # (r, K, row), (r, K)
        latent, rope = dequantize(rows)  # (r, K, R), (r, K, P)
        q_latent, q_rope = q[part].float().split((kv_lora_rank, width - kv_lora_rank), dim=-1)  # (r, H, R), (r, H, P)
        scores = torch.baddbmm(torch.bmm(q_rope, rope.mT), q_latent, latent.mT)  # (r, H, K)
        scores.masked_fill_(missing.unsqueeze(1), float("-inf"))
        total = torch.logsumexp(scores, -1, keepdim=True)  # (r, H, 1)
        total.masked_fill_(total == float("-inf"), float("inf"))  # no entry: +inf, which makes every weight 0
        out[part] = torch.bmm(scores.sub_(total).exp_(), latent)
        lse[part] = total.squeeze(-1)
    return out, lse


def _stage(pages: Tensor, slots: Tensor, rank: int, rope: int, backend: str) -> tuple[Tensor, Tensor]:
    """The listed 4-bit rows as FP8 rows of one block, (1, T*K, R + P) uint8, and the list of their slots, -1 for no entry."""
    flat = slots.reshape(-1)
    rows = gather_to_fp8(pages, flat, rank, rope, backend)  # (T*K, R + P)
    present = (flat >= 0) & (flat < pages.shape[0] * pages.shape[1])
    return rows.unsqueeze(0), torch.arange(len(flat), device=flat.device).masked_fill_(~present, -1).view(slots.shape)


def _check(q: Tensor, pages: Tensor, slots: Tensor, rank: int, row_format: str, path: str, num_splits: int | None) -> None:
    need_whole("kv_lora_rank", rank, 1)
    if q.dim() != 3 or q.dtype not in FLOATS or q.stride(-1) != 1 or rank > q.shape[-1]:
        raise ValueError(f"q must be (tokens, heads, {rank} + rope) float32, float16 or bfloat16 with contiguous rows; "
                         f"got {tuple(q.shape)} {q.dtype}, strides {q.stride()}")
    rope = q.shape[-1] - rank
    if row_format not in ROW_FORMATS and row_format not in PLAIN:
        raise ValueError(f"row_format='{row_format}': use one of {', '.join((*ROW_FORMATS, *PLAIN))}")
    if row_format == "nvfp4_fp8_ds_mla" and rank % 16:
        raise ValueError(f"kv_lora_rank={rank}: rows of {row_format} are groups of 16 values; use a multiple of 16")
    dtype, width = PLAIN.get(row_format, torch.uint8), row_width(row_format, rank, rope)
    if pages.dtype != dtype or pages.dim() != 3 or pages.shape[-1] != width or pages.stride(-1) != 1:
        raise ValueError(f"pages must be (blocks, block_size, {width}) {dtype} with contiguous rows for row_format='{row_format}'; "
                         f"got {tuple(pages.shape)} {pages.dtype}, strides {pages.stride()}")
    if pages.shape[0] * pages.shape[1] > 2**31 - 1:
        raise ValueError(f"pages hold {pages.shape[0] * pages.shape[1]} rows; at most 2^31 - 1 can be counted")
    if slots.dim() != 2 or slots.dtype not in (torch.int32, torch.int64) or slots.shape[0] != q.shape[0]:
        raise ValueError(f"slots must be ({q.shape[0]}, entries) int32 or int64, a list a query; got {tuple(slots.shape)} {slots.dtype}")
    if not q.device == pages.device == slots.device:
        raise ValueError(f"q, pages and slots must be on one device; got {q.device}, {pages.device} and {slots.device}")
    if path not in ("native", "staged") or (path == "staged" and row_format != "nvfp4_fp8_ds_mla"):
        raise ValueError(f"path='{path}' with row_format='{row_format}': use native, or staged with nvfp4_fp8_ds_mla")
    if num_splits is not None:
        need_whole("num_splits", num_splits, 1)
