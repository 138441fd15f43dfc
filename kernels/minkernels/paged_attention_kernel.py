"""Decode attention of grouped heads over a paged cache, in Triton: one program a (request, KV head, split of its positions).

Imported only by who is about to launch or compile it; the oracle is `minkernels.paged_attention.paged_decode_torch`.

Scores stand on their side, [positions, heads], and so does the blend, [columns, heads]: the positions are the tensor core's long side and the
few query heads of a group its short one. Of 4-bit rows the even and the odd columns are two tiles, the low and the high nibbles, so that none
is ever moved beside the other; the queries are read the same way, and the blend is put in order once, at the end.
"""
import triton
import triton.language as tl

from .aot_case import Case
from .merge_kernel import INFINITY, LOG2E, is_last, merge_rows
from .numbers_kernel import decode_e2m1_pairs, decode_e4m3

HALF_MAX = tl.constexpr(65504.0)  # float16's largest number


@triton.jit
def _operand(x, OPERAND: tl.constexpr):
    """Any float -> OPERAND; what float16 cannot hold saturates, for an infinity times a weight of zero would be NaN."""
    if OPERAND == tl.float16:
        x = x.to(tl.float32)
        x = tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))
    return x.to(OPERAND)


@triton.jit
def _load(rows, width, START: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr = 1):
    """[N] pointers, [N] widths -> [N, BLOCK] elements START, START + STEP, ...; zeros past `width` of them, where nothing is loaded."""
    column = tl.arange(0, BLOCK)
    return tl.load(rows[:, None] + (START + STEP * column)[None, :], mask=column[None, :] < width[:, None], other=0)


@triton.jit
def _whole(rows, valid, START: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr):
    """K or V of the rows, START elements from their begin -> [N, BLOCK] OPERAND; zeros past HEAD_DIM and in rows that are not valid."""
    # (Widths of zero rather than `mask & valid`: Triton 3.9's interpreter turns a broadcast int1 into an int32.)
    x = _load(rows, tl.where(valid, HEAD_DIM, 0), START, BLOCK)
    if FORMAT == "fp8":
        x = decode_e4m3(x).to(OPERAND)
    else:
        x = _operand(x, OPERAND)
    return x


