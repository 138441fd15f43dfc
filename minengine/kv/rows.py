"""Row formats: what one token's cache row holds, byte by byte, and what is lost in writing it.

A row has two parts: an MLA latent and its rotary key (`row_format`), or K and V of one head (`head_format`).
Widths in bytes come from `minengine.arithmetic`; the 4- and 8-bit numbers from `minkernels`. Nothing here knows
about blocks, layers or requests. Every method takes any leading dims and runs on CPU and CUDA.

Numbers beyond a format's range saturate, infinities too: only a plain row of the input's own dtype keeps them.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable

import torch
from torch import Tensor

from minengine.arithmetic import INT_BITS, INT_GROUP, Q_BLOCK, head_row_bytes, indexer_bytes, row_bytes
from minengine.config import head_parts
from minkernels.casts import FLOAT_TINY, PLAIN, as_bytes, finite, from_bytes, store
from minkernels.fp4 import GROUP, e4m3_decode, e4m3_encode, nvfp4_dequantize, nvfp4_quantize
from minkernels.indexer import pack_keys, unpack_keys
from minkernels.rows import pack, unpack

__all__ = ["IndexerFormat", "RowFormat", "head_format", "indexer_format", "row_format"]

Pack, Unpack = Callable[[Tensor], Tensor], Callable[[Tensor, torch.dtype], Tensor]  # (..., n) values -> (..., bytes), and back
ALMOST_HALF = 0.5 - 2.0**-25  # added before floor() it rounds half up, and the number below a half down


@dataclass(frozen=True)
class RowFormat:
    """One row of one head. `storage_width` elements of `storage_dtype` are `nbytes` bytes."""

    name: str
    nbytes: int
    widths: tuple[int, int]  # values in the two parts: (latent, rope), or (K, V)
    storage_dtype: torch.dtype  # float32 or bfloat16 for plain rows, uint8 for packed ones
    storage_width: int
    _quantize: Callable[[Tensor, Tensor], Tensor]
    _dequantize: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]

    def quantize(self, a: Tensor, b: Tensor) -> Tensor:
        """(..., widths[0]), (..., widths[1]) float -> (..., storage_width) rows.

        Raises:
            ValueError: a part's last dimension is not its width.
        """
        if (a.shape[-1], b.shape[-1]) != self.widths:
            raise ValueError(f"row format '{self.name}' takes parts of {self.widths} values; got {a.shape[-1]} and {b.shape[-1]}")
        return self._quantize(a, b)

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(..., storage_width) rows -> (..., widths[0]), (..., widths[1]) of `dtype`.

        Plain rows of that dtype come back as views of `rows`.
        """
        return self._dequantize(rows, dtype)


@dataclass(frozen=True)
class IndexerFormat:
    """One sparse-attention indexer key; the same fields as RowFormat for a row of one part."""

    name: str
    nbytes: int
    width: int
    storage_dtype: torch.dtype
    storage_width: int

    def quantize(self, keys: Tensor) -> Tensor:
        """(..., width) float -> (..., storage_width)."""
        if self.name in PLAIN:
            return store(keys, self.storage_dtype)
        return pack_keys(keys)

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """(..., storage_width) -> (..., width) of `dtype`."""
        if self.name in PLAIN:
            return store(rows, dtype)
        return unpack_keys(rows, dtype)


