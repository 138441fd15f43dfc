"""Attention of absorbed queries over a list of cached MLA rows, in Triton: rows are unpacked on chip, scored, softmaxed and blended in one pass.

Imported only by who is about to launch or compile it; the oracle is `minkernels.sparse_mla.sparse_mla_decode_torch`.

A latent is held as two half tiles, and so are the queries and the blend: the even and the odd columns of a 4-bit row, which are its low
and its high nibbles, so that none is moved beside the other before the end; the left and the right half of other rows.
"""
from functools import lru_cache

import torch
import triton
import triton.language as tl

from .aot_case import ARCHITECTURES, Case
from .launch import has_e2m1_convert, has_e4m3_convert, num_sms
from .merge_kernel import INFINITY, LOG2E, is_last, log_sum_exp, merge_kernel, merge_rows
from .numbers_kernel import decode_bf16, decode_e2m1_pairs, decode_e4m3
from .sparse_mla import choose_splits

HALF_MAX = tl.constexpr(65504.0)  # float16's largest number


@triton.jit
def _part(rows, valid, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[N] pointers -> [N, BLOCK] elements from START on; zeros, and nothing loaded, past WIDTH and in rows that are not valid."""
    column = tl.arange(0, BLOCK)
    # (Widths of zero rather than `mask & valid`: Triton 3.9's interpreter turns a broadcast int1 into an int32.)
    width = tl.where(valid, WIDTH, 0)
    return tl.load(rows[:, None] + (START + column)[None, :], mask=column[None, :] < width[:, None], other=0)


@triton.jit
def load_rows(rows, valid, FORMAT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, ROPE_BLOCK: tl.constexpr):
    """[N] pointers -> the rows as stored: two parts of the latent [N, HALF], the scales, the rope. A format without one of them repeats another."""
    if FORMAT == "nvfp4_fp8_ds_mla":
        first = _part(rows, valid, 0, RANK // 2, HALF)
        rope = _part(rows, valid, RANK // 2, ROPE, ROPE_BLOCK)
        scales = _part(rows, valid, RANK // 2 + ROPE, RANK // 16, HALF // 8)
        second = first
    else:
        first = _part(rows, valid, 0, RANK, HALF)
        second = _part(rows, valid, HALF, RANK - HALF, HALF)
        if FORMAT == "fp8_ds_mla":
            GROUPS: tl.constexpr = (RANK + 127) // 128
            scales = _part(rows, valid, RANK, 4 * GROUPS, 4 * ((2 * HALF + 127) // 128))
            rope = _part(rows, valid, RANK + 4 * GROUPS, 2 * ROPE, 2 * ROPE_BLOCK)
        else:
            rope = _part(rows, valid, RANK, ROPE, ROPE_BLOCK)
            scales = rope
    return first, second, scales, rope


@triton.jit
def _operand(x, OPERAND: tl.constexpr):
    """float32 -> OPERAND; beyond float16's range it saturates, since an infinity times a weight of zero would be NaN."""
    if OPERAND == tl.float16:
        x = tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))
    return x.to(OPERAND)


@triton.jit
def _plain(x, FORMAT: tl.constexpr):
    """Elements of a float32 row, or bfloat16's bits -> float32."""
    if FORMAT == "bfloat16":
        x = decode_bf16(x)
    return x


@triton.jit
def _words(x, N: tl.constexpr, WIDTH: tl.constexpr):
    """[N, 2 * WIDTH] bytes -> [N, WIDTH] int32, two bytes each, the lower one first. Rows need no alignment."""
    low, high = tl.split(tl.reshape(x.to(tl.int32), (N, WIDTH, 2)))
    return low | (high << 8)


@triton.jit
def _e4m3(byte, NATIVE_E4M3: tl.constexpr):
    """uint8 -> float16: by the GPU's own conversion where it has one."""
    if NATIVE_E4M3:
        x = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        x = decode_e4m3(byte)
    return x


