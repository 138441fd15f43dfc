"""Every closed formula of the book, in plain Python: no torch, no numpy, nothing measured.

Units: bytes, tokens, seconds. A figure that the engine also produces (a row's width, a layout's pieces) is
computed here once and used there, so that the book and the engine cannot disagree.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minengine.config import HEAD_DTYPES, KV_CACHE_LAYOUTS, LATENT_DTYPES, ConfigError, cache_fields, indexer_types

__all__ = [
    "GLM_5_3", "KVRow", "Roofline", "RowBytes", "Topology", "bytes_per_token", "cached_tokens", "decode_tok_s", "descriptors", "excess", "gpus",
    "head_row_bytes", "in_flight", "indexer_bytes", "interactivity", "kv_copies", "kv_row", "layer_kinds", "mla_params_per_layer", "moe_layers",
    "naive_tok_s", "roofline", "row_bytes", "row_of_fields", "session_bytes", "sessions_held", "share", "staged_bytes", "step_gain", "topology",
    "total_tok_s", "untouched_state", "wire_time_s",
]

# The article's model: the fields of its config.json that a formula here takes.
GLM_5_3: Mapping[str, int] = {
    "hidden_size": 6144, "num_hidden_layers": 78, "first_k_dense_replace": 3, "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 256, "index_head_dim": 128, "index_topk": 2048,
    "index_topk_freq": 4, "index_skip_topk_offset": 3,
}

NVFP4_GROUP = 16  # values that share one E4M3 scale
FP8_DS_MLA_GROUP = 128  # values that share one FP32 scale
INT_BITS = {"int4": 4, "int3": 3, "int2": 2}  # plain integers with one FP32 scale a row: a yardstick, no engine serves them
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


def untouched_state(capacity_ratio: float, row_before: int = 576, row_after: int = 352) -> float:
    """Bytes a token and layer that did not shrink, from how many more tokens fit after the row did.

    Solves (row_before + x) / (row_after + x) = capacity_ratio for x; 1.495 gives about 100.

    Raises:
        ValueError: a ratio that is not above 1, or above what the rows alone give.
    """
    if not 1 < capacity_ratio <= row_before / row_after:
        limit = row_before / row_after
        raise ValueError(f"capacity_ratio={capacity_ratio}: rows of {row_before} and {row_after} bytes give a ratio above 1 and at most {limit:.4g}")
    return (row_before - capacity_ratio * row_after) / (capacity_ratio - 1)


def staged_bytes(row: int = 352, unpacked: int = 576) -> int:
    """Bytes moved a selected row when it is unpacked to memory first: read it, write the copy, read the copy."""
    return row + 2 * unpacked


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


def layer_kinds(config: Mapping[str, int] = GLM_5_3) -> dict[str, int]:
    """How many layers have an indexer of their own (`full`) and how many reuse one (`shared`)."""
    kinds = indexer_types(config["num_hidden_layers"], config["index_topk_freq"], config["index_skip_topk_offset"])
    return {"full": kinds.count("full"), "shared": kinds.count("shared")}


def moe_layers(config: Mapping[str, int] = GLM_5_3) -> int:
    """Layers with routed experts: all but the leading dense ones."""
    return config["num_hidden_layers"] - config["first_k_dense_replace"]


def mla_params_per_layer(config: Mapping[str, int] = GLM_5_3) -> int:
    """Parameters of one layer's MLA projections: q down and up, latent-and-rope down, k and v up, output."""
    hidden, heads, q_rank, rank = (config[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = (config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q = hidden * q_rank + q_rank * heads * (nope + rope)
    kv = hidden * (rank + rope) + rank * heads * (nope + v)
    return q + kv + heads * v * hidden


# --- topologies: where the cache lives, how many copies ----------------------------------------------------

@dataclass(frozen=True)
class Topology:
    """One engine's GPUs. Exactly one of `tensor` and `data` is above 1, or both are 1 on a single GPU."""

    name: str
    tensor: int  # ranks that split attention by heads
    data: int  # ranks that run attention for different requests
    context: int  # ranks of a tensor group that split the cached sequence

    @property
    def gpus(self) -> int:
        return self.tensor * self.data


def topology(name: str) -> Topology:
    """Read `TP4`, `TEP8` (tensor-parallel attention, experts spread), `DEP8` (data-parallel attention), `TP8+DCP4`.

    Raises:
        ConfigError: any other spelling, or context ranks that do not divide the tensor ranks.
    """
    match = re.fullmatch(r"(TP|TEP|DEP)([1-9]\d*)(?:\+DCP([1-9]\d*))?", name)
    if not match or (match[1] == "DEP" and match[3]):
        raise ConfigError(f"topology='{name}': use TP<n>, TEP<n>, DEP<n> or TP<n>+DCP<m>, for example TP4, DEP8, TP8+DCP4")
    ranks, context = int(match[2]), int(match[3] or 1)
    if ranks % context:
        raise ConfigError(f"topology='{name}': DCP{context} must divide the {ranks} tensor-parallel ranks")
    return Topology(name, tensor=1 if match[1] == "DEP" else ranks, data=ranks if match[1] == "DEP" else 1, context=context)


def kv_copies(name: str, kv_heads: int = 1) -> int:
    """Copies of one request's cache in an engine of that topology.

    Tensor parallelism splits a cache by its heads; a latent has none to split (kv_heads=1), so each rank keeps
    it whole. With h heads, ranks beyond h repeat. Decode context parallelism splits what would be repeated.

    Raises:
        ConfigError: a topology that cannot be read, or heads and ranks that do not divide.
    """
    shape = topology(name)
    if kv_heads < 1 or max(shape.tensor, kv_heads) % min(shape.tensor, kv_heads):
        raise ConfigError(f"kv_heads={kv_heads} and the {shape.tensor} tensor-parallel ranks of '{name}': one must divide the other")
    repeats = max(1, shape.tensor // kv_heads)
    if repeats % shape.context:
        raise ConfigError(f"topology='{name}': DCP{shape.context} must divide the {repeats} copies that {kv_heads} heads leave")
    return repeats // shape.context


def gpus(prefill: str, decode: str, decoders: int) -> int:
    """GPUs of one prefill engine that feeds that many decode engines: `DEP8`, `TP4`, 4 give 24."""
    return topology(prefill).gpus + decoders * topology(decode).gpus


# --- moving: how many pieces -------------------------------------------------------------------------------

def descriptors(layout: str, tokens: int, block_size: int, layers: int, regions_per_layer: int = 1) -> int:
    """Pieces of one request's cache before merging.

    One a block where the blocks are outermost (`BLHNC`, ...), else `regions_per_layer` a layer and block:
    200,000 tokens are 15,288 at 78 layers and 1,024-token blocks, 3,125 block-major at 64.

    Raises:
        ConfigError: an unknown layout.
    """
    if layout not in KV_CACHE_LAYOUTS:
        raise ConfigError(f"kv_cache_layout='{layout}': use one of {', '.join(KV_CACHE_LAYOUTS)}")
    blocks = -(-tokens // block_size)
    return blocks if layout[0] == "B" else blocks * layers * regions_per_layer


def wire_time_s(nbytes: float, bytes_per_s: float) -> float:
    """Seconds that the bytes alone take on a link, one way."""
    return nbytes / bytes_per_s


# --- serving: tokens, users, requests ----------------------------------------------------------------------

def total_tok_s(tok_s_gpu: float, num_gpus: int) -> float:
    """Output tokens a second of a whole deployment."""
    return tok_s_gpu * num_gpus


def naive_tok_s(sessions: float, tok_s_user: float) -> float:
    """What the deployment would emit if every session always had a request in flight."""
    return sessions * tok_s_user


def in_flight(output_tok_s: float, tok_s_user: float) -> float:
    """Requests in flight on average (Little's law): 2,400 tok/s at 101 tok/s a request are 23.8.

    Exact where tok_s_user is the mean weighted by time in flight: tokens emitted / request-seconds.
    """
    return output_tok_s / tok_s_user


def interactivity(output_tokens: float, latency_s: float) -> float:
    """E2E tok/s of one user: completion tokens / whole request time, queue and first token included."""
    return output_tokens / latency_s


def decode_tok_s(itl_s: float) -> float:
    """tok/s while decoding: 1 / inter-token latency, which leaves out queue and first token."""
    return 1 / itl_s


# --- comparing ---------------------------------------------------------------------------------------------

def share(part: float, whole: float) -> float:
    """`part` as a fraction of `whole`."""
    return part / whole


def excess(value: float, baseline: float) -> float:
    """How far `value` lies above `baseline`, as a fraction of it."""
    return value / baseline - 1


def step_gain(step_share: float, before: float, after: float) -> float:
    """Fraction of a step saved when the part that takes `step_share` of it goes from `before` to `after` (Amdahl)."""
    return step_share * (1 - after / before)


@dataclass(frozen=True)
class Roofline:
    """Two lower bounds on a kernel's time."""

    compute_s: float
    memory_s: float

    @property
    def time_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """`memory` or `compute`: which of the two decides."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def roofline(flops: float, nbytes: float, peak_flops_s: float, bandwidth_bytes_s: float) -> Roofline:
    """The time that arithmetic and memory traffic each need on a machine of those peaks (Williams et al., 2009)."""
    return Roofline(flops / peak_flops_s, nbytes / bandwidth_bytes_s)
