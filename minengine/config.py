"""What a model is, read from its `config.json` or GGUF header; and the names of formats and layouts.

No torch here: the scheduler, the simulator and a browser's Python import this file.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Mapping

__all__ = ["ConfigError", "GlmConfig", "LlamaConfig", "ModelConfig", "cache_fields", "head_parts", "model_config"]

KV_CACHE_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LATENT_DTYPES = ("float32", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_fp8_ds_mla", "int4", "int3", "int2")
HEAD_DTYPES = ("float32", "bfloat16", "fp8", "nvfp4", "q8_0", "q4_0", "int4", "int3", "int2")
KERNEL_DTYPES = ("float32", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_fp8_ds_mla", "nvfp4")  # rows that the Triton kernels read
ROW_LAYERS = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention")  # `layer_types` that keep a row of every token


class ConfigError(ValueError):
    """An option or a model that this engine cannot run; the message names the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields every decoder has, under their Hugging Face names."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int  # width of a dense MLP
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    # How the cache sees the model: heads that own a row, and the two parts of a row.
    @property
    def kv_heads(self) -> int:
        raise TypeError("use LlamaConfig or GlmConfig")

    @property
    def kv_widths(self) -> tuple[int, int]:
        """Values in the two parts of one head's row: (K, V), or (latent, rope key)."""
        raise TypeError("use LlamaConfig or GlmConfig")

    @property
    def is_latent(self) -> bool:
        """True when the row is an MLA latent that all heads share."""
        return False

    @property
    def num_indexer_layers(self) -> int:
        """Layers that keep sparse-attention indexer keys."""
        return 0

    @property
    def indexer_width(self) -> int:
        """Values of one indexer key; 0 without an indexer."""
        return 0


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """`LlamaForCausalLM`: grouped-head attention, dense SwiGLU MLP."""

    num_key_value_heads: int
    head_dim: int

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def kv_widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim


@dataclass(frozen=True, kw_only=True)
class GlmConfig(ModelConfig):
    """`GlmMoeDsaForCausalLM`: MLA latent cache, DSA indexer, mixture of experts with a shared expert."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    n_group: int
    topk_group: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]  # "full" or "shared", one a layer
    mlp_layer_types: tuple[str, ...]  # "dense" or "sparse", one a layer

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def kv_widths(self) -> tuple[int, int]:
        return self.kv_lora_rank, self.qk_rope_head_dim

    @property
    def is_latent(self) -> bool:
        return True

    @property
    def num_indexer_layers(self) -> int:
        return sum(kind == "full" for kind in self.indexer_types)

    @property
    def indexer_width(self) -> int:
        return self.index_head_dim


def head_parts(kv_cache_dtype: str) -> tuple[str, str]:
    """The formats of K and of V in a row of grouped heads: "q8_0" is both, "q8_0:q4_0" is K's and then V's.

    Raises:
        ConfigError: a name that is no format, or a pair of one format with itself, which has a shorter name.
    """
    if kv_cache_dtype in HEAD_DTYPES:
        return kv_cache_dtype, kv_cache_dtype
    k, colon, v = kv_cache_dtype.partition(":")
    if not colon:
        raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}' is not a row of grouped heads; use one of {', '.join(HEAD_DTYPES)}")
    for part, name in (("K", k), ("V", v)):
        if name not in HEAD_DTYPES:
            raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}': '{name}' is no format of {part}; use one of {', '.join(HEAD_DTYPES)} on each side")
    if k == v:
        raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}': K and V are alike, so use kv_cache_dtype='{k}'")
    return k, v


def indexer_types(num_layers: int, freq: int, offset: int) -> tuple[str, ...]:
    """Which layers score for themselves (`full`) and which reuse the last full layer's choice (`shared`).

    Layer i is full iff max(i - offset + 1, 0) % freq == 0; GLM-5.3 has freq 4 and offset 3.
    """
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))


def _indexer_types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The layers' kinds as a config may state them: a list, a pattern of F and S, or the rule's two numbers."""
    stated = hf.get("indexer_types") or hf.get("index_topk_pattern")
    if stated is None:
        freq, offset = _count(hf, "index_topk_freq", 1, 0), _count(hf, "index_skip_topk_offset", 2, 0)
        return indexer_types(num_layers, max(freq, 1), offset)
    if isinstance(stated, (list, tuple, str)):
        kinds = tuple({"F": "full", "S": "shared"}.get(str(kind), kind) for kind in stated)
        if len(kinds) == num_layers and all(kind in ("full", "shared") for kind in kinds):
            return kinds
    raise ConfigError(f"config.json: field 'indexer_types' must name 'full' or 'shared' for each of {num_layers} layers; got {_shown(stated)}")


def _shown(value: Any) -> str:
    """A config's value as its file has it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _count(hf: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of a config; a field that is null is a field that is absent."""
    value = default if hf.get(name) is None else hf[name]
    if value is None:
        raise ConfigError(f"config.json: field '{name}' is missing; take the whole file of an MLA or grouped-head model")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"config.json: field '{name}' is {_shown(value)}; it must be a whole number of at least {least}")
    return value