@triton.jit
def unpack_rows(first, second, scales, rope, FORMAT: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr, NATIVE_E4M3: tl.constexpr, OPERAND: tl.constexpr,
                N: tl.constexpr, HALF: tl.constexpr, ROPE_BLOCK: tl.constexpr):
    """What load_rows gave -> the latent's two halves [N, HALF] and the rope [N, ROPE_BLOCK], as OPERAND."""
    if FORMAT == "nvfp4_fp8_ds_mla":
        if INTERLEAVED:  # group 4 * column + lane lies at byte 8 * lane + column
            scales = tl.reshape(tl.permute(tl.reshape(scales, (N, 4, HALF // 32)), (0, 2, 1)), (N, HALF // 8))
        # A byte is two neighbours of one group, so eight bytes share a scale. Value times scale is exact in float16.
        scale = tl.reshape(tl.broadcast_to(_e4m3(scales, NATIVE_E4M3)[:, :, None], (N, HALF // 8, 8)), (N, HALF))
        low, high = decode_e2m1_pairs(first, NATIVE)
        a, b, r = (low * scale).to(OPERAND), (high * scale).to(OPERAND), _e4m3(rope, NATIVE_E4M3).to(OPERAND)
    elif FORMAT == "fp8":
        a, b, r = _e4m3(first, NATIVE_E4M3).to(OPERAND), _e4m3(second, NATIVE_E4M3).to(OPERAND), _e4m3(rope, NATIVE_E4M3).to(OPERAND)
    elif FORMAT == "fp8_ds_mla":
        GROUPS: tl.constexpr = (2 * HALF + 127) // 128
        low, high = tl.split(tl.reshape(_words(scales, N, 2 * GROUPS), (N, GROUPS, 2)))
        scale = (low | (high << 16)).to(tl.float32, bitcast=True)  # [N, GROUPS], one a 128 values
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, GROUPS, 2 * HALF // GROUPS)), (N, 2, HALF))
        left, right = tl.split(tl.permute(scale, (0, 2, 1)))
        a = _operand(_e4m3(first, NATIVE_E4M3).to(tl.float32) * left, OPERAND)
        b = _operand(_e4m3(second, NATIVE_E4M3).to(tl.float32) * right, OPERAND)
        r = _operand(decode_bf16(_words(rope, N, ROPE_BLOCK)), OPERAND)
    else:
        a, b, r = _operand(_plain(first, FORMAT), OPERAND), _operand(_plain(second, FORMAT), OPERAND), _operand(_plain(rope, FORMAT), OPERAND)
    return a, b, r


@triton.jit
def _query_half(rows, present, WHICH: tl.constexpr, FORMAT: tl.constexpr, RANK: tl.constexpr, OPERAND: tl.constexpr, HALF: tl.constexpr):
    """[HEADS] pointers -> [HEADS, HALF]: the columns that stand across from the rows' first or second half."""
    column = tl.arange(0, HALF)[None, :]
    if FORMAT == "nvfp4_fp8_ds_mla":
        column = 2 * column + WHICH
    else:
        column = column + WHICH * HALF
    x = tl.load(rows[:, None] + column, mask=column < tl.where(present, RANK, 0)[:, None], other=0.0)
    return _operand(x.to(tl.float32), OPERAND)


@triton.jit
def _store_halves(rows, present, a, b, FORMAT: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr):
    """The halves [HEADS, HALF] to [HEADS] pointers of RANK elements each, in the order of the latent's columns."""
    width = tl.where(present, RANK, 0)[:, None]
    a, b = a.to(rows.dtype.element_ty), b.to(rows.dtype.element_ty)
    if FORMAT == "nvfp4_fp8_ds_mla":
        column = tl.arange(0, 2 * HALF)[None, :]
        tl.store(rows[:, None] + column, tl.interleave(a, b), mask=column < width)
    else:
        column = tl.arange(0, HALF)[None, :]
        tl.store(rows[:, None] + column, a, mask=column < width)
        tl.store(rows[:, None] + (HALF + column), b, mask=HALF + column < width)


@triton.jit
def _entries(slots, start, end, num_slots, slot_stride, SCAN: tl.constexpr):
    """Of the list's part [start, end), the least range that holds its valid entries: end and start where there are none.

    Known before the loop over tiles, since a condition inside it would keep the compiler from loading ahead.
    """
    first, last = end, start
    for at in range(start, end, SCAN):
        entry = at + tl.arange(0, SCAN)
        slot = tl.load(slots + entry.to(tl.int64) * slot_stride, mask=entry < end, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < num_slots)
        first = tl.minimum(first, tl.min(tl.where(valid, entry, end), axis=0))
        last = tl.maximum(last, tl.max(tl.where(valid, entry + 1, start), axis=0))
    return first, last


@triton.jit
def sparse_mla_kernel(
    q, pages, slots,  # (T, H, RANK + ROPE) float; (B, N, row) u8, bfloat16's bits as i16, or float32; (T, K) int
    out, lse,  # (T, H, RANK) contiguous, (T, H) float32
    means, maxima, totals,  # (T * H, NUM_SPLITS, RANK), (T * H, NUM_SPLITS) twice, float32; see merge_kernel
    counters,  # (T * head blocks,) int32, zero before and after
    num_heads, num_entries, num_slots, block_size, split_entries,
    q_stride, q_head_stride, page_stride, row_stride, slots_stride, slot_stride,  # in elements
    FORMAT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, ONE_LAUNCH: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr,
):
    """Grid (T * head blocks, NUM_SPLITS): HEADS heads of a token over entries [split * split_entries, ...) of its list."""
    head_blocks = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * HEADS + tl.arange(0, HEADS)
    present = head < num_heads
    split = tl.program_id(1)

    q_rows = q + token * q_stride + head.to(tl.int64) * q_head_stride
    q_a = _query_half(q_rows, present, 0, FORMAT, RANK, OPERAND, HALF)
    q_b = _query_half(q_rows, present, 1, FORMAT, RANK, OPERAND, HALF)
    q_rope = _operand(_part(q_rows, present, RANK, ROPE, ROPE_BLOCK).to(tl.float32), OPERAND)

    largest = tl.full((HEADS,), -INFINITY, tl.float32)  # of the scores so far, in units of log2(e)
    total = tl.zeros((HEADS,), tl.float32)
    mean_a = tl.zeros((HEADS, HALF), tl.float32)
    mean_b = tl.zeros((HEADS, HALF), tl.float32)
    start = tl.minimum(split * split_entries, num_entries)
    start, end = _entries(slots + token * slots_stride, start, tl.minimum(start + split_entries, num_entries), num_slots, slot_stride, SCAN)
    for start in range(start, end, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token * slots_stride + entry.to(tl.int64) * slot_stride, mask=entry < end, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < num_slots)
        at = tl.where(valid, slot, 0).to(tl.int32)
        rows = pages + (at // block_size).to(tl.int64) * page_stride + (at % block_size).to(tl.int64) * row_stride
        first, second, scales, rope = load_rows(rows, valid, FORMAT, RANK, ROPE, HALF, ROPE_BLOCK)
        a, b, r = unpack_rows(first, second, scales, rope, FORMAT, INTERLEAVED, NATIVE, NATIVE_E4M3, OPERAND, BLOCK_N, HALF, ROPE_BLOCK)
        scores = tl.dot(q_rope, tl.trans(r), input_precision=PRECISION)  # [HEADS, BLOCK_N]
        scores = tl.dot(q_a, tl.trans(a), acc=scores, input_precision=PRECISION)
        scores = tl.dot(q_b, tl.trans(b), acc=scores, input_precision=PRECISION)
        scores = tl.where(valid[None, :], scores * LOG2E, -INFINITY)
        new = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new[:, None])
        kept = tl.exp2(largest - new)
        total = total * kept + tl.sum(weights, axis=1)
        weights = weights.to(OPERAND)
        mean_a = tl.dot(weights, a, acc=mean_a * kept[:, None], input_precision=PRECISION)
        mean_b = tl.dot(weights, b, acc=mean_b * kept[:, None], input_precision=PRECISION)
        largest = new

    row = token * num_heads + head  # [HEADS]
    if NUM_SPLITS == 1:
        inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))[:, None]
        _store_halves(out + row * RANK, present, mean_a * inverse, mean_b * inverse, FORMAT, RANK, HALF)
        tl.store(lse + row, log_sum_exp(largest, total), mask=present)
    else:
        part = row * NUM_SPLITS + split
        _store_halves(means + part * RANK, present & (total != 0), mean_a, mean_b, FORMAT, RANK, HALF)
        tl.store(maxima + part, largest, mask=present)
        tl.store(totals + part, total, mask=present)
        if ONE_LAUNCH:
            if is_last(counters + tl.program_id(0), NUM_SPLITS):
                merge_rows(means, maxima, totals, out, lse, row, present, NUM_SPLITS, RANK, 128)


COUNTERS = 1 << 14  # programs of one launch that can be merged in it; so many need no splits


@lru_cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which every launch leaves as zeros; never freed, since recorded CUDA graphs hold on to it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("sparse_mla_decode: call it once before a CUDA graph is recorded, to make the counters that launches share")
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def plan(num_heads: int, row_format: str, float32: bool) -> dict:
    """How a program is cut: heads and entries at a time, warps, stages. Seen in the ahead-of-time report: what spills least.

    Sixteen queries of 576 values take 144 registers of every thread; a program of 64 heads fits none of the two architectures.
    """
    heads = 32 if num_heads > 32 and not float32 else 16
    entries = 64 if heads == 16 and not float32 else 32
    return {"HEADS": heads, "BLOCK_N": entries, "num_warps": 8, "num_stages": 2}


def constants(kv_lora_rank: int, rope: int, row_format: str, float32: bool, native: bool, native_e4m3: bool) -> dict:
    """The compile-time arguments that follow from the row, the queries' type and the GPU."""
    return {
        "FORMAT": row_format, "RANK": kv_lora_rank, "ROPE": rope, "INTERLEAVED": kv_lora_rank == 512, "NATIVE": native,
        "NATIVE_E4M3": native_e4m3, "OPERAND": tl.float32 if float32 else tl.float16, "PRECISION": "ieee" if float32 else None,
        "HALF": max(16, triton.next_power_of_2(-(-kv_lora_rank // 2))), "ROPE_BLOCK": max(16, triton.next_power_of_2(rope)),
    }


def launch(q: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, kv_lora_rank: int, row_format: str, num_splits: int | None,
           one_launch: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_mla_decode` of checked arguments."""
    tokens, heads, width = q.shape
    entries, device = slots.shape[1], q.device
    out = torch.empty(tokens, heads, kv_lora_rank, dtype=q.dtype, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out, lse
    float32 = q.dtype == torch.float32
    cut = plan(heads, row_format, float32)
    programs = tokens * -(-heads // cut["HEADS"])
    if num_splits is None:
        num_splits = choose_splits(programs, -(-entries // cut["BLOCK_N"]), num_sms(device))
    split_entries = max(1, -(-entries // num_splits))
    means = maxima = totals = lse  # of one split nothing is kept
    if num_splits > 1:
        means = torch.empty(tokens * heads, num_splits, kv_lora_rank, dtype=torch.float32, device=device)
        maxima, totals = torch.empty(2, tokens * heads, num_splits, dtype=torch.float32, device=device)
    one_launch = one_launch and programs <= COUNTERS
    sparse_mla_kernel[(programs, num_splits)](
        q, pages.view(torch.int16) if row_format == "bfloat16" else pages, slots, out, lse, means, maxima, totals,
        _counters(device) if num_splits > 1 and one_launch else slots,
        heads, entries, pages.shape[0] * pages.shape[1], pages.shape[1], split_entries,
        q.stride(0), q.stride(1), pages.stride(0), pages.stride(1), slots.stride(0), slots.stride(1),
        **constants(kv_lora_rank, width - kv_lora_rank, row_format, float32, has_e2m1_convert(device),
                    has_e4m3_convert(device)),
        NUM_SPLITS=num_splits, ONE_LAUNCH=one_launch, SCAN=min(1024, triton.next_power_of_2(split_entries)), **cut,
    )
    if num_splits > 1 and not one_launch:
        merge_kernel[(tokens * heads,)](means, maxima, totals, out, lse, num_splits, D=kv_lora_rank, BLOCK_D=triton.next_power_of_2(kv_lora_rank))
    return out, lse


def aot_cases() -> list[Case]:
    """Rows of GLM-5.3, queries of 16 and 64 heads, four splits that are merged in the launch; four bits read natively where the GPU can.

    Queries are bfloat16, and in one case float32: a tensor core would round those, so it must have no such instruction.
    """
    pointers = {"q": "*bf16", "pages": "*u8", "slots": "*i32", "out": "*bf16",
                **dict.fromkeys(("lse", "means", "maxima", "totals"), "*fp32"), "counters": "*i32"}
    numbers = dict.fromkeys(("num_heads", "num_entries", "num_slots", "block_size", "split_entries"), "i32")
    strides = {"q_stride": "i64", "q_head_stride": "i32", "page_stride": "i64", "row_stride": "i32", "slots_stride": "i32"}
    cases = []
    for row_format, heads, float32 in (("nvfp4_fp8_ds_mla", 16, False), ("nvfp4_fp8_ds_mla", 64, False), ("fp8", 16, False), ("fp8", 64, False),
                                       ("fp8_ds_mla", 16, False), ("bfloat16", 16, False), ("nvfp4_fp8_ds_mla", 16, True)):
        cut = plan(heads, row_format, float32)
        for arch in ARCHITECTURES if row_format == "nvfp4_fp8_ds_mla" else (None,):
            consts = {"slot_stride": 1, **constants(512, 64, row_format, float32, arch == "sm_100a", True), "NUM_SPLITS": 4, "ONE_LAUNCH": True,
                      "HEADS": cut["HEADS"], "BLOCK_N": cut["BLOCK_N"], "SCAN": 512}
            wants = (*(() if float32 else ("tensor_core",)), *(("e2m1_convert",) if arch == "sm_100a" else ()))
            signature = {**pointers, **({"q": "*fp32", "out": "*fp32"} if float32 else {}), **({"pages": "*i16"} if row_format == "bfloat16" else {}), **numbers, **strides, **dict.fromkeys(consts, "constexpr")}
            cases.append(Case(
                f"sparse_mla {row_format} H={heads}" + (" float32 queries" if float32 else "") + (f" {arch}" if arch else ""), sparse_mla_kernel, signature, consts, cut["num_warps"],
                cut["num_stages"], arches=(arch,) if arch else ARCHITECTURES, divisible=tuple(strides), wants=wants))
    return cases