@triton.jit
def _halves(rows, valid, START: tl.constexpr, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr, OPERAND: tl.constexpr,
            N: tl.constexpr, BLOCK: tl.constexpr):
    """4-bit K or V of the rows -> its even and its odd columns, [N, BLOCK] OPERAND each."""
    packed = _load(rows, tl.where(valid, HEAD_DIM // 2, 0), START, BLOCK)
    scales = decode_e4m3(_load(rows, tl.where(valid, HEAD_DIM // 16, 0), START + HEAD_DIM // 2, BLOCK // 8))
    # A byte is two neighbours of one group, so eight bytes share a scale. Value times scale is exact in float16.
    scale = tl.reshape(tl.broadcast_to(scales[:, :, None], (N, BLOCK // 8, 8)), (N, BLOCK))
    even, odd = decode_e2m1_pairs(packed, NATIVE)
    return (even * scale).to(OPERAND), (odd * scale).to(OPERAND)


@triton.jit
def _queries(rows, present, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr):
    """[HEADS] pointers -> [BLOCK, HEADS] twice: the even and the odd columns for 4-bit rows, all of them and again for others."""
    if FORMAT == "nvfp4":
        width = tl.where(present, HEAD_DIM // 2, 0)
        first, second = _load(rows, width, 0, BLOCK, 2), _load(rows, width, 1, BLOCK, 2)
    else:
        first = _load(rows, tl.where(present, HEAD_DIM, 0), 0, BLOCK)
        second = first
    return tl.trans(_operand(first, OPERAND)), tl.trans(_operand(second, OPERAND))


@triton.jit
def _in_order(even, odd, FORMAT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, HEADS] -> [HEADS, columns]."""
    if FORMAT == "nvfp4":
        both = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (HEADS, 2 * BLOCK))
    else:
        both = tl.trans(even)
    return both


@triton.jit
def paged_decode_kernel(
    q, pages, block_tables, seq_lens,  # (D, H * GROUP, HEAD_DIM), (B, N, H, row), (D, M) int, (D,) int
    out, lse,  # (D, H * GROUP, HEAD_DIM) contiguous; (D, H * GROUP) float32, written where there are splits
    means, maxima, totals,  # (D * H * GROUP, NUM_SPLITS, HEAD_DIM), (D * H * GROUP, NUM_SPLITS) twice, float32; see merge_kernel
    counters,  # (D * H,) int32, zero before and after
    scale, num_positions, num_heads, num_blocks, block_size,  # positions: those that a block table has room for
    q_stride, q_head_stride, page_stride, row_stride, head_stride, table_stride,  # in elements
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, NUM_SPLITS: tl.constexpr, ONE_LAUNCH: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):
    """Grid (D, H, NUM_SPLITS). HEADS is GROUP, BLOCK the head's columns (4-bit: half of them), each up to a power of two that tl.dot takes."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, HEADS)
    present = member < GROUP
    head = kv_head * GROUP + member
    q_first, q_second = _queries(q + request * q_stride + head.to(tl.int64) * q_head_stride, present, HEAD_DIM, FORMAT, OPERAND, BLOCK)

    seq_len = tl.load(seq_lens + request).to(tl.int64)
    seq_len = tl.maximum(tl.minimum(seq_len, num_positions), 0).to(tl.int32)
    # Whole tiles a split, so that only the last one of the sequence has rows masked away.
    split_len = tl.cdiv(tl.cdiv(seq_len, NUM_SPLITS), BLOCK_N) * BLOCK_N
    end = tl.minimum((split + 1) * split_len, seq_len)
    largest = tl.full((HEADS,), -INFINITY, tl.float32)  # of the scores so far, in units of log2(e)
    total = tl.zeros((HEADS,), tl.float32)
    mean = tl.zeros((BLOCK, HEADS), tl.float32)
    mean_odd = mean
    for start in range(split * split_len, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        block = tl.load(block_tables + request * table_stride + position // block_size, mask=position < end, other=-1)
        valid = (block >= 0) & (block < num_blocks)
        rows = (pages + tl.where(valid, block, 0).to(tl.int64) * page_stride + (position % block_size).to(tl.int64) * row_stride
                + kv_head.to(tl.int64) * head_stride)
        if FORMAT == "nvfp4":
            even, odd = _halves(rows, valid, 0, HEAD_DIM, NATIVE, OPERAND, BLOCK_N, BLOCK)
            scores = tl.dot(even, q_first, input_precision=PRECISION)  # [BLOCK_N, HEADS]
            scores = tl.dot(odd, q_second, acc=scores, input_precision=PRECISION)
        else:
            scores = tl.dot(_whole(rows, valid, 0, HEAD_DIM, FORMAT, OPERAND, BLOCK), q_first, input_precision=PRECISION)
        scores = tl.where(valid[:, None], scores * (scale * LOG2E), -INFINITY)
        new = tl.maximum(largest, tl.max(scores, axis=0))
        base = tl.where(new == -INFINITY, 0.0, new)  # no valid row yet
        weights = tl.exp2(scores - base[None, :])
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weights, axis=0)
        weights = weights.to(OPERAND)
        if FORMAT == "nvfp4":
            even, odd = _halves(rows, valid, HEAD_DIM // 2 + HEAD_DIM // 16, HEAD_DIM, NATIVE, OPERAND, BLOCK_N, BLOCK)
            mean = tl.dot(tl.trans(even), weights, acc=mean * kept[None, :], input_precision=PRECISION)
            mean_odd = tl.dot(tl.trans(odd), weights, acc=mean_odd * kept[None, :], input_precision=PRECISION)
        else:
            values = _whole(rows, valid, HEAD_DIM, HEAD_DIM, FORMAT, OPERAND, BLOCK)
            mean = tl.dot(tl.trans(values), weights, acc=mean * kept[None, :], input_precision=PRECISION)
        largest = new

    row = request * num_heads * GROUP + head  # [HEADS]
    column = tl.arange(0, 2 * BLOCK if FORMAT == "nvfp4" else BLOCK)
    if NUM_SPLITS == 1:
        inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
        result = _in_order(mean * inverse[None, :], mean_odd * inverse[None, :], FORMAT, HEADS, BLOCK)
        tl.store(out + row[:, None] * HEAD_DIM + column[None, :], result.to(out.dtype.element_ty),
                 mask=column[None, :] < tl.where(present, HEAD_DIM, 0)[:, None])
    else:
        part = row * NUM_SPLITS + split
        width = tl.where(present & (total != 0), HEAD_DIM, 0)
        tl.store(means + part[:, None] * HEAD_DIM + column[None, :], _in_order(mean, mean_odd, FORMAT, HEADS, BLOCK),
                 mask=column[None, :] < width[:, None])
        tl.store(maxima + part, largest, mask=present)
        tl.store(totals + part, total, mask=present)
        if ONE_LAUNCH:
            if is_last(counters + request * num_heads + kv_head, NUM_SPLITS):
                merge_rows(means, maxima, totals, out, lse, row, present, NUM_SPLITS, HEAD_DIM, BLOCK)


def arguments(kv_format: str, head_dim: int, group: int, float_queries: bool, native: bool, num_splits: int, one_launch: bool) -> tuple[dict, dict]:
    """The compile-time arguments for that shape, and the launch's num_warps and num_stages.

    float32 queries are multiplied in float32, which no tensor core does. Triton 3.7 takes Blackwell's all the same, in TF32 and against
    input_precision="ieee", where an operand was widened from a narrower number; it does not where a program has 16 warps.
    """
    columns = head_dim // 2 if kv_format == "nvfp4" else head_dim
    return {
        "FORMAT": kv_format, "HEAD_DIM": head_dim, "GROUP": group, "NATIVE": native, "OPERAND": tl.float32 if float_queries else tl.float16,
        "PRECISION": "ieee", "NUM_SPLITS": num_splits, "ONE_LAUNCH": one_launch, "HEADS": max(16, triton.next_power_of_2(group)),
        "BLOCK_N": 32 if float_queries else 64, "BLOCK": max(16, triton.next_power_of_2(columns)),
    }, {"num_warps": 16, "num_stages": 2} if float_queries else {"num_warps": 4, "num_stages": 3}


def aot_cases() -> list[Case]:
    """Llama's heads of 128 in groups of 4, eight splits that merge in the same launch; 16-bit queries, and float32 ones where rows are widened."""
    both = ("sm_90a", "sm_100a")
    return [_case("bfloat16", both), _case("fp8", both), _case("nvfp4", ("sm_90a",)), _case("nvfp4", ("sm_100a",), native=True),
            _case("float32", both, float_queries=True), _case("nvfp4", both, float_queries=True)]


def _case(kv_format: str, arches: tuple[str, ...], native: bool = False, float_queries: bool = False) -> Case:
    consts, options = arguments(kv_format, 128, 4, float_queries, native, 8, True)
    query = "*fp32" if float_queries else "*bf16"
    strides = ("q_stride", "q_head_stride", "page_stride", "row_stride", "head_stride")
    signature = {
        "q": query, "pages": {"float32": "*fp32", "bfloat16": "*bf16"}.get(kv_format, "*u8"), "block_tables": "*i32", "seq_lens": "*i32", "out": query,
        **dict.fromkeys(("lse", "means", "maxima", "totals"), "*fp32"), "counters": "*i32", "scale": "fp32",
        **dict.fromkeys(("num_positions", "num_heads", "num_blocks", "block_size", *strides, "table_stride"), "i32"), **dict.fromkeys(consts, "constexpr"),
    }
    name = f"paged_decode {kv_format}{' native' if native else ''}{' float32 queries' if float_queries else ''}"
    wants = ("e2m1_convert",) * native + ("tensor_core",) * (not float_queries)
    return Case(name, paged_decode_kernel, signature, consts, **options, arches=arches, wants=wants, divisible=("block_size", *strides))
