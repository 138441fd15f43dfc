"""Gather of cached MLA rows, in Triton: one program a listed row. Imported only by who is about to launch or compile it.

The oracles are `minkernels.rows.gather_dequant_torch` and `gather_to_fp8_torch`. Rows may start at any byte, so what is wider than a byte
is put together from bytes.
"""
import triton
import triton.language as tl

from .aot_case import Case
from .numbers_kernel import decode_bf16, decode_e2m1_pairs, decode_e4m3, encode_bf16

FP8_GROUP = tl.constexpr(128)  # values of an fp8_ds_mla row that share one FP32 scale


@triton.jit
def find_row(pages, slot, num_slots, block_size, page_stride, row_stride):
    """Where the row of that slot starts, and whether it has one; without one, the pool's first row, of which nothing may be loaded."""
    slot = slot.to(tl.int64)
    valid = (slot >= 0) & (slot < num_slots)
    slot = tl.where(valid, slot, 0)
    return pages + (slot // block_size) * page_stride + (slot % block_size) * row_stride, valid


@triton.jit
def load_float(pointers, mask):
    """Four bytes from each pointer, at any alignment -> float32."""
    bits = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits = bits | (tl.load(pointers + byte, mask=mask, other=0).to(tl.int32) << (8 * byte))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """float32 -> float32, bfloat16 or float16: nearest, ties to even, at most that type's largest number."""
    if dtype == tl.bfloat16:
        out = encode_bf16(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        out = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    else:
        out = x
    return out


@triton.jit
def load_nvfp4_latent(row, half_width, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """The latent of a 4-bit row -> (2 * HALF_BLOCK,) float16, exact; `half_width` is RANK / 2, or 0 to load nothing."""
    byte = tl.arange(0, HALF_BLOCK)
    group = byte // 8  # 8 bytes are 16 values, one scale
    if INTERLEAVED:
        group = 8 * (group & 3) + (group >> 2)
    low, high = decode_e2m1_pairs(tl.load(row + byte, mask=byte < half_width, other=0), False)
    scale = decode_e4m3(tl.load(row + RANK // 2 + ROPE + group, mask=byte < half_width, other=0))
    return tl.interleave(low * scale, high * scale)


@triton.jit
def gather_dequant_kernel(
    pages, slots, latent_out, rope_out,  # (B, N, row) u8, (M,) int, (M, RANK), (M, ROPE)
    num_slots, block_size, page_stride, row_stride,  # strides in bytes
    FORMAT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,  # RANK and ROPE, up to the next power of two
):
    dtype: tl.constexpr = latent_out.dtype.element_ty
    i = tl.program_id(0).to(tl.int64)
    # An entry outside the pool loads nothing: reading row zero for it would cost a row's traffic.
    # (Widths of zero rather than `mask & valid`: Triton 3.9's interpreter turns a broadcast int1 into an int32.)
    row, valid = find_row(pages, tl.load(slots + i), num_slots, block_size, page_stride, row_stride)
    width = tl.where(valid, RANK, 0)
    rope_column = tl.arange(0, ROPE_BLOCK)
    rope_width = tl.where(valid, ROPE, 0)
    if FORMAT == "fp8_ds_mla":
        group, lane = tl.arange(0, RANK_BLOCK // FP8_GROUP), tl.arange(0, FP8_GROUP)
        column = group[:, None] * FP8_GROUP + lane[None, :]
        scale = load_float(row + RANK + 4 * group, group * FP8_GROUP < width)
        latent = decode_e4m3(tl.load(row + column, mask=column < width, other=0)).to(tl.float32) * scale[:, None]
        first = row + RANK + (RANK + FP8_GROUP - 1) // FP8_GROUP * 4 + 2 * rope_column
        low, high = tl.load(first, mask=rope_column < rope_width, other=0), tl.load(first + 1, mask=rope_column < rope_width, other=0)
        rope = decode_bf16(low.to(tl.int32) | (high.to(tl.int32) << 8))
        latent, rope = saturate(latent, dtype), saturate(rope, dtype)
    else:
        column = tl.arange(0, RANK_BLOCK)
        if FORMAT == "fp8":
            latent = decode_e4m3(tl.load(row + column, mask=column < width, other=0)).to(dtype)
            rope_start: tl.constexpr = RANK
        else:
            latent = load_nvfp4_latent(row, width // 2, RANK, ROPE, INTERLEAVED, RANK_BLOCK // 2).to(dtype)
            rope_start: tl.constexpr = RANK // 2
        rope = decode_e4m3(tl.load(row + rope_start + rope_column, mask=rope_column < rope_width, other=0)).to(dtype)
    tl.store(latent_out + i * RANK + column, latent, mask=column < RANK)
    tl.store(rope_out + i * ROPE + rope_column, rope, mask=rope_column < ROPE)


@triton.jit
def gather_to_fp8_kernel(
    pages, slots, out,  # (B, N, row) u8, (M,) int, (M, RANK + ROPE) u8
    num_slots, block_size, page_stride, row_stride,  # strides in bytes
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row, valid = find_row(pages, tl.load(slots + i), num_slots, block_size, page_stride, row_stride)
    latent = load_nvfp4_latent(row, tl.where(valid, RANK // 2, 0), RANK, ROPE, INTERLEAVED, RANK_BLOCK // 2)
    # A float16 of the value times 2^-8 has the value's E4M3 byte in its bits 14 to 7, subnormals included; the product is exact
    # (6 significant bits, none below 2^-18), so one rounding is left: to bit 7, ties to even.
    bits = (latent * 0.00390625).to(tl.uint16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    byte = tl.minimum((magnitude + 0x3F + ((magnitude >> 7) & 1)) >> 7, 0x7E) | ((bits >> 8) & 0x80)
    column = tl.arange(0, RANK_BLOCK)
    tl.store(out + i * (RANK + ROPE) + column, byte.to(tl.uint8), mask=column < RANK)
    column = tl.arange(0, ROPE_BLOCK)
    rope = tl.load(row + RANK // 2 + column, mask=column < tl.where(valid, ROPE, 0), other=0)
    tl.store(out + i * (RANK + ROPE) + RANK + column, rope, mask=column < ROPE)


def constants(kv_lora_rank: int, qk_rope_head_dim: int, interleaved: bool) -> dict:
    """The compile-time arguments of both kernels for rows of that shape; gather_dequant has FORMAT besides."""
    return {
        "RANK": kv_lora_rank, "ROPE": qk_rope_head_dim, "INTERLEAVED": interleaved,
        "RANK_BLOCK": max(triton.next_power_of_2(kv_lora_rank), FP8_GROUP.value), "ROPE_BLOCK": triton.next_power_of_2(qk_rope_head_dim),
    }


NUM_WARPS = 1  # 512 values are 16 a lane


def aot_cases() -> list[Case]:
    """The rows of GLM-5.3."""
    shape = constants(512, 64, True)
    place = {"num_slots": "i64", "block_size": "i32", "page_stride": "i64", "row_stride": "i32"}
    cases = []
    for row_format, width, dtype in (("nvfp4_fp8_ds_mla", 352, "fp16"), ("fp8", 576, "bf16"), ("fp8_ds_mla", 656, "bf16")):
        consts = {"FORMAT": row_format, **shape}
        signature = {"pages": "*u8", "slots": "*i32", "latent_out": f"*{dtype}", "rope_out": f"*{dtype}", **place, **dict.fromkeys(consts, "constexpr")}
        cases.append(Case(f"gather_dequant {width} to {dtype}", gather_dequant_kernel, signature, consts, NUM_WARPS, num_stages=3,
                          divisible=("page_stride", "row_stride")))
    signature = {"pages": "*u8", "slots": "*i32", "out": "*u8", **place, **dict.fromkeys(shape, "constexpr")}
    return [*cases, Case("gather_to_fp8 352", gather_to_fp8_kernel, signature, shape, NUM_WARPS, num_stages=3, divisible=("page_stride", "row_stride"))]
