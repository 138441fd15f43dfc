"""DeepSeek sparse attention's indexer over paged keys: keys written, every visible one scored, the best positions chosen exactly.

    score[q, t] = sum_h weight[q, h] * relu(query[q, h] . key[t])

A key of width d is kept as d E4M3 bytes and one FP32 scale (d + 4 bytes), or plain, in pages of float32 or bfloat16.

Shapes: T tokens or queries, Hi index heads, B blocks of N slots, G block tables of M blocks, S positions, K = top_k.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .casts import FLOAT_TINY, as_bytes, finite, from_bytes, store
from .checks import FLOATS, INDICES, need, need_whole
from .fp4 import E4M3_MAX, e4m3_encode, e4m3_halves
from .launch import interpreted, use_triton
from .rows import pages_place, scatter

__all__ = ["append_indexer_keys", "best_positions", "indexer_scores", "indexer_topk", "indexer_topk_torch", "pack_keys", "rank_scores", "runs", "unpack_keys"]

SCALE_BYTES = 4
# Work goes in runs of queries and tiles of positions whose intermediate values are at most this many, 4 MiB in float32 on a CPU,
# 256 MiB on CUDA, or one query's and one block's where that is more. On a CPU memory that small is reused from call to call and stays
# in the cache (measured: 1.6 times faster than 64 MiB); on CUDA a run should fill the GPU.
RUN_VALUES = {"cpu": 2**20, "cuda": 2**26}
CHOICE_VALUES = 8  # float32 values' worth of memory that the choice takes a position: the score, two 32-bit and two 64-bit integers, masks


# --- keys ----------------------------------------------------------------------------------------------------

def pack_keys(keys: Tensor) -> Tensor:
    """(..., d) float -> (..., d + 4) uint8; scale = amax / 448, and at least 2^-126."""
    keys = finite(keys)
    scale = keys.abs().amax(-1, keepdim=True).div_(E4M3_MAX).clamp_(min=FLOAT_TINY)  # (..., 1)
    return torch.cat((e4m3_encode(keys / scale), as_bytes(scale)), dim=-1)


def unpack_keys(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., d + 4) uint8 -> (..., d) of `dtype`."""
    halves, scale = _halves_and_scale(rows)
    return store(halves.float().mul_(scale), dtype)


def append_indexer_keys(keys: Tensor, pages: Tensor, slots: Tensor, backend: str = "auto") -> None:
    """Store each token's index key in its slot; the kernel needs no host sync.

    Args:
        keys: (T, d) float32, float16 or bfloat16, any strides.
        pages: (B, N, d + 4) uint8 or (B, N, d) float, any strides but the last, which is 1; overwritten where a slot says so.
        slots, backend: as in `minkernels.rows.quantize_rows`.

    Raises:
        ValueError: an argument of the wrong type, shape, stride or device, or an unknown backend.
        ImportError: backend="triton" without Triton.
    """
    need("keys", keys, ("tokens", "width"), FLOATS, pages.device)
    need("slots", slots, (keys.shape[0],), INDICES, pages.device)
    _check(pages, keys.shape[-1])
    if not use_triton(backend, pages):
        return scatter(pages, slots, pack_keys(keys) if pages.dtype == torch.uint8 else store(keys, pages.dtype))
    from . import quantize_kernel as kernel

    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    if len(slots) and pages.numel():
        kernel.append_keys_kernel[(len(slots),)](keys, pages, slots.contiguous(), keys.stride(0), *pages_place(pages),
                                                 **kernel.key_constants(keys.shape[-1]), num_warps=kernel.NUM_WARPS)


# --- the choice ----------------------------------------------------------------------------------------------

