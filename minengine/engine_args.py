"""How one engine runs: every option, and what is wrong with it. Pure Python."""
from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from .config import HEAD_DTYPES, KV_CACHE_LAYOUTS, LATENT_DTYPES, ConfigError, head_parts

if TYPE_CHECKING:
    from .arithmetic.copies import Topology

__all__ = ["EngineArgs"]


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
            elif kind == "bool":
                demand(isinstance(value, bool), f.name, "use True or False")
            elif kind == "str":
                demand(isinstance(value, str) or f.name == "model" and isinstance(value, PathLike), f.name, "use a string")
        demand(self.block_size in (16, 32, 64, 128, 256, 512, 1024), "block_size", "use a power of two from 16 to 1024")
        demand(self.kv_cache_layout in KV_CACHE_LAYOUTS, "kv_cache_layout", f"use one of {', '.join(KV_CACHE_LAYOUTS)}")
        known = dict.fromkeys(("auto", *LATENT_DTYPES, *HEAD_DTYPES))
        if ":" in self.kv_cache_dtype:
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
            seconds = getattr(self, name)
            demand(isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < float("inf"), name, "use a positive number of seconds")
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
