"""Decode attention of grouped heads over a paged cache: one query a request, over the K and V rows that its block table lists.

A row is [K | V] of one head of d values: plain floats, E4M3 bytes ("fp8", no scale), or "nvfp4": d/2 bytes of E2M1 K (the low nibble is the
even element), its d/16 E4M3 scales, then V in the same way. `minengine.kv.rows.head_format` writes them.
"""
from __future__ import annotations

import torch
from torch import Tensor

from minkernels.checks import need_whole
from minkernels.fp4 import GROUP, e4m3_decode, nvfp4_dequantize
from minkernels.launch import has_e2m1_convert, num_sms, use_triton

__all__ = ["STORAGE", "choose_splits", "paged_decode", "paged_decode_torch", "row_width"]

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8, "nvfp4": torch.uint8}
TORCH_VALUES = 2**25  # cached values that plain torch unpacks at a time
PROGRAMS_PER_SM = 2  # splits are added until the GPU has this many programs
POSITIONS_PER_SPLIT = 256  # fewer are not worth a split


def row_width(kv_format: str, head_dim: int) -> int:
    """Elements of a row: bytes where it is packed."""
    return 2 * (head_dim // 2 + head_dim // GROUP) if kv_format == "nvfp4" else 2 * head_dim


def paged_decode(q: Tensor, pages: Tensor, block_tables: Tensor, seq_lens: Tensor, kv_format: str, *, scale: float | None = None,
                 num_splits: int | None = None, one_launch: bool = True, backend: str = "auto") -> Tensor:
    """softmax(scale * q K^T) V over each request's first `seq_len` positions, query head i reading KV head i // (Hq / H).

    A 16-bit query is multiplied in float16, with sums in float32: cached numbers beyond 65,504 count as that. Position p lies in block
    `block_tables[request, p // N]`; positions of a block outside 0..B-1 are skipped, and a request without any has output 0.

    Args:
        q: (D, Hq, d), float32, float16 or bfloat16 (float64 in plain torch), not scaled.
        pages: (B, N, H, row) of one layer, any strides but the last, which is 1; Hq is a multiple of H.
        block_tables: (D, M) int32 or int64; what lies past a request's last block is not looked at.
        seq_lens: (D,) int32 or int64; below 0 counts as 0, beyond M*N as M*N.
        kv_format: "float32", "bfloat16", "fp8" or "nvfp4"; the last two are uint8 pages.
        scale: of the scores; None: d^-0.5.
        num_splits: programs that share a request's positions; None: as many as keep the GPU busy.
        one_launch: the last of them to finish merges their parts; False: a second kernel does.
        backend: "torch", "triton" (a GPU, or TRITON_INTERPRET=1 set before Triton is imported), or "auto".
    Returns:
        (D, Hq, d) of q's dtype, contiguous.
    Raises:
        ValueError: an argument of the wrong type, shape, stride or device, or an unknown backend.
        ImportError: backend="triton" without Triton.
    """
    _check(q, pages, block_tables, seq_lens, kv_format, num_splits)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    positions = block_tables.shape[1] * pages.shape[1]
    by_kernel = use_triton(backend, pages)
    if not q.numel() * positions * pages.shape[0]:
        return q.new_zeros(q.shape)
    if not by_kernel:
        return paged_decode_torch(q, pages, block_tables, seq_lens, kv_format, scale)
    if q.dtype == torch.float64:
        raise ValueError("q is float64, which the kernel does not multiply; use float32, or backend='torch'")
    if num_splits is None:
        num_splits = choose_splits(q.shape[0] * pages.shape[2], positions, num_sms(q.device))
    return _launch(q, pages, block_tables, seq_lens, kv_format, scale, num_splits, one_launch)


def paged_decode_torch(q: Tensor, pages: Tensor, block_tables: Tensor, seq_lens: Tensor, kv_format: str, scale: float) -> Tensor:
    """What `paged_decode` must return, in plain torch: in q's precision, and in float32 where q has 16 bits."""
    (blocks, size, heads, _), (_, query_heads, d) = pages.shape, q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    length = block_tables.shape[1] * size  # S
    if not q.is_cuda and len(q):
        length = min(length, max(int(seq_lens.max()), 0))  # on a GPU it cannot be read without waiting
    tables = block_tables[:, : -(-length // size)].long()  # (D, m)
    inside = (tables >= 0) & (tables < blocks)
    tables = tables.masked_fill(~inside, 0)
    seen = inside.repeat_interleave(size, dim=1)[:, :length] & (torch.arange(length, device=q.device) < seq_lens.unsqueeze(1))  # (D, S)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if not length:
        return out
    at_once = max(1, TORCH_VALUES // (length * heads * d))
    for some in (slice(start, start + at_once) for start in range(0, len(q), at_once)):
        rows = pages[tables[some]].flatten(1, 2)[:, :length].transpose(1, 2)  # (r, H, S, row)
        k, v = _unpack(rows, kv_format, dtype)  # (r, H, S, d)
        hidden = ~seen[some, None, None]  # (r, 1, 1, S)
        scores = q[some].to(dtype).unflatten(1, (heads, query_heads // heads)) @ k.mT * scale  # (r, H, G, S)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0)
        out[some] = (weights @ v.masked_fill(hidden.mT, 0)).flatten(1, 2).to(q.dtype)
    return out


def _unpack(rows: Tensor, kv_format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., row) -> K and V, (..., d) each."""
    halves = rows.unflatten(-1, (2, rows.shape[-1] // 2))
    if kv_format == "nvfp4":
        packed = halves.shape[-1] * GROUP // (GROUP + 2)  # 8 bytes of values to one of scale
        return nvfp4_dequantize(halves[..., :packed], halves[..., packed:], torch.float32).to(dtype).unbind(-2)
    return (e4m3_decode(halves, dtype) if kv_format == "fp8" else halves.to(dtype)).unbind(-2)


def choose_splits(programs: int, positions: int, sms: int) -> int:
    """Into how many parts each program's positions are cut: a power of two, so that few kernels are compiled. Counts the block tables' room: lengths lie on the GPU."""
    wanted = min(-(-PROGRAMS_PER_SM * sms // programs), positions // POSITIONS_PER_SPLIT)
    return 1 << max(0, wanted.bit_length() - 1)


def _launch(q: Tensor, pages: Tensor, block_tables: Tensor, seq_lens: Tensor, kv_format: str, scale: float, num_splits: int,
            one_launch: bool) -> Tensor:
    from . import paged_attention_kernel as kernels
    from .merge_kernel import merge_kernel

    (requests, query_heads, d), heads = q.shape, pages.shape[2]
    q, block_tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, block_tables))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = requests * query_heads
    # One split needs none of these; the kernel then never touches what stands in their place.
    lse = means = maxima = totals = counters = seq_lens
    if num_splits > 1:
        lse, means, maxima, totals = (torch.empty(shape, dtype=torch.float32, device=q.device)
                                      for shape in ((rows,), (rows, num_splits, d), (rows, num_splits), (rows, num_splits)))
        counters = torch.zeros(requests * heads, dtype=torch.int32, device=q.device)
    consts, options = kernels.arguments(kv_format, d, query_heads // heads, q.dtype == torch.float32, has_e2m1_convert(q.device), num_splits, one_launch)
    kernels.paged_decode_kernel[(requests, heads, num_splits)](
        q, pages, block_tables, seq_lens.contiguous(), out, lse, means, maxima, totals, counters, scale,
        block_tables.shape[1] * pages.shape[1], heads, pages.shape[0], pages.shape[1],
        q.stride(0), q.stride(1), *pages.stride()[:3], block_tables.stride(0), **consts, **options)
    if num_splits > 1 and not one_launch:
        merge_kernel[(rows,)](means, maxima, totals, out, lse, num_splits, d, consts["BLOCK"])
    return out


def _check(q: Tensor, pages: Tensor, block_tables: Tensor, seq_lens: Tensor, kv_format: str, num_splits: int | None) -> None:
    if kv_format not in STORAGE:
        raise ValueError(f"kv_format='{kv_format}': use one of {', '.join(STORAGE)}")
    if q.dim() != 3 or not q.dtype.is_floating_point or not q.shape[2] or q.shape[2] % GROUP:
        raise ValueError(f"q must be (requests, query heads, d) float with d a multiple of {GROUP}; got {tuple(q.shape)} {q.dtype}")
    width, storage = row_width(kv_format, q.shape[2]), STORAGE[kv_format]
    if pages.dim() != 4 or pages.shape[-1] != width or pages.dtype != storage or pages.stride(-1) != 1:
        raise ValueError(f"pages of '{kv_format}' must be (blocks, block_size, KV heads, {width}) {storage} with contiguous rows; "
                         f"got {tuple(pages.shape)} {pages.dtype}, strides {pages.stride()}")
    if not pages.shape[2] or q.shape[1] % pages.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {pages.shape[2]} KV heads of pages")
    for name, tensor, dims in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dim() != dims or len(tensor) != len(q) or tensor.dtype not in (torch.int32, torch.int64):
            shape = "(requests, blocks)" if dims == 2 else "(requests,)"
            raise ValueError(f"{name} must be {shape} int32 or int64 for {len(q)} requests; got {tuple(tensor.shape)} {tensor.dtype}")
    if devices := {x.device for x in (q, block_tables, seq_lens)} - {pages.device}:
        raise ValueError(f"q, block_tables and seq_lens must be on the device of pages, {pages.device}; got {', '.join(map(str, devices))}")
    if num_splits is not None:
        need_whole("num_splits", num_splits, 1)