def indexer_topk(queries: Tensor, head_weights: Tensor, pages: Tensor, block_tables: Tensor, visible: Tensor, top_k: int,
                 rows: Tensor | None = None, most_visible: int | None = None, backend: str = "auto") -> Tensor:
    """The `top_k` best-scored of the positions that each query sees; of equal scores the lower positions win.

    A query that sees `top_k` positions or fewer gets all of them; otherwise one whose score is NaN or -inf is never chosen. Positions of a
    block outside 0..B-1 are not there: never read, never chosen.

    Args:
        queries: (T, Hi, d) float32, float16 or bfloat16. On a GPU 16-bit queries over E4M3 keys, or over keys of their own dtype, run on tensor cores.
        head_weights: (T, Hi) of such a dtype too, taken as float32, all factors of the score in them.
        pages: (B, N, d + 4) uint8 or (B, N, d) float, any strides but the last, which is 1.
        block_tables: (G, M) int32 or int64; position p of a request is slot p % N of block block_tables[g, p // N].
        visible: (T,) int32 or int64; query q sees positions below visible[q]. Blocks past them are never looked at, whatever the table says there.
        rows: (T,) int32 or int64, the table of each query; None: query i has table i. One outside 0..G-1 is an error in plain torch on a CPU;
            elsewhere, where telling would take a wait for the device, its query sees nothing.
        most_visible: no query sees more positions than this, known without asking the device; None: as many as a table has; below 0: none.
        backend: "torch", "triton" (a GPU, or TRITON_INTERPRET=1 set before Triton is imported), or "auto": Triton on a GPU where it is
            installed, else torch. The kernels need no host sync.

    Returns:
        (T, top_k) int32 positions, in no order; -1 where there are fewer.

    Raises:
        ValueError: an argument of the wrong type, shape, stride or device, a top_k below 1, or an unknown backend.
        ImportError: backend="triton" without Triton.
    """
    need("queries", queries, ("tokens", "heads", "width"), FLOATS, pages.device)
    tokens = queries.shape[0]
    need("head_weights", head_weights, (tokens, queries.shape[1]), FLOATS, pages.device)
    need("block_tables", block_tables, ("tables", "blocks"), INDICES, pages.device)
    need("visible", visible, (tokens,), INDICES, pages.device)
    _check(pages, queries.shape[-1])
    need_whole("top_k", top_k, 1)
    if rows is None and block_tables.shape[0] != queries.shape[0]:
        raise ValueError(f"block_tables has {block_tables.shape[0]} tables for {queries.shape[0]} queries; give `rows` to say which is whose")
    way = _topk_triton if use_triton(backend, pages) else indexer_topk_torch
    if rows is not None:
        need("rows", rows, (tokens,), INDICES, pages.device)
        astray = (rows < 0) | (rows >= block_tables.shape[0])
        if way is indexer_topk_torch and not pages.is_cuda and astray.any():
            raise ValueError(f"rows must name tables 0 to {block_tables.shape[0] - 1}, one a query; got {rows[astray][0].item()}")
        visible = visible.masked_fill(astray, 0)
    positions = block_tables.shape[1] * pages.shape[1]
    positions = positions if most_visible is None else min(positions, max(most_visible, 0))
    if not positions * tokens * pages.shape[0]:
        return torch.full((tokens, top_k), -1, dtype=torch.int32, device=pages.device)
    return way(queries, head_weights, pages, block_tables, visible, top_k, rows, positions)


