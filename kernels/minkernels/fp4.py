"""Four- and eight-bit floating-point numbers in plain torch: the oracle of every kernel that reads them.

E2M1 (4 bits: sign, 2 exponent, 1 mantissa) has the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6. E4M3 (8 bits, no
infinity) reaches 448; its smallest step is 2^-9. NVFP4 is E2M1 with one E4M3 scale per 16 values, and, canonically,
one FP32 scale for a whole tensor. MXFP4 is E2M1 with one E8M0 scale (8 bits: a power of two) per 32 values.

All functions take any leading dims, run on CPU and CUDA, and never sync with the device.
"""
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["E2M1_MAX", "E4M3_MAX", "E4M3_TINY", "GROUP", "MX_GROUP", "e2m1_decode", "e2m1_encode", "e4m3_decode", "e4m3_encode", "e4m3_halves", "e4m3_round_up",
           "mxfp4_dequantize", "mxfp4_quantize", "nvfp4_dequantize", "nvfp4_global_scale", "nvfp4_quantize"]

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 of a code is the sign
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest positive E4M3, a subnormal
GROUP = 16  # values that share a scale
MX_GROUP = 32  # the same in MXFP4
E8M0_BIAS = 127  # byte 0 is 2^-127, 254 is 2^127, 255 is NaN
E2M1_MAX_EXPONENT = 2  # of its largest magnitude, 6 = 1.5 * 2^2


def e2m1_encode(x: Tensor) -> Tensor:
    """(..., n) float, n even -> (..., n/2) bytes, the low nibble is the even element.

    Nearest, ties to even, saturating at 6; a zero keeps its sign.
    """
    x = x.float()
    magnitude = x.abs()
    # The code is piecewise linear in the magnitude (steps of .5 below 2, of 1 below 4, of 2 above) with
    # falling slope, so it is the least of the three lines; torch.round breaks ties to even, as each line must.
    code = (magnitude * 2).round_()
    code = torch.minimum(code, magnitude.round().add_(2), out=code)
    code = torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code).clamp_(max=7)
    code = code.add_(x.signbit(), alpha=8).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


@lru_cache(maxsize=None)
def _e2m1_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256,) one integer a byte: the bits of the byte's two values side by side, low nibble first."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).squeeze(-1).to(device)