def row_format(name: str, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> RowFormat:
    """The MLA row of that kv_cache_dtype.

    Raises:
        ConfigError: unknown name, or widths that the format cannot hold.
    """
    row = row_bytes(name, kv_lora_rank, qk_rope_head_dim)
    nbytes, widths = row.total, (kv_lora_rank, qk_rope_head_dim)
    if name in INT_BITS:
        return _int_row(INT_BITS[name], name, nbytes, widths)
    return _kernel_row(name, nbytes, widths)


def head_format(name: str, head_dim: int) -> RowFormat:
    """The row of one key/value head of that kv_cache_dtype: K's bytes, then V's.

    Raises:
        ConfigError: unknown name, or a head_dim that the format cannot divide.
    """
    nbytes = head_row_bytes(name, head_dim).total
    widths = (head_dim, head_dim)
    k_format, v_format = head_parts(name)
    if name in PLAIN or name == "fp8":
        return _kernel_row(name, nbytes, widths)
    (pack_k, unpack_k), (pack_v, unpack_v) = _HEAD_PARTS[k_format], _HEAD_PARTS[v_format]
    if k_format == v_format:  # both in one pass
        def quantize(k: Tensor, v: Tensor) -> Tensor:
            return pack_k(torch.stack((k, v), dim=-2)).flatten(-2)

        def dequantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return unpack_k(rows.unflatten(-1, (2, nbytes // 2)), dtype).unbind(-2)
    else:
        k_bytes = head_row_bytes(k_format, head_dim).total // 2

        def quantize(k: Tensor, v: Tensor) -> Tensor:
            return torch.cat((pack_k(k), pack_v(v)), dim=-1)

        def dequantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return unpack_k(rows[..., :k_bytes], dtype), unpack_v(rows[..., k_bytes:], dtype)

    return RowFormat(name, nbytes, widths, torch.uint8, nbytes, quantize, dequantize)


def indexer_format(kv_cache_dtype: str, width: int) -> IndexerFormat:
    """The indexer key kept beside rows of that kv_cache_dtype: plain beside plain ones, else E4M3 with an FP32 scale.

    Raises:
        ConfigError: a kv_cache_dtype that is not a latent row's.
    """
    nbytes = indexer_bytes(kv_cache_dtype, width).total
    dtype = PLAIN.get(kv_cache_dtype, torch.uint8)
    return IndexerFormat(kv_cache_dtype, nbytes, width, dtype, nbytes // dtype.itemsize)


def _kernel_row(name: str, nbytes: int, widths: tuple[int, int]) -> RowFormat:
    """A row that `minkernels.rows` packs: plain and unscaled fp8 ones of both kinds, and the latent rows that kernels read."""
    storage = PLAIN.get(name, torch.uint8)
    return RowFormat(name, nbytes, widths, storage, nbytes // storage.itemsize,
                     lambda a, b: pack(a, b, name), lambda rows, dtype: unpack(rows, name, *widths, dtype))


# --- int4, int3, int2: (..., n) values <-> (..., n * bits / 8 + 4) bytes; a latent's rope stays BF16 -----------

def _pack_int(bits: int, x: Tensor) -> Tensor:
    """Codes, then one FP32 scale for all n: scale = amax / (2^(bits-1) - 1).

    A value is stored as round(value / scale) plus that divisor, 8 values in `bits` bytes, lowest bits first.
    """
    most = 2 ** (bits - 1) - 1
    x = finite(x)
    scale = x.abs().amax(-1, keepdim=True).div_(most).clamp_(min=FLOAT_TINY)  # (..., 1)
    codes = (x / scale).round_().clamp_(-most, most).long() + most
    words = (_groups(codes, INT_GROUP) << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(-1, keepdim=True)  # (..., n/8, 1)
    packed = (words >> torch.arange(0, 8 * bits, 8, device=codes.device) & 255).to(torch.uint8).flatten(-2)
    return torch.cat((packed, as_bytes(scale)), dim=-1)


def _unpack_int(bits: int, raw: Tensor, dtype: torch.dtype) -> Tensor:
    packed, scale = raw.split((raw.shape[-1] - 4, 4), dim=-1)
    groups = _groups(packed, bits)  # (..., n/8, bits)
    starts = torch.arange(0, 8 * bits, bits, device=raw.device)  # where each value's bits begin; they end in that byte or the next
    low = starts // 8
    pairs = groups.index_select(-1, low).short() | groups.index_select(-1, (low + 1).clamp_(max=bits - 1)).short() << 8  # (..., n/8, 8)
    codes = (pairs >> (starts % 8).short() & 2**bits - 1).flatten(-2) - (2 ** (bits - 1) - 1)
    return store(codes * from_bytes(scale, torch.float32), dtype)


def _int_row(bits: int, name: str, nbytes: int, widths: tuple[int, int]) -> RowFormat:
    def quantize(latent: Tensor, rope: Tensor) -> Tensor:
        return torch.cat((_pack_int(bits, latent), as_bytes(store(rope, torch.bfloat16))), dim=-1)

    def dequantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        latent, rope = rows.split((nbytes - 2 * widths[1], 2 * widths[1]), dim=-1)
        return _unpack_int(bits, latent, dtype), store(from_bytes(rope, torch.bfloat16), dtype)

    return RowFormat(name, nbytes, widths, torch.uint8, nbytes, quantize, dequantize)


# --- grouped heads in groups with a scale: (..., n) values <-> (..., bytes) --------------------------------

def _pack_nvfp4(x: Tensor) -> Tensor:
    return torch.cat(nvfp4_quantize(x), dim=-1)


def _unpack_nvfp4(raw: Tensor, dtype: torch.dtype) -> Tensor:
    scales = raw.shape[-1] // (GROUP // 2 + 1)
    return nvfp4_dequantize(raw[..., :-scales], raw[..., -scales:], dtype)


def _pack_q8_0(x: Tensor) -> Tensor:
    """llama.cpp's block: FP16 d = amax/127, then 32 int8 of x/d, halves away from zero."""
    blocks = _blocks(x, 127)
    d = blocks.abs().amax(-1, keepdim=True) / 127  # (..., n/32, 1)
    scaled = blocks * _inverse(d)
    q = scaled.abs().add_(ALMOST_HALF).floor_().copysign_(scaled).to(torch.int8)
    return torch.cat((as_bytes(d.half()), q.view(torch.uint8)), dim=-1).flatten(-2)


def _unpack_q8_0(raw: Tensor, dtype: torch.dtype) -> Tensor:
    d, q = _groups(raw, 2 + Q_BLOCK).split((2, Q_BLOCK), dim=-1)
    return store(q.view(torch.int8) * from_bytes(d, torch.float16).float(), dtype).flatten(-2)


def _pack_q4_0(x: Tensor) -> Tensor:
    """llama.cpp's block: FP16 d = (the value of largest magnitude)/-8, then 16 bytes; byte j holds values j and j+16."""
    blocks = _blocks(x, 8)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # (..., n/32, 1), with its sign
    d = extreme / -8
    q = (blocks * _inverse(d)).add_(8.5).floor_().clamp_(max=15).to(torch.uint8)
    return torch.cat((as_bytes(d.half()), q[..., :16] | (q[..., 16:] << 4)), dim=-1).flatten(-2)


def _unpack_q4_0(raw: Tensor, dtype: torch.dtype) -> Tensor:
    d, packed = _groups(raw, 2 + Q_BLOCK // 2).split((2, Q_BLOCK // 2), dim=-1)
    q = torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8
    return store(q * from_bytes(d, torch.float16).float(), dtype).flatten(-2)


def _blocks(x: Tensor, levels: int) -> Tensor:
    """(..., n) -> (..., n/32, 32) float32, clamped to what `levels` steps of the largest FP16 scale reach."""
    limit = levels * torch.finfo(torch.float16).max
    return _groups(x.float().clamp(-limit, limit), Q_BLOCK)


def _inverse(d: Tensor) -> Tensor:
    """1/d, and 0 where d is 0 or its reciprocal would overflow."""
    return torch.where(d.abs() < FLOAT_TINY, 0.0, 1 / d)


def _plain_part(dtype: torch.dtype) -> tuple[Pack, Unpack]:
    return lambda x: as_bytes(store(x, dtype)), lambda raw, out: store(from_bytes(raw, dtype), out)


def _int_part(bits: int) -> tuple[Pack, Unpack]:
    return partial(_pack_int, bits), partial(_unpack_int, bits)


_HEAD_PARTS: dict[str, tuple[Pack, Unpack]] = {  # K or V of a head
    **{name: _plain_part(dtype) for name, dtype in PLAIN.items()},
    "fp8": (e4m3_encode, e4m3_decode),
    "nvfp4": (_pack_nvfp4, _unpack_nvfp4),
    "q8_0": (_pack_q8_0, _unpack_q8_0),
    "q4_0": (_pack_q4_0, _unpack_q4_0),
    **{name: _int_part(bits) for name, bits in INT_BITS.items()},
}


def _groups(x: Tensor, size: int) -> Tensor:
    """(..., n) -> (..., n/size, size)."""
    return x.unflatten(-1, (x.shape[-1] // size, size))
