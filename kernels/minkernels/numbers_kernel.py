"""Small floating-point numbers inside a Triton kernel: E2M1, E4M3, bfloat16 to and from float16 and float32.

Decoding moves exponent and mantissa into a float16's fields, which gives the value times 2^-(15 - bias) with subnormals included,
and multiplies by an exact power of two. Encoding rounds to nearest, ties to even, by adding and taking away a number whose last bit is the
wanted step. Both are whole-number and IEEE operations: the same bits on every GPU and in the interpreter, whose own casts to bfloat16 and
E4M3 are wrong. The oracles are in `minkernels.fp4`.

Where a GPU has the instruction for E2M1 (Blackwell's `cvt.rn.f16x2.e2m1x2`), `decode_e2m1_pairs` takes it: same results.
"""
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
E4M3_TINY = tl.constexpr(2.0**-9)
E2M1_MAX = tl.constexpr(6.0)
FLOAT_TINY = tl.constexpr(2.0**-126)


@triton.jit
def _half_bits(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """uint8 codes 0..15 -> float16."""
    code = code.to(tl.int32)
    return _half_bits(((code & 7) << 9) | ((code & 8) << 12)) * 16384.0


@triton.jit
def decode_e2m1_pairs(packed, NATIVE: tl.constexpr):
    """uint8 -> two float16 of its shape: the low nibbles (even elements), the high nibbles (odd elements)."""
    if NATIVE:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b8 byte; mov.b32 {byte, _, _, _}, $1; cvt.rn.f16x2.e2m1x2 $0, byte; }",
            "=r,r", [packed.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        low, high = _half_bits(pair & 0xFFFF), _half_bits((pair >> 16) & 0xFFFF)
    else:
        low, high = decode_e2m1(packed & 15), decode_e2m1(packed >> 4)
    return low, high


@triton.jit
def decode_e4m3(byte):
    """uint8 -> float16; the two NaN bytes read as +-480, which no quantiser writes."""
    byte = byte.to(tl.int32)
    return _half_bits(((byte & 127) << 7) | ((byte & 128) << 8)) * 256.0


@triton.jit
def decode_bf16(bits):
    """uint16 -> float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _sign_bit(x):
    """float32 -> 0 or 1, of zeros and NaNs too."""
    return (x.to(tl.int32, bitcast=True) >> 31) & 1


@triton.jit
def _nearest(x):
    """float32 below 2^22 in magnitude, not negative -> the nearest whole number, ties to even."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def encode_e2m1(x):
    """float32 -> int32 codes 0..15: nearest, ties to even, saturating at 6; a zero keeps its sign."""
    magnitude = tl.minimum(tl.abs(x), 8.0)
    # Steps of .5 below 2, of 1 below 4, of 2 above: the code is the least of three lines (see minkernels.fp4).
    code = tl.minimum(_nearest(magnitude * 2.0), tl.minimum(_nearest(magnitude) + 2.0, _nearest(magnitude * 0.5) + 4.0))
    return tl.minimum(code, 7.0).to(tl.int32) | (_sign_bit(x) << 3)


@triton.jit
def encode_e4m3(x):
    """float32 -> int32 bytes: nearest, ties to even, saturating at 448. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.minimum(bits.to(tl.float32, bitcast=True), 448.0)
    kept = magnitude.to(tl.int32, bitcast=True)
    # 20 of a float32's 23 mantissa bits go; the exponent's bias falls from 127 to 7. Below 2^-6 the steps are 2^-9.
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
    small = _nearest(magnitude * 512.0).to(tl.int32)
    byte = tl.where(magnitude < 0.015625, small, normal)
    return tl.where(bits > 0x7F800000, 0x7F, byte) | (_sign_bit(x) << 7)


@triton.jit
def encode_e4m3_up(x):
    """Positive float32 -> int32 bytes: the smallest E4M3 that is not below x, at most 448."""
    x = tl.minimum(x, 448.0)
    nearest = encode_e4m3(x)
    return nearest + (decode_e4m3(nearest).to(tl.float32) < x).to(tl.int32)


@triton.jit
def encode_bf16(x):
    """float32 -> int32, the 16 bits of the nearest bfloat16, ties to even, saturating at its largest number."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16, 0x7F7F)
    return tl.where(magnitude > 0x7F800000, 0x7FC0, rounded) | (((bits >> 31) & 1) << 15)