def e2m1_decode(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., n/2) bytes -> (..., n) values of a 2- or 4-byte float dtype.

    One table look-up a byte; seen to be 4 times as fast on a CPU as shifting bits into place.
    """
    pairs = _e2m1_pairs(dtype, packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


def e4m3_encode(x: Tensor) -> Tensor:
    """(...) float -> (...) bytes: nearest, ties to even, saturating at 448. A NaN stays one.

    The clamp is for torch versions and devices whose own cast turns numbers beyond 464 into NaN.
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(...) bytes -> (...) values. On a CPU the two NaN bytes read as +-480, which no encoder writes for numbers."""
    if bits.is_cuda:
        return bits.view(torch.float8_e4m3fn).to(dtype)
    halves, unit = e4m3_halves(bits)  # torch's own cast runs value by value on a CPU (14 times slower here)
    return halves.to(dtype) * unit


def e4m3_halves(bits: Tensor) -> tuple[Tensor, float]:
    """(...) bytes -> (...) float16 and the number to multiply them by, for who has a scale of their own to multiply with.

    Exponent and mantissa moved into a float16's fields give the value times 2^-8, subnormals included; sign extension already put
    the sign at the top. The two NaN bytes read as +-480.
    """
    return bits.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000).view(torch.float16), 256.0


def e4m3_round_up(x: Tensor) -> Tensor:
    """(...) positive float32 -> (...) bytes: the smallest E4M3 that is not below x, at most 448.

    Positive E4M3 bytes order as their values do, so the next one up is the byte plus one.
    """
    x = x.clamp(max=E4M3_MAX)
    nearest = e4m3_encode(x)
    return nearest + (e4m3_decode(nearest) < x)


def nvfp4_quantize(x: Tensor, scale_rounding: str = "up", global_scale: Tensor | None = None,
                   least_scale: float = E4M3_TINY) -> tuple[Tensor, Tensor]:
    """(..., n) float -> (..., n/2) packed E2M1, (..., n/16) E4M3 scale bytes.

    scale = max(amax16 / 6, least_scale); "up" (vLLM's row) takes the next E4M3, so that
    no value saturates; "nearest" is the textbook choice: less error on N(0,1), some
    values clipped.

    Args:
        x: n is a multiple of 16.
        global_scale: what all values are divided by first, () or broadcastable; see
            `nvfp4_global_scale`. vLLM's row has none.
        least_scale: 0 lets the scale of small groups round to zero, and such a group
            is stored as zeros.

    Raises:
        ValueError: n is no multiple of 16, or an unknown scale_rounding.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"nvfp4 rows are groups of {GROUP} values; "
                         f"the last dimension is {x.shape[-1]}, pad it to a multiple of {GROUP}")
    if scale_rounding not in ("up", "nearest"):
        raise ValueError(f"scale_rounding='{scale_rounding}': use 'up' or 'nearest'")
    x = x.float() if global_scale is None else x.float() / global_scale
    groups = x.unflatten(-1, (x.shape[-1] // GROUP, GROUP))  # (..., n/16, 16)
    wanted = (groups.abs().amax(-1) / E2M1_MAX).clamp(min=least_scale)
    scales = e4m3_round_up(wanted) if scale_rounding == "up" else e4m3_encode(wanted)
    divisors = e4m3_decode(scales)
    if least_scale < E4M3_TINY:
        divisors.masked_fill_(divisors == 0, torch.inf)
    return e2m1_encode(groups / divisors.unsqueeze(-1)).flatten(-2), scales


def nvfp4_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, global_scale: Tensor | None = None) -> Tensor:
    """(..., n/2) packed E2M1, (..., n/16) scale bytes -> (..., n) values.

    Value times scale has at most 6 significant bits and lies between 2^-10 and 2688: exact in every dtype. Times a
    global scale it is rounded to `dtype`.
    """
    values = e2m1_decode(packed, dtype)
    values.unflatten(-1, (scales.shape[-1], GROUP)).mul_(e4m3_decode(scales, dtype).unsqueeze(-1))
    return values if global_scale is None else (values * global_scale).to(dtype)


def nvfp4_global_scale(x: Tensor) -> Tensor:
    """(...) finite float -> () float32: canonical NVFP4's scale of a whole tensor, amax / (448 * 6), at least 2^-126.

    With it the largest group's scale is E4M3's largest, 448, and groups 2^17 times smaller still have a scale that is not zero.
    """
    return (x.float().abs().amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=2.0**-126)


def mxfp4_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) float, n a multiple of 32 -> (..., n/2) packed E2M1 and (..., n/32) E8M0 scale bytes (OCP Microscaling v1.0).

    scale = 2^(floor(log2 amax32) - 2): the largest magnitude lands in [4, 8), and what is beyond 6 there saturates.
    A group of zeros gets byte 0, and infinities become the largest float32 first.

    Raises:
        ValueError: n is no multiple of 32.
    """
    if x.shape[-1] % MX_GROUP:
        raise ValueError(f"mxfp4 rows are groups of {MX_GROUP} values; the last dimension is {x.shape[-1]}, pad it to a multiple of {MX_GROUP}")
    limit = torch.finfo(torch.float32).max
    groups = x.float().clamp(-limit, limit).unflatten(-1, (x.shape[-1] // MX_GROUP, MX_GROUP))  # (..., n/32, 32)
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1  # floor(log2 largest); frexp's mantissa is in [.5, 1)
    scales = (exponent - E2M1_MAX_EXPONENT + E8M0_BIAS).clamp(min=0).masked_fill(largest == 0, 0).to(torch.uint8)
    return e2m1_encode(groups / _e8m0_decode(scales).unsqueeze(-1)).flatten(-2), scales


def mxfp4_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(..., n/2) packed E2M1, (..., n/32) scale bytes -> (..., n) values; exact in float32 and bfloat16."""
    values = e2m1_decode(packed)
    values.unflatten(-1, (scales.shape[-1], MX_GROUP)).mul_(_e8m0_decode(scales).unsqueeze(-1))
    return values.to(dtype)


def _e8m0_decode(scales: Tensor) -> Tensor:
    """(...) bytes -> (...) powers of two, float32."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)