def cache_fields(hf: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a `config.json` that decide what one token leaves in the cache.

    Wider than `model_config`: any model that caches MLA latents (it has a `kv_lora_rank`) or grouped heads, whether
    this engine runs it or not. The language part (`text_config`) of a multimodal model counts.

    Returns:
        `num_hidden_layers`, and either `kv_lora_rank`, `qk_rope_head_dim`, `num_indexer_layers`, `index_head_dim`
        (both 0 without a sparse-attention indexer) or `num_key_value_heads`, `head_dim`.

    Raises:
        ConfigError: a field is missing or no count, or some layers do not keep one row of every token.
    """
    if hf.get("num_hidden_layers") is None and isinstance(hf.get("text_config"), Mapping):
        hf = hf["text_config"]
    layers = _count(hf, "num_hidden_layers")
    kinds = hf.get("layer_types") or []
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if kind not in ROW_LAYERS:
            raise ConfigError(f"config.json: field 'layer_types' has {_shown(kind)}, which keeps no row of every token; "
                              "take a model without such layers")
    window = _count(hf, "sliding_window", 0, 0)
    if 0 < window < _count(hf, "max_position_embeddings", 0, 0) and hf.get("use_sliding_window") is not False:
        raise ConfigError(f"config.json: field 'sliding_window' is {window}, so older rows are dropped; take a model that keeps every token")
    if hf.get("kv_lora_rank") is not None:
        rank, rope, width = _count(hf, "kv_lora_rank"), _count(hf, "qk_rope_head_dim"), _count(hf, "index_head_dim", 0, 0)
        indexers = _indexer_types(hf, layers).count("full") if width else 0
        return {"num_hidden_layers": layers, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "num_indexer_layers": indexers, "index_head_dim": width}
    heads = _count(hf, "num_attention_heads" if hf.get("num_key_value_heads") is None else "num_key_value_heads")
    if hf.get("head_dim") is None:
        queries = _count(hf, "num_attention_heads")
        width = _count(hf, "hidden_size", least=queries) // queries
    else:
        width = _count(hf, "head_dim")
    if _count(hf, "v_head_dim", width, 0) != width:
        raise ConfigError(f"config.json: field 'v_head_dim' is {hf['v_head_dim']} beside keys of {width}; "
                          "take a model whose keys and values are equally wide")
    return {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": width}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Parse a Hugging Face `config.json`.

    Raises:
        ConfigError: the architecture is not one of the two, or a needed field is missing.
    """
    names = hf.get("architectures") or []
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    eos = hf.get("eos_token_id")

    def need(name: str) -> int:
        """A count that the model cannot be built without."""
        value = hf.get(name)
        if value is None:
            raise ConfigError(f"config.json: field '{name}' is missing; the model directory is incomplete, save it again with save_pretrained()")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: field '{name}' is {value!r}; it must be a whole number of at least 1")
        return value

    def number(name: str, default: float, source: Mapping[str, Any] = hf) -> float:
        value = default if source.get(name) is None else source[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"config.json: field '{name}' is {value!r}; it must be a positive number")
        return value

    common = dict(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_hidden_layers=need("num_hidden_layers"),
        num_attention_heads=need("num_attention_heads"),
        intermediate_size=need("intermediate_size"),
        rms_norm_eps=number("rms_norm_eps", 1e-5),
        rope_theta=float(number("rope_theta", number("rope_theta", 10000.0), rope)),
        max_position_embeddings=int(number("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    )
    if rope.get("rope_type", rope.get("type", "default")) not in (None, "default"):
        raise ConfigError(f"rope_type '{rope.get('rope_type', rope.get('type'))}' is not supported; use a model with rope_type 'default'")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act='{hf['hidden_act']}' is not supported; use a model with hidden_act 'silu'")
    if "LlamaForCausalLM" in names:
        heads = common["num_attention_heads"]
        kv_heads = heads if hf.get("num_key_value_heads") is None else need("num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"config.json: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}; correct config.json")
        return LlamaConfig(
            architecture="LlamaForCausalLM",
            num_key_value_heads=kv_heads,
            head_dim=hf.get("head_dim") or common["hidden_size"] // heads,
            **common,
        )
    if "GlmMoeDsaForCausalLM" in names:
        layers = common["num_hidden_layers"]
        dense = hf.get("first_k_dense_replace", 3)
        kinds = hf.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(layers)]
        return GlmConfig(
            architecture="GlmMoeDsaForCausalLM",
            **{name: need(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
                                             "num_experts_per_tok", "moe_intermediate_size", "index_topk", "index_n_heads", "index_head_dim")},
            n_shared_experts=hf.get("n_shared_experts", 1),
            routed_scaling_factor=hf.get("routed_scaling_factor", 1.0),
            norm_topk_prob=hf.get("norm_topk_prob", True),
            n_group=hf.get("n_group", 1),
            topk_group=hf.get("topk_group", 1),
            indexer_types=_indexer_types(hf, layers),
            mlp_layer_types=tuple(kinds),
            **common,
        )
    raise ConfigError(f"architecture {names or '(none named)'} is not supported; use a LlamaForCausalLM or GlmMoeDsaForCausalLM directory")
