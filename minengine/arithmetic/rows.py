"""Rows: what one token leaves in one layer, in all layers, and in a session; and the row that a model's `config.json` implies."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minengine.config import LATENT_DTYPES, ConfigError, cache_fields, head_parts

__all__ = ["FP8_DS_MLA_GROUP", "INT_BITS", "INT_GROUP", "KVRow", "NVFP4_GROUP", "Q_BLOCK", "RowBytes", "bytes_per_token", "cached_tokens", "head_row_bytes",
           "indexer_bytes", "kv_row", "row_bytes", "row_of_fields", "session_bytes", "sessions_held", "untouched_state"]

NVFP4_GROUP = 16  # values that share one E4M3 scale
FP8_DS_MLA_GROUP = 128  # values that share one FP32 scale
INT_BITS = {"int4": 4, "int3": 3, "int2": 2}  # plain integers with one FP32 scale a row: a yardstick, no engine serves them
INT_GROUP = 8  # values that whole bytes hold, whatever the bits
Q_BLOCK = 32  # values that share one FP16 scale in llama.cpp's q8_0 and q4_0


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one cache row, part by part in storage order."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def span(self, part: str) -> slice:
        """Where `part` lies in the row, as a slice of its bytes."""
        start = 0
        for name, nbytes in self.parts.items():
            if name == part:
                return slice(start, start + nbytes)
            start += nbytes
        raise KeyError(f"row '{self.name}' has no part '{part}'; its parts are {', '.join(self.parts)}")


def row_bytes(name: str, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64) -> RowBytes:
    """One MLA row: the latent and the rotary key that all heads share.

    The defaults are GLM-5.3's and DeepSeek's; the totals are then 2304, 1152, 576, 656 (FlashMLA's
    layout) and 352 (vLLM's 4-bit layout: 512/2 + 64 + 512/16). `int4`, `int3` and `int2` keep a 16-bit rotary key,
    so that what they lose they lose by the latent's bits alone.

    Raises:
        ConfigError: unknown name, a rank that is no multiple of 16, or a rope width below 1.
    """
    if name not in LATENT_DTYPES:
        raise ConfigError(f"kv_cache_dtype='{name}' is not a latent row; use one of {', '.join(LATENT_DTYPES)}")
    if kv_lora_rank < 1 or kv_lora_rank % NVFP4_GROUP:
        raise ConfigError(f"kv_lora_rank={kv_lora_rank}: latent rows need a positive multiple of {NVFP4_GROUP}")
    if qk_rope_head_dim < 1:
        raise ConfigError(f"qk_rope_head_dim={qk_rope_head_dim}: use at least 1")
    rank, rope = kv_lora_rank, qk_rope_head_dim
    if name == "fp8_ds_mla":
        return RowBytes(name, {"latent": rank, "scales": 4 * -(-rank // FP8_DS_MLA_GROUP), "rope": 2 * rope})
    if name == "nvfp4_fp8_ds_mla":
        return RowBytes(name, {"latent": rank // 2, "rope": rope, "scales": rank // NVFP4_GROUP})
    if name in INT_BITS:
        return RowBytes(name, {"latent": rank * INT_BITS[name] // 8, "scale": 4, "rope": 2 * rope})
    width = {"float32": 4, "bfloat16": 2, "fp8": 1}[name]
    return RowBytes(name, {"latent": width * rank, "rope": width * rope})


def head_row_bytes(name: str, head_dim: int) -> RowBytes:
    """One row of one key/value head: K, then V, each with its scales; `name` is one format, or K's and V's as "q8_0:q4_0".

    `nvfp4` is 4 bits a value and one E4M3 scale per 16; `q8_0` and `q4_0` are llama.cpp's blocks of 32
    values, 34 and 18 bytes with their FP16 scale; `int4`, `int3` and `int2` have one FP32 scale for K and one for V.

    Raises:
        ConfigError: unknown name, or a head_dim that a format cannot divide into its groups.
    """
    parts: dict[str, int] = {}
    for part, part_format in zip(("key", "value"), head_parts(name)):
        parts |= _head_part(part, part_format, head_dim, name)
    return RowBytes(name, parts)


def _head_part(part: str, part_format: str, head_dim: int, name: str) -> dict[str, int]:
    """K or V of a head's row, in storage order; `name` is the row's, for the error."""
    group = {"nvfp4": NVFP4_GROUP, "q8_0": Q_BLOCK, "q4_0": Q_BLOCK, **dict.fromkeys(INT_BITS, INT_GROUP)}.get(part_format, 1)
    if head_dim < 1 or head_dim % group:
        raise ConfigError(f"head_dim={head_dim}: kv_cache_dtype='{name}' needs a positive multiple of {group}")
    if part_format == "nvfp4":
        return {part: head_dim // 2, f"{part}_scales": head_dim // NVFP4_GROUP}
    if part_format in INT_BITS:
        return {part: head_dim * INT_BITS[part_format] // 8, f"{part}_scale": 4}
    if part_format in ("q8_0", "q4_0"):
        return {part: head_dim // Q_BLOCK * (2 + (Q_BLOCK if part_format == "q8_0" else Q_BLOCK // 2))}
    return {part: head_dim * {"float32": 4, "bfloat16": 2, "fp8": 1}[part_format]}


def indexer_bytes(kv_cache_dtype: str, index_head_dim: int = 128) -> RowBytes:
    """One sparse-attention indexer key, kept on `full` layers only: 132 bytes beside any packed row.

    A plain cache keeps plain keys; every packed one keeps E4M3 values and one FP32 scale.
    """
    if kv_cache_dtype in ("float32", "bfloat16"):
        return RowBytes(kv_cache_dtype, {"key": index_head_dim * (4 if kv_cache_dtype == "float32" else 2)})
    if kv_cache_dtype not in LATENT_DTYPES:
        raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}' keeps no indexer keys; use one of {', '.join(LATENT_DTYPES)}")
    return RowBytes(kv_cache_dtype, {"key": index_head_dim, "scale": 4})


def bytes_per_token(row: int, layers: int, heads: int = 1, indexer: int = 0, indexer_layers: int = 0) -> int:
    """Bytes that one cached token takes in all layers: layers x heads x row, and the indexer keys of the full ones."""
    return layers * heads * row + indexer_layers * indexer


def session_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes of one session's cache, one copy of it. 146,000 tokens x 78 layers x 576 B are 6.6 GB."""
    return tokens * token_bytes


def cached_tokens(free_bytes_per_gpu: float, token_bytes: int, num_gpus: int, copies: int = 1) -> int:
    """Distinct tokens that a group of GPUs can hold when each token is kept `copies` times."""
    return int(free_bytes_per_gpu * num_gpus // (token_bytes * copies))


def sessions_held(capacity_tokens: float, session_tokens: float) -> int:
    """Whole sessions that fit in a cache of that many tokens."""
    return int(capacity_tokens // session_tokens)


def untouched_state(capacity_ratio: float, row_before: int = 576,
                    row_after: int = 352) -> float:
    """Bytes a token and layer that did not shrink, from how many more tokens fit
    after the row did.

    Solves (row_before + x) / (row_after + x) = capacity_ratio for x; 1.495 gives
    about 100.

    Raises:
        ValueError: a ratio that is not above 1, or above what the rows alone give.
    """
    if not 1 < capacity_ratio <= row_before / row_after:
        limit = row_before / row_after
        raise ValueError(f"capacity_ratio={capacity_ratio}: rows of {row_before} and "
                         f"{row_after} bytes give a ratio above 1 and at most {limit:.4g}")
    return (row_before - capacity_ratio * row_after) / (capacity_ratio - 1)


# --- model: what a config.json implies ---------------------------------------------------------------------

@dataclass(frozen=True)
class KVRow:
    """What one token of a model leaves in the cache."""

    row: RowBytes  # of one layer, and of one head of it
    layers: int
    heads: int  # 1: a latent that all heads share
    indexer: RowBytes | None  # a sparse-attention key beside the row, in `indexer_layers` of the layers
    indexer_layers: int

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.row.total, self.layers, self.heads, self.indexer.total if self.indexer else 0, self.indexer_layers)


def kv_row(config: Mapping[str, Any], kv_cache_dtype: str) -> KVRow:
    """The row that a model's `config.json` implies in a format; ConfigError as `cache_fields` and the rows' functions say."""
    return row_of_fields(cache_fields(config), kv_cache_dtype)


def row_of_fields(fields: Mapping[str, int], kv_cache_dtype: str) -> KVRow:
    """The row of what `cache_fields` found; a latent has an indexer if `index_head_dim` is above 0."""
    if "kv_lora_rank" not in fields:
        return KVRow(head_row_bytes(kv_cache_dtype, fields["head_dim"]), fields["num_hidden_layers"], fields["num_key_value_heads"], None, 0)
    row, width = row_bytes(kv_cache_dtype, fields["kv_lora_rank"], fields["qk_rope_head_dim"]), fields["index_head_dim"]
    return KVRow(row, fields["num_hidden_layers"], 1, indexer_bytes(kv_cache_dtype, width) if width else None, fields["num_indexer_layers"])