def indexer_topk_torch(queries: Tensor, head_weights: Tensor, pages: Tensor, block_tables: Tensor, visible: Tensor, top_k: int,
                       rows: Tensor | None, positions: int) -> Tensor:
    """`indexer_topk` of the tables' first `positions`, in plain torch; where `rows` names several tables it waits for the device."""
    queries, head_weights = queries.float(), head_weights.float()
    if rows is not None and block_tables.shape[0] > 1:
        chosen = visible.new_full((len(queries), top_k), -1, dtype=torch.int32)
        for g in range(block_tables.shape[0]):
            of_table = (rows == g).nonzero().squeeze(1)
            if len(of_table):
                chosen[of_table] = indexer_topk_torch(queries[of_table], head_weights[of_table], pages, block_tables[g : g + 1], visible[of_table],
                                                      top_k, rows, positions)
        return chosen
    everything = torch.arange(top_k, device=visible.device)  # (K,)
    astray = _astray(block_tables, pages)[:, everything.clamp(max=positions - 1) // pages.shape[1]]  # (T or 1, K)
    everything = everything.expand(len(queries), -1)  # (T, K)
    everything = everything.masked_fill((everything >= visible.clamp(max=positions).unsqueeze(1)) | astray, -1)
    if positions <= top_k:
        return everything.int()
    position = torch.arange(positions, device=visible.device)
    heads, width = queries.shape[1:]
    chosen = []
    for run in runs(len(queries), max(positions, pages.shape[1] * max(heads, width)), pages.device):
        if rows is None:
            scores = indexer_scores(queries[run].unsqueeze(1), head_weights[run].unsqueeze(1), pages, block_tables[run], positions).squeeze(1)  # (r, S)
        else:
            scores = indexer_scores(queries[None, run], head_weights[None, run], pages, block_tables, positions).squeeze(0)
        # Few queries at a time: their 64-bit keys, and what comes between, then stay in a CPU's cache (measured: twice as fast).
        for few in runs(run.stop - run.start, CHOICE_VALUES * positions, pages.device):
            hidden = position >= visible[run][few].unsqueeze(1)  # (q, S)
            chosen.append(best_positions(scores[few].masked_fill_(hidden, float("-inf")), top_k))
    return torch.where(visible.unsqueeze(1) <= top_k, everything, torch.cat(chosen)).int()


def best_positions(scores: Tensor, k: int) -> Tensor:
    """The k best-scored positions, exactly; of equal scores the lower positions win.

    topk alone breaks ties as it likes; the keys of `rank_scores` have none.

    Args:
        scores: (Q, S) float32, -inf for what may not be chosen; a NaN is taken for one.

    Returns:
        (Q, k) int64 in no order; -1 where a row has fewer than k scores above -inf.
    """
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    chosen = rank_scores(scores, torch.arange(scores.shape[-1], device=scores.device)).topk(k, dim=-1, sorted=False).indices  # (Q, k)
    return chosen.masked_fill_(scores.gather(-1, chosen) == float("-inf"), -1)


def rank_scores(scores: Tensor, positions: Tensor) -> Tensor:
    """One int64 a score, no two alike: ordered as the float32 is, and of equal scores the lower position is the greater. The position is
    0xFFFFFFFF less the lower 32 bits.

    Args:
        scores: (..., S) float32, no NaN; a zero loses its sign.
        positions: (S,) int64.
    """
    bits = scores.add_(0.0).view(torch.int32)  # the sum turns -0.0, another bit pattern, into its equal 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: magnitude bits flipped, so that less is less
    return rising.long() << 32 | (0xFFFFFFFF - positions)


def runs(queries: int, values_a_query: int, device: torch.device) -> list[slice]:
    """Cut `queries` into runs whose intermediate values stay within RUN_VALUES; a run has at least one query."""
    length = max(1, RUN_VALUES[device.type] // values_a_query)
    return [slice(start, min(start + length, queries)) for start in range(0, queries, length)]


def _astray(tables: Tensor, pages: Tensor) -> Tensor:
    """Which block ids are none of the pool's."""
    return (tables < 0) | (tables >= pages.shape[0])


def indexer_scores(queries: Tensor, head_weights: Tensor, pages: Tensor, tables: Tensor, positions: int) -> Tensor:
    """The scores themselves, in plain torch: queries (G, Q, Hi, d), head_weights (G, Q, Hi), float32, Q queries a table (G, M) -> (G, Q, positions); -inf where a block is not there."""
    groups, count, heads, width = queries.shape
    size = pages.shape[1]
    blocks = -(-positions // size)
    tables = tables[:, :blocks]
    astray = _astray(tables, pages)
    tables = tables.masked_fill(astray, 0)
    tile = max(1, RUN_VALUES[pages.device.type] // (groups * size * max(width, count * heads)))  # blocks
    queries, head_weights = queries.flatten(1, 2), head_weights.reshape(groups * count, 1, heads)
    tiles = []
    for start in range(0, blocks, tile):
        ids = tables[:, start : start + tile]
        rows = pages.index_select(0, ids.reshape(-1)).view(groups, ids.shape[1] * size, -1)  # (G, s, row)
        keys, scale = _halves_and_scale(rows) if rows.dtype == torch.uint8 else (rows, None)
        dots = torch.bmm(queries, keys.float().mT).relu_()  # (G, Q*Hi, s)
        summed = torch.bmm(head_weights, dots.view(groups * count, heads, -1)).view(groups, count, -1)  # (G, Q, s)
        if scale is not None:
            summed.mul_(scale.mT)  # a scale is positive, so it may wait until after the ReLU: s products instead of s * d
        hidden = astray[:, start : start + tile].unsqueeze(-1).expand(-1, -1, size).flatten(1)  # (G, s)
        tiles.append(summed.masked_fill_(hidden.unsqueeze(1), float("-inf")))
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1))[..., :positions]


def _halves_and_scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d + 4) uint8 -> (..., d) float16 and (..., 1) float32 whose product is the key."""
    width = rows.shape[-1] - SCALE_BYTES
    halves, unit = e4m3_halves(rows[..., :width])
    return halves, from_bytes(rows[..., width:], torch.float32).mul_(unit)


def _topk_triton(queries: Tensor, head_weights: Tensor, pages: Tensor, block_tables: Tensor, visible: Tensor, top_k: int,
                 rows: Tensor | None, positions: int) -> Tensor:
    from . import indexer_kernel as kernel

    count, heads, width = queries.shape
    exact = queries.dtype != torch.float32 and pages.dtype in (torch.uint8, queries.dtype)  # 16-bit products lose nothing
    if not exact or interpreted():  # the interpreter has no products of bfloat16
        queries = queries.float()
    queries, head_weights, visible, block_tables = queries.contiguous(), head_weights.float().contiguous(), visible.contiguous(), block_tables.contiguous()
    rows = torch.arange(count, dtype=torch.int32, device=pages.device) if rows is None else rows.contiguous()
    chosen = torch.empty(count, top_k, dtype=torch.int32, device=pages.device)
    _, block_size, page_stride, row_stride = pages_place(pages)
    num_blocks, table_stride = pages.shape[0], block_tables.stride(0)
    constants = kernel.score_constants(heads, width, top_k, queries.dtype != torch.float32)
    for run in runs(count, max(positions, 1), pages.device):
        size = run.stop - run.start
        scores = torch.empty(size, positions, dtype=torch.float32, device=pages.device)
        kernel.scores_kernel[(size, -(-positions // constants["TILE"]))](
            queries[run], head_weights[run], pages, block_tables, rows[run], visible[run], scores,
            positions, num_blocks, block_size, page_stride, row_stride, table_stride, positions,
            **constants, num_warps=kernel.SCORE_WARPS)
        kernel.select_kernel[(size,)](
            scores, block_tables, rows[run], visible[run], chosen[run], positions, num_blocks, block_size, table_stride, positions,
            **kernel.select_constants(top_k), num_warps=kernel.SELECT_WARPS)
    return chosen


def _check(pages: Tensor, width: int) -> None:
    wanted = width + SCALE_BYTES if pages.dtype == torch.uint8 else width
    if pages.dim() != 3 or pages.shape[-1] != wanted or pages.stride(-1) != 1 or not (pages.dtype == torch.uint8 or pages.is_floating_point()):
        raise ValueError(f"pages must be (blocks, block_size, {width + SCALE_BYTES}) uint8 or (blocks, block_size, {width}) float, with contiguous "
                         f"rows, for keys of {width} values; got {tuple(pages.shape)} {pages.dtype}, strides {pages.stride()}")
