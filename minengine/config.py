"""What a model is (read from its `config.json` or GGUF header) and how the engine runs it.

No torch here: the scheduler, the simulator and a browser's Python import this file.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

if TYPE_CHECKING:
    from .arithmetic.copies import Topology

__all__ = ["ConfigError", "EngineArgs", "GlmConfig", "LlamaConfig", "ModelConfig", "cache_fields", "head_parts", "model_config"]

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


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How one engine runs; the names are vLLM's.

    `num_gpu_blocks_override` (also on a CPU) or `kv_cache_memory_bytes` sets the pool; with neither the
    pool holds `max_num_seqs` requests of `max_model_len` tokens, capped at `kv_cache_memory_bytes`' default.

    `topology` names the ranks in one word: TP4, TEP4, DEP4, TP4+DCP2. The four fields after it say the same in vLLM's words; either is
    enough. Everything else is then a rank's: its pool, its `max_num_seqs` under data parallelism.
    """

    model: str = "smollm2"
    dtype: str = "auto"  # "float32" or "bfloat16"; auto: float32 on a CPU, bfloat16 on CUDA
    device: str = "auto"
    kv_cache_dtype: str = "auto"  # the model's dtype; a format; for grouped heads also K's and V's apart, as in "q8_0:q4_0"
    kv_cache_layout: str = "LBNHC"
    block_size: int = 64
    kv_cache_memory_bytes: int | None = None  # None: 256 MiB, or what max_num_seqs x max_model_len needs if less
    num_gpu_blocks_override: int | None = None
    max_model_len: int | None = None  # None: the model's own limit
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    long_prefill_token_threshold: int = 0  # 0: no limit on one request's share of a step
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"  # "triton": the kernels of minkernels; "torch"; auto: triton on CUDA for rows that the kernels read, else torch
    load_admission: str = "poll"  # "event": a load starts and its request becomes ready at any time, also while a step is computed
    kv_load_failure_policy: str = "recompute"  # "fail": a request whose KV cannot be loaded ends with an error
    kv_transfer: str = "pull"  # "push_layers": prefill writes each layer's rows to the decoder as soon as they are computed
    kv_lease_s: float = 30.0  # how long prefill keeps the blocks of a request that nobody fetches, and decode those that nobody writes to
    kv_transfer_timeout_s: float = 10.0  # what moving a request's rows may take; then they are computed again
    host_tier_bytes: int = 0  # 0: no tier in host memory
    disk_tier_bytes: int = 0  # 0: no tier on disk
    tier_path: str | None = None  # folder of the tiers' files; None: one of this user's own
    topology: str | None = None  # None: what the next four come to; with them all at their defaults, one rank
    tensor_parallel_size: int = 1  # ranks that split attention by heads
    data_parallel_size: int = 1  # ranks that run attention for different requests
    enable_expert_parallel: bool = False  # whole experts on different ranks
    decode_context_parallel_size: int = 1  # of the tensor-parallel ranks, those that split the cached sequence
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {remedy}")

        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            if kind.startswith("int") and not (value is None and "None" in kind):
                demand(isinstance(value, int) and not isinstance(value, bool), f.name, "use a whole number")
        demand(self.block_size in (16, 32, 64, 128, 256, 512, 1024), "block_size", "use a power of two from 16 to 1024")
        demand(self.kv_cache_layout in KV_CACHE_LAYOUTS, "kv_cache_layout", f"use one of {', '.join(KV_CACHE_LAYOUTS)}")
        known = dict.fromkeys(("auto", *LATENT_DTYPES, *HEAD_DTYPES))
        if isinstance(self.kv_cache_dtype, str) and ":" in self.kv_cache_dtype:
            head_parts(self.kv_cache_dtype)
        else:
            demand(self.kv_cache_dtype in known, "kv_cache_dtype", f"use one of {', '.join(known)}")
        demand(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "use auto, float32 or bfloat16")
        demand(self.device == "auto" or self.device.split(":")[0] in ("cpu", "cuda"), "device", "use auto, cpu or cuda")
        demand(self.attention_backend in ("auto", "torch", "triton"), "attention_backend", "use auto, torch or triton")
        demand(self.max_num_seqs >= 1, "max_num_seqs", "use at least 1")
        demand(self.max_num_batched_tokens >= self.max_num_seqs, "max_num_batched_tokens",
               f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running request can decode in every step")
        demand(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "use at least 2")
        demand(self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 1, "num_gpu_blocks_override", "use at least 1")
        demand(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0, "kv_cache_memory_bytes", "use a positive number of bytes")
        demand(self.long_prefill_token_threshold >= 0, "long_prefill_token_threshold", "use 0 (no limit) or more")
        demand(self.load_admission in ("poll", "event"), "load_admission", "use poll or event")
        demand(self.kv_load_failure_policy in ("recompute", "fail"), "kv_load_failure_policy", "use recompute or fail")
        demand(self.kv_transfer in ("pull", "push_layers"), "kv_transfer", "use pull or push_layers")
        for name in ("kv_lease_s", "kv_transfer_timeout_s"):
            demand(isinstance(getattr(self, name), (int, float)) and 0 < getattr(self, name) < float("inf"), name, "use a positive number of seconds")
        demand(self.host_tier_bytes >= 0, "host_tier_bytes", "use 0 (no tier) or a number of bytes")
        demand(self.disk_tier_bytes >= 0, "disk_tier_bytes", "use 0 (no tier) or a number of bytes")
        demand(self.tier_path is None or isinstance(self.tier_path, str) and "\0" not in self.tier_path, "tier_path", "use the path of a folder, as a string")
        demand(self.tier_path is None or self.host_tier_bytes + self.disk_tier_bytes > 0, "tier_path",
               "is for tiers, and none has a size; use host_tier_bytes or disk_tier_bytes, or leave it out")
        demand(self.num_threads is None or self.num_threads >= 1, "num_threads", "use at least 1")
        for name in ("tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
            demand(getattr(self, name) >= 1, name, "use at least 1")
        if (self.topology, *self._sizes()) != (None, 1, 1, False, 1):
            self._check_ranks(demand)

    def _sizes(self) -> tuple[int, int, bool, int]:
        return self.tensor_parallel_size, self.data_parallel_size, self.enable_expert_parallel, self.decode_context_parallel_size

    def _check_ranks(self, demand: Callable[[bool, str, str], None]) -> None:
        tensor, data, experts, context = self._sizes()
        demand(isinstance(experts, bool), "enable_expert_parallel", "use True or False")
        if self.topology is not None:
            demand(isinstance(self.topology, str), "topology", "use a name, for example TP4, DEP8 or TP8+DCP4")
            shape = self.ranks
            named = {"tensor_parallel_size": (shape.tensor, 1), "data_parallel_size": (shape.data, 1),
                     "enable_expert_parallel": (shape.experts > 1, False), "decode_context_parallel_size": (shape.context, 1)}
            for name, (value, default) in named.items():
                demand(getattr(self, name) in (value, default), name, f"topology='{self.topology}' says {value}; leave one of the two out")
        else:
            demand(tensor == 1 or data == 1, "data_parallel_size", f"beside tensor_parallel_size={tensor}: a group has one or the other; leave one out")
            demand(data == 1 or experts, "data_parallel_size",
                   "its ranks share nothing but experts; use enable_expert_parallel=True, or engines of their own (decode workers)")
            demand(not experts or tensor * data > 1, "enable_expert_parallel", "there is one rank; use tensor_parallel_size or data_parallel_size above 1")
            demand(tensor % context == 0, "decode_context_parallel_size", f"must divide tensor_parallel_size, which is {tensor}")
            demand(data == 1 or context == 1, "decode_context_parallel_size", "splits what tensor-parallel ranks repeat; use tensor_parallel_size")
        shape = self.ranks
        if shape.gpus == 1:
            return
        field = "topology" if self.topology is not None else "decode_context_parallel_size"
        demand(self.block_size % shape.context == 0, field, f"{shape.context} ranks cannot split block_size={self.block_size}; use a power of two up to it")
        for name in ("host_tier_bytes", "disk_tier_bytes"):
            demand(not getattr(self, name), name, f"tiers keep what one rank computes, and {shape.name} has {shape.gpus}; leave one of the two out")

    @property
    def ranks(self) -> Topology:
        """The ranks of this engine, however they were named; TP1: one.

        Raises:
            ConfigError: a `topology` that cannot be read.
        """
        from .arithmetic.copies import topology

        if self.topology is not None:
            return topology(self.topology)
        tensor, data, experts, context = self._sizes()
        kind = f"DEP{data}" if data > 1 else f"{'TEP' if experts else 'TP'}{tensor}"
        return topology(f"{kind}+DCP{context}" if context > 1 else kind)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], others: Sequence[str] = ()) -> "EngineArgs":
        """Build from keyword options; an unknown name is an error that lists the known ones, and `others` that the caller has taken out."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option '{name}'; known options: {', '.join(sorted(known | set(others)))}")
        return cls(**options)
