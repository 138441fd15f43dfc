"""Gather of 4-bit MLA rows, in Triton: one program a listed row.

Imported only by who is about to launch or compile it. The oracle is `minkernels.rows.gather_dequant_rows_torch`.
Numbers are decoded by moving their exponent and mantissa into a float16's fields, which gives the value times
2^-(15 - bias) with subnormals included, and one exact multiplication: the same on every GPU and in the interpreter.
"""
import triton
import triton.language as tl

from minkernels.aot_case import Case


@triton.jit
def _half_bits(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_e2m1(code):
    """uint8 codes 0..15 -> float32."""
    code = code.to(tl.int32)
    return _half_bits(((code & 7) << 9) | ((code & 8) << 12)) * 16384.0


@triton.jit
def decode_e4m3(byte):
    """uint8 -> float32; the two NaN bytes read as +-480, which no quantiser writes."""
    byte = byte.to(tl.int32)
    return _half_bits(((byte & 127) << 7) | ((byte & 128) << 8)) * 256.0


@triton.jit
def gather_dequant_rows_kernel(
    pages, slots, latent_out, rope_out,  # (B, N, row) u8, (M,) int, (M, RANK), (M, ROPE)
    num_slots, block_size, page_stride, row_stride,  # strides in bytes
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,  # RANK/2 and ROPE, up to the next power of two
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    # An entry outside the pool loads nothing: reading row zero for it would cost a row's traffic.
    # (Widths of zero rather than `mask & valid`: Triton 3.9's interpreter turns a broadcast int1 into an int32.)
    valid = (slot >= 0) & (slot < num_slots)
    half_width = tl.where(valid, RANK // 2, 0)
    rope_width = tl.where(valid, ROPE, 0)
    slot = tl.where(valid, slot, 0)
    row = pages + (slot // block_size) * page_stride + (slot % block_size) * row_stride

    byte = tl.arange(0, HALF_BLOCK)
    packed = tl.load(row + byte, mask=byte < half_width, other=0)
    group = byte // 8  # 8 bytes are 16 values, one scale
    if INTERLEAVED:
        group = 8 * (group & 3) + (group >> 2)
    scale = decode_e4m3(tl.load(row + RANK // 2 + ROPE + group, mask=byte < half_width, other=0))
    latent = tl.interleave(decode_e2m1(packed & 15) * scale, decode_e2m1(packed >> 4) * scale)
    column = tl.arange(0, 2 * HALF_BLOCK)
    tl.store(latent_out + i * RANK + column, latent.to(latent_out.dtype.element_ty), mask=column < RANK)

    column = tl.arange(0, ROPE_BLOCK)
    rope = decode_e4m3(tl.load(row + RANK // 2 + column, mask=column < rope_width, other=0))
    tl.store(rope_out + i * ROPE + column, rope.to(rope_out.dtype.element_ty), mask=column < ROPE)


def constants(kv_lora_rank: int, qk_rope_head_dim: int, interleaved: bool) -> dict:
    """The compile-time arguments for rows of that shape."""
    return {
        "RANK": kv_lora_rank, "ROPE": qk_rope_head_dim, "INTERLEAVED": interleaved,
        "HALF_BLOCK": triton.next_power_of_2(kv_lora_rank // 2), "ROPE_BLOCK": triton.next_power_of_2(qk_rope_head_dim),
    }


NUM_WARPS = 1  # 256 packed bytes are 8 a lane


def aot_cases() -> list[Case]:
    """The 352-byte row into float16."""
    consts = constants(512, 64, True)
    signature = {
        "pages": "*u8", "slots": "*i32", "latent_out": "*fp16", "rope_out": "*fp16", "num_slots": "i64", "block_size": "i32", "page_stride": "i64",
        "row_stride": "i32", **dict.fromkeys(consts, "constexpr"),
    }
    return [Case("gather_dequant 352 to fp16", gather_dequant_rows_kernel, signature, consts, NUM_WARPS, num_stages=3)]
