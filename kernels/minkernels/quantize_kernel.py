"""MLA rows and indexer keys quantised as they are written into pages, in Triton: one program a token.

The oracles are the packers of `minkernels.rows` and `minkernels.indexer`, and bytes are equal to theirs: every division is IEEE's
(Triton's `/` is approximate), and a token without a slot stores nothing. Rows may start at any byte.
"""
import triton
import triton.language as tl

from .aot_case import Case
from .numbers_kernel import E2M1_MAX, E4M3_MAX, E4M3_TINY, FLOAT_TINY, decode_e4m3, encode_bf16, encode_e2m1, encode_e4m3, encode_e4m3_up
from .rows_kernel import FP8_GROUP, constants, find_row, saturate

FINITE_MAX = tl.constexpr(1.875 * 2.0**127)  # beyond it rounding to E4M3's three bits would reach 2^128 on the way back


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, -FINITE_MAX), FINITE_MAX)


@triton.jit
def _store_bytes(pointers, bits, count: tl.constexpr, mask):
    """The low `count` bytes of each number, lowest first, one store a byte."""
    for byte in tl.static_range(count):
        tl.store(pointers + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _store_nvfp4(latent, row, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, GROUPS: tl.constexpr):
    group, pair = tl.arange(0, GROUPS), tl.arange(0, 8)
    byte = group[:, None] * 8 + pair[None, :]  # (GROUPS, 8) bytes of two values each
    inside = byte < RANK // 2
    even = tl.load(latent + 2 * byte, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(latent + 2 * byte + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    scale_byte = encode_e4m3_up(tl.maximum(tl.math.div_rn(largest, E2M1_MAX), E4M3_TINY))  # (GROUPS,)
    scale = decode_e4m3(scale_byte).to(tl.float32)[:, None]
    codes = encode_e2m1(tl.math.div_rn(even, scale)) | (encode_e2m1(tl.math.div_rn(odd, scale)) << 4)
    tl.store(row + byte, codes.to(tl.uint8), mask=inside)
    place = group
    if INTERLEAVED:
        place = 8 * (group & 3) + (group >> 2)
    tl.store(row + RANK // 2 + ROPE + place, scale_byte.to(tl.uint8), mask=group < RANK // 16)


@triton.jit
def _store_fp8_ds_mla(latent, row, RANK: tl.constexpr, GROUPS: tl.constexpr):
    group, lane = tl.arange(0, GROUPS), tl.arange(0, FP8_GROUP)
    column = group[:, None] * FP8_GROUP + lane[None, :]
    x = _finite(tl.load(latent + column, mask=column < RANK, other=0.0).to(tl.float32))
    wanted = tl.maximum(tl.math.div_rn(tl.max(tl.abs(x), axis=1), E4M3_MAX), FLOAT_TINY)  # (GROUPS,)
    # The next power of two: mantissa bits above zero carry into the exponent, and are cut off.
    scale_bits = (wanted.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = scale_bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(row + column, encode_e4m3(tl.math.div_rn(x, scale)).to(tl.uint8), mask=column < RANK)
    _store_bytes(row + RANK + 4 * group, scale_bits, 4, group * FP8_GROUP < RANK)


@triton.jit
def quantize_rows_kernel(
    latent, rope, pages, slots,  # (T, RANK) and (T, ROPE) float, (B, N, row) u8, (T,) int
    latent_stride, rope_stride,  # of a token, in values
    num_slots, block_size, page_stride, row_stride,  # strides in bytes
    FORMAT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,  # RANK and ROPE, up to the next power of two
):
    i = tl.program_id(0).to(tl.int64)
    row, valid = find_row(pages, tl.load(slots + i), num_slots, block_size, page_stride, row_stride)
    if valid:
        latent += i * latent_stride
        rope_column = tl.arange(0, ROPE_BLOCK)
        rope_key = tl.load(rope + i * rope_stride + rope_column, mask=rope_column < ROPE, other=0.0).to(tl.float32)
        if FORMAT == "fp8_ds_mla":
            _store_fp8_ds_mla(latent, row, RANK, RANK_BLOCK // FP8_GROUP)
            rope_row = row + RANK + (RANK + FP8_GROUP - 1) // FP8_GROUP * 4
            _store_bytes(rope_row + 2 * rope_column, encode_bf16(rope_key), 2, rope_column < ROPE)
        else:
            if FORMAT == "fp8":
                column = tl.arange(0, RANK_BLOCK)
                x = tl.load(latent + column, mask=column < RANK, other=0.0).to(tl.float32)
                tl.store(row + column, encode_e4m3(x).to(tl.uint8), mask=column < RANK)
                rope_start: tl.constexpr = RANK
            else:
                _store_nvfp4(latent, row, RANK, ROPE, INTERLEAVED, RANK_BLOCK // 16)
                rope_start: tl.constexpr = RANK // 2
            tl.store(row + rope_start + rope_column, encode_e4m3(rope_key).to(tl.uint8), mask=rope_column < ROPE)


@triton.jit
def append_keys_kernel(
    keys, pages, slots,  # (T, WIDTH) float, (B, N, row) u8 or float, (T,) int
    key_stride, num_slots, block_size, page_stride, row_stride,  # in values; the last two in elements of `pages`
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,  # WIDTH up to the next power of two
):
    dtype: tl.constexpr = pages.dtype.element_ty
    i = tl.program_id(0).to(tl.int64)
    row, valid = find_row(pages, tl.load(slots + i), num_slots, block_size, page_stride, row_stride)
    if valid:
        column = tl.arange(0, BLOCK)
        key = tl.load(keys + i * key_stride + column, mask=column < WIDTH, other=0.0)
        if dtype == tl.uint8:
            key = _finite(key.to(tl.float32))
            scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(key), axis=0), E4M3_MAX), FLOAT_TINY)
            tl.store(row + column, encode_e4m3(tl.math.div_rn(key, scale)).to(tl.uint8), mask=column < WIDTH)
            place = tl.arange(0, 4)
            tl.store(row + WIDTH + place, ((scale.to(tl.int32, bitcast=True) >> (8 * place)) & 255).to(tl.uint8))
        elif dtype == key.dtype:
            tl.store(row + column, key, mask=column < WIDTH)
        else:
            tl.store(row + column, saturate(key.to(tl.float32), dtype), mask=column < WIDTH)


NUM_WARPS = 1  # 512 values are 16 a lane


def key_constants(width: int) -> dict:
    """The compile-time arguments of append_keys_kernel."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def aot_cases() -> list[Case]:
    """The rows and index keys of GLM-5.3, from bfloat16."""
    place = {"num_slots": "i64", "block_size": "i32", "page_stride": "i64", "row_stride": "i32"}
    cases = []
    for row_format, width in (("nvfp4_fp8_ds_mla", 352), ("fp8", 576), ("fp8_ds_mla", 656)):
        consts = {"FORMAT": row_format, **constants(512, 64, True)}
        signature = {"latent": "*bf16", "rope": "*bf16", "pages": "*u8", "slots": "*i64", "latent_stride": "i32", "rope_stride": "i32", **place,
                     **dict.fromkeys(consts, "constexpr")}
        cases.append(Case(f"quantize_rows {width}", quantize_rows_kernel, signature, consts, NUM_WARPS, num_stages=3,
                          divisible=("latent_stride", "rope_stride", "page_stride", "row_stride")))
    consts = key_constants(128)
    signature = {"keys": "*bf16", "pages": "*u8", "slots": "*i64", "key_stride": "i32", **place, **dict.fromkeys(consts, "constexpr")}
    return [*cases, Case("append_keys 132", append_keys_kernel, signature, consts, NUM_WARPS, num_stages=3, divisible=("key_stride",))]
