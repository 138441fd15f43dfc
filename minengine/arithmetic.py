"""Every closed formula of the book, in plain Python: no torch, no numpy, nothing measured.

Units: bytes, tokens, seconds. A figure that the engine also produces (a row's width, a layout's pieces) is
computed here once and used there, so that the book and the engine cannot disagree.
"""
from __future__ import annotations

from dataclasses import dataclass

from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError

__all__ = ["RowBytes", "head_row_bytes", "indexer_bytes", "row_bytes"]

NVFP4_GROUP = 16  # values that share one E4M3 scale
FP8_DS_MLA_GROUP = 128  # values that share one FP32 scale
Q_BLOCK = 32  # values that share one FP16 scale in llama.cpp's q8_0 and q4_0


# --- rows: what one token costs in one layer --------------------------------------------------------------

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
    layout) and 352 (vLLM's 4-bit layout: 512/2 + 64 + 512/16).

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
    width = {"float32": 4, "bfloat16": 2, "fp8": 1}[name]
    return RowBytes(name, {"latent": width * rank, "rope": width * rope})


def head_row_bytes(name: str, head_dim: int) -> RowBytes:
    """One row of one key/value head: K, then V, each with its scales.

    `nvfp4` is 4 bits a value and one E4M3 scale per 16; `q8_0` and `q4_0` are llama.cpp's blocks of 32
    values, 34 and 18 bytes with their FP16 scale.

    Raises:
        ConfigError: unknown name, or a head_dim that the format cannot divide into its groups.
    """
    if name not in HEAD_DTYPES:
        raise ConfigError(f"kv_cache_dtype='{name}' is not a row of grouped heads; use one of {', '.join(HEAD_DTYPES)}")
    group = {"nvfp4": NVFP4_GROUP, "q8_0": Q_BLOCK, "q4_0": Q_BLOCK}.get(name, 1)
    if head_dim < 1 or head_dim % group:
        raise ConfigError(f"head_dim={head_dim}: kv_cache_dtype='{name}' needs a positive multiple of {group}")
    if name == "nvfp4":
        half = {"nvfp4": head_dim // 2, "scales": head_dim // NVFP4_GROUP}
        return RowBytes(name, {"key": half["nvfp4"], "key_scales": half["scales"], "value": half["nvfp4"], "value_scales": half["scales"]})
    if name in ("q8_0", "q4_0"):
        part = head_dim // Q_BLOCK * (2 + (Q_BLOCK if name == "q8_0" else Q_BLOCK // 2))
    else:
        part = head_dim * {"float32": 4, "bfloat16": 2, "fp8": 1}[name]
    return RowBytes(name, {"key": part, "value": part})


def indexer_bytes(kv_cache_dtype: str, index_head_dim: int = 128) -> RowBytes:
    """One sparse-attention indexer key, kept on `full` layers only: 132 bytes beside any packed row.

    A plain cache keeps plain keys; every packed one keeps E4M3 values and one FP32 scale.
    """
    if kv_cache_dtype in ("float32", "bfloat16"):
        return RowBytes(kv_cache_dtype, {"key": index_head_dim * (4 if kv_cache_dtype == "float32" else 2)})
    if kv_cache_dtype not in LATENT_DTYPES:
        raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}' keeps no indexer keys; use one of {', '.join(LATENT_DTYPES)}")
    return RowBytes(kv_cache_dtype, {"key": index_head_dim, "scale": 4})
