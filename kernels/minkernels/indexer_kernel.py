"""The sparse-attention indexer in Triton: scores of cached keys, and the exact choice of the best.

The oracle is `minkernels.indexer.indexer_topk_torch`. `scores_kernel` runs one program a query and tile of positions, `select_kernel` one
a query. What a query does not see, and what lies in a block outside the pool, is neither loaded nor scored, and a query that sees no more than
`top_k` is not scored at all.
"""
import triton
import triton.language as tl

from .aot_case import Case
from .numbers_kernel import decode_e4m3
from .rows_kernel import load_float


@triton.jit
def scores_kernel(
    queries, head_weights, pages, block_tables, rows, visible, scores,  # (T, HEADS, WIDTH), (T, HEADS) f32, (B, N, row), (G, M), (T,), (T,), (T, S) f32
    num_positions, num_blocks, block_size, page_stride, row_stride, table_stride, score_stride,  # the strides in elements
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr,  # of the width, in one product
):
    """The products are of the queries' type: the host widens queries that are narrower than plain keys."""
    q = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    seen = tl.minimum(tl.load(visible + q), num_positions)
    if (seen > TOP_K) & (start < seen):
        operand: tl.constexpr = queries.dtype.element_ty
        position = start + tl.arange(0, TILE)
        table = block_tables + tl.load(rows + q).to(tl.int64) * table_stride
        block = tl.load(table + position // block_size, mask=position < seen, other=-1).to(tl.int64)
        there = (block >= 0) & (block < num_blocks)
        block = tl.where(there, block, 0)
        key_row = pages + block * page_stride + (position % block_size) * row_stride  # (TILE,)

        head = tl.arange(0, HEAD_BLOCK)
        key_width, query_width = tl.where(there, WIDTH, 0), tl.where(head < HEADS, WIDTH, 0)
        query_row = queries + (q * HEADS + head) * WIDTH  # (HEAD_BLOCK,)
        dots = tl.zeros((TILE, HEAD_BLOCK), dtype=tl.float32)
        for first in tl.static_range(0, WIDTH_BLOCK, PART):
            column = first + tl.arange(0, PART)
            keys = tl.load(key_row[:, None] + column[None, :], mask=column[None, :] < key_width[:, None], other=0)  # (TILE, PART)
            query = tl.load(query_row[None, :] + column[:, None], mask=column[:, None] < query_width[None, :], other=0.0)  # (PART, HEAD_BLOCK)
            if pages.dtype.element_ty == tl.uint8:
                keys = decode_e4m3(keys)
            dots = tl.dot(keys.to(operand), query, dots, input_precision="ieee")
        weight = tl.load(head_weights + q * HEADS + head, mask=head < HEADS, other=0.0)
        score = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
        if pages.dtype.element_ty == tl.uint8:
            score *= load_float(key_row + WIDTH, there)  # positive, so it may wait until after the ReLU
        tl.store(scores + q * score_stride + position, tl.where(there, score, float("-inf")), mask=position < seen)


@triton.jit
def _rising(scores, position, seen):
    """Scores at those positions -> uint32 that order as the numbers do, 0.0 and -0.0 alike; 0 for NaN, -inf and what is not seen."""
    score = tl.load(scores + position, mask=position < seen, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    rising = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score > float("-inf"), rising, 0)


@triton.jit
def select_kernel(
    scores, block_tables, rows, visible, chosen,  # (T, S) f32, (G, M), (T,), (T,), (T, TOP_K) i32
    num_positions, num_blocks, block_size, table_stride, score_stride, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, TILE: tl.constexpr,
):
    """The TOP_K best positions in rising order, then -1; of equal scores the lower positions."""
    q = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible + q), num_positions).to(tl.int32)
    chosen += q * TOP_K
    scores += q * score_stride
    place = tl.arange(0, TOP_BLOCK)
    if seen <= TOP_K:
        table = block_tables + tl.load(rows + q).to(tl.int64) * table_stride
        block = tl.load(table + place // block_size, mask=place < seen, other=-1)
        tl.store(chosen + place, tl.where((block >= 0) & (block < num_blocks), place, -1), mask=place < TOP_K)
    else:
        # Radix select: the TOP_K-th best number, eight bits at a time from the top. `left` counts the numbers still to be taken among
        # those that begin with `prefix`; all that lie above them are taken.
        lane, digit = tl.arange(0, TILE), tl.arange(0, 256)
        prefix = tl.full((), 0, tl.uint32)
        left = tl.full((), TOP_K, tl.int32)
        for level in tl.static_range(4):
            counts = tl.zeros((256,), dtype=tl.int32)
            for start in range(0, seen, TILE):
                rising = _rising(scores, start + lane, seen)
                among = rising != 0
                if level > 0:
                    among = among & ((rising >> (32 - 8 * level)) == prefix)
                counts += tl.histogram(((rising >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=among)
            total = tl.sum(counts, axis=0)
            if level == 0:
                left = tl.minimum(left, total)
            above = total - tl.cumsum(counts, axis=0)  # with a greater digit
            here = (above < left) & (above + counts >= left)  # one digit
            prefix = (prefix << 8) | tl.sum(tl.where(here, digit, 0), axis=0).to(tl.uint32)
            left -= tl.sum(tl.where(here, above, 0), axis=0)
        written = tl.full((), 0, tl.int32)
        for start in range(0, seen, TILE):
            rising = _rising(scores, start + lane, seen)
            tie = (rising == prefix).to(tl.int32)
            taken = (rising > prefix).to(tl.int32) | tl.where(tl.cumsum(tie, axis=0) <= left, tie, 0)
            tl.store(chosen + written + tl.cumsum(taken, axis=0) - 1, start + lane, mask=taken == 1)
            left -= tl.minimum(left, tl.sum(tie, axis=0))
            written += tl.sum(taken, axis=0)
        tl.store(chosen + place, -1, mask=(place >= written) & (place < TOP_K))


SCORE_WARPS = 4
SELECT_TILE, SELECT_WARPS = 2048, 16


def score_constants(heads: int, width: int, top_k: int, sixteen_bits: bool) -> dict:
    """The compile-time arguments of scores_kernel; a side of a tensor-core product is at least 16.

    float32 products take small parts, which fit in registers, and tiles of fewer than 64 positions: from 64 on Triton gives them to
    Blackwell's tensor cores as TF32, "ieee" or not.
    """
    width_block = max(16, triton.next_power_of_2(width))
    return {"HEADS": heads, "WIDTH": width, "TOP_K": top_k, "HEAD_BLOCK": max(16, triton.next_power_of_2(heads)), "WIDTH_BLOCK": width_block,
            "TILE": 128 if sixteen_bits else 32, "PART": width_block if sixteen_bits else min(width_block, 32)}


def select_constants(top_k: int) -> dict:
    return {"TOP_K": top_k, "TOP_BLOCK": triton.next_power_of_2(top_k), "TILE": SELECT_TILE}


def aot_cases() -> list[Case]:
    """GLM-5.3's indexer over 132-byte keys, and its choice."""
    cases = []
    for dtype, wants in (("bf16", ("tensor_core",)), ("fp32", ())):
        consts = score_constants(32, 128, 2048, dtype == "bf16")
        signature = {
            "queries": f"*{dtype}", "head_weights": "*fp32", "pages": "*u8", "block_tables": "*i32", "rows": "*i32", "visible": "*i32", "scores": "*fp32",
            "num_positions": "i32", "num_blocks": "i32", "block_size": "i32", "page_stride": "i64", "row_stride": "i32", "table_stride": "i32", "score_stride": "i64",
            **dict.fromkeys(consts, "constexpr"),
        }
        cases.append(Case(f"indexer_scores 132 with {dtype} queries", scores_kernel, signature, consts, SCORE_WARPS, num_stages=3, wants=wants,
                          divisible=("num_positions", "block_size", "score_stride")))
    consts = select_constants(2048)
    signature = {"scores": "*fp32", "block_tables": "*i32", "rows": "*i32", "visible": "*i32", "chosen": "*i32", "num_positions": "i32", "num_blocks": "i32",
                 "block_size": "i32", "table_stride": "i32", "score_stride": "i64", **dict.fromkeys(consts, "constexpr")}
    return [*cases, Case("indexer_select 2048", select_kernel, signature, consts, SELECT_WARPS, num_stages=3,
                         divisible=("num_positions", "block_size", "score_stride"))]
