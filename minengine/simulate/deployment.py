"""A deployment to be simulated: its engines, what they run on, and how they are set. Pure Python, JSON-able, checked."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..arithmetic.copies import topology
from ..config import KV_CACHE_LAYOUTS, ConfigError
from ..disagg.costs import RouterOptions
from ..disagg.router import POLICIES
from .limits import is_number, is_whole
from .machine import LinearMachine, Machine
from .wire import MODELS, token_bytes
from .work import Costs

__all__ = ["Deployment"]

WHOLE = {"prefills": 1, "decoders": 1, "engines": 1, "max_num_batched_tokens": 1, "decode_max_num_batched_tokens": 1, "max_num_seqs": 1,
         "long_prefill_token_threshold": 0, "block_size": 1, "prefill_cached_tokens": 1, "cached_tokens": 1, "host_tier_bytes": 0}  # at least
FIRST_TOKEN = ("prefill", "decode")
MODEL_OPTIONS = {
    "weights": (lambda v: isinstance(v, str), "a format, for example bfloat16"),
    "experts": (lambda v: isinstance(v, str), "a format, for example nvfp4"),
    "draft_tokens": (lambda v: is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "tokens_per_step": (lambda v: is_number(v) and v >= 1, "a number, 1 or more"),
}
MOST_GPUS = 10_000  # so that a digit too many is told, and not waited for


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Prefill engines that feed decoders, or engines that do both (`topology`).

    Attributes:
        prefill, prefills, decode, decoders: topology and number of each kind.
        topology, engines: of engines that do both; the four above are not used then.
        machine: a name, a path or a mapping, as `simulate.machine` reads it.
        model_options: what else the cost model and the memory ladder are told: `weights`, `experts`, and of engines that decode `draft_tokens` and
            `tokens_per_step`.
        max_num_batched_tokens: of a rank and step; of decoders, `decode_max_num_batched_tokens` (None: the same).
        max_num_seqs: requests that run at once on a rank.
        prefill_cached_tokens, cached_tokens: of a rank's pool, on prefill engines and on those that decode; None: as the memory ladder has it.
        kv_cache_layout: what moves from prefill to decode is cut by it.
        load_admission: "poll" or "event", as the engine's.
        host_tier_bytes: one tier that all engines which prefill share, below their pools; 0: none.
        router_options: fields of `RouterOptions`; leases do not run out here.
        first_token: when a request's first token counts as given: when the prefill engine has it, or when a decoder has admitted the request
            ("decode": a front that hears from decoders alone).

    Raises:
        ConfigError: the field, what is wrong with it, and the remedy.
    """

    prefill: str = "DEP8"
    prefills: int = 1
    decode: str = "TP4"
    decoders: int = 4
    topology: str | None = None
    engines: int = 1
    machine: str | Mapping[str, Any] = "gb200-nvl72"
    model: str = "glm-5.3"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str = "nvfp4_fp8_ds_mla"
    kv_cache_layout: str = "BLHNC"
    block_size: int = 64
    max_num_batched_tokens: int = 4096
    decode_max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    prefill_cached_tokens: int | None = None
    cached_tokens: int | None = None
    load_admission: str = "event"
    transfer: str = "pull"
    host_tier_bytes: int = 0
    router_policy: str = "kv_aware"
    router_options: Mapping[str, Any] = field(default_factory=dict)
    first_token: str = "prefill"

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {remedy}")

        for name, least in WHOLE.items():
            value = getattr(self, name)
            if value is None and name in ("decode_max_num_batched_tokens", "prefill_cached_tokens", "cached_tokens"):
                continue
            demand(is_whole(value) and value >= least, name, f"use a whole number, {least} or more")
        for name in ("topology",) if self.topology is not None else ("prefill", "decode"):
            demand(isinstance(getattr(self, name), str), name, "use a name, for example TP4 or DEP8")
            topology(getattr(self, name))
        if self.gpus > MOST_GPUS:
            raise ConfigError(f"deployment: its engines have {self.gpus:,} GPUs; use {MOST_GPUS:,} at most")
        for name in ("model", "kv_cache_dtype"):
            demand(isinstance(getattr(self, name), str), name, "use a name")
        demand(isinstance(self.machine, (str, Path, Mapping, Machine, LinearMachine)), "machine",
               "use a name, the path of a .yml file, or a mapping of what such a file has")
        for name in ("model_options", "router_options"):
            demand(isinstance(getattr(self, name), Mapping), name, "use a mapping")
        for name, value in self.model_options.items():
            demand(name in MODEL_OPTIONS, "model_options", f"{name} is unknown; use {', '.join(MODEL_OPTIONS)}")
            right, wanted = MODEL_OPTIONS[name]
            demand(right(value), "model_options", f"{name}: use {wanted}")
        for name in ("max_num_batched_tokens", "decode_max_num_batched_tokens"):
            demand(getattr(self, name) is None or getattr(self, name) >= self.max_num_seqs, name,
                   f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running request can decode in every step")
        demand(self.kv_cache_layout in KV_CACHE_LAYOUTS, "kv_cache_layout", f"use one of {', '.join(KV_CACHE_LAYOUTS)}")
        demand(self.load_admission in ("poll", "event"), "load_admission", "use poll or event")
        demand(self.transfer == "pull", "transfer", "use pull: what is written layer by layer is not simulated")
        demand(self.router_policy in POLICIES, "router_policy", f"use one of {', '.join(POLICIES)}")
        demand(self.first_token in FIRST_TOKEN, "first_token", f"use {' or '.join(FIRST_TOKEN)}")
        known = {one.name for one in fields(RouterOptions)} - {"lease_s"}
        for name, value in self.router_options.items():
            demand(name in known, "router_options", f"{name} is unknown; use {', '.join(sorted(known))}")
            if name == "sticky":
                demand(value in (None, True, False), "router_options", "sticky: use true, false or null")
            else:
                least = int(name == "recent_requests")
                demand(is_number(value) and value >= least, "router_options", f"{name}: use a number, {least} or more")
        if self.topology is None or self.host_tier_bytes:
            demand(self.model in MODELS, "model", f"the sizes of its rows are not known here; use {', '.join(MODELS)}")
            block_bytes = token_bytes(self.model, self.kv_cache_dtype) * self.block_size
            demand(not 0 < self.host_tier_bytes < block_bytes, "host_tier_bytes", f"a block takes {block_bytes:,} bytes; use at least these, or 0 for no tier")
            demand(self.block_size % max(topology(name).context for name in self.topologies) == 0, "block_size", "DCP ranks must divide it")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Deployment:
        """From a mapping, as JSON and YAML have it.

        Raises:
            ConfigError: an unknown field, or see the class.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"deployment={given!r}: use a mapping of its fields")
        known = [one.name for one in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"deployment: {unknown[0]} is unknown; use {', '.join(known)}")
        return cls(**given)

    def mapping(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def topologies(self) -> tuple[str, ...]:
        return (self.topology,) if self.topology is not None else (self.prefill, self.decode)

    @property
    def together(self) -> bool:
        """The same engines prefill and decode."""
        return self.topology is not None

    @property
    def gpus(self) -> int:
        if self.topology is not None:
            return self.engines * topology(self.topology).gpus
        return self.prefills * topology(self.prefill).gpus + self.decoders * topology(self.decode).gpus

    def budget(self, role: str) -> int:
        """Tokens of a rank and step."""
        return self.decode_max_num_batched_tokens if role == "decode" and self.decode_max_num_batched_tokens else self.max_num_batched_tokens

    def costs(self, name: str, role: str) -> Costs:
        """Of its engines of that topology and role."""
        from .step_model import open_costs

        return open_costs(self.machine, name, model=self.model, kv_cache_dtype=self.kv_cache_dtype, **self._options(role))

    def _options(self, role: str) -> dict[str, Any]:
        return {name: value for name, value in self.model_options.items() if role != "prefill" or name not in ("draft_tokens", "tokens_per_step")}

    def tokens_cached(self, name: str, role: str) -> int:
        """Tokens that one rank's pool holds in such engines.

        Raises:
            ConfigError: they were not given, and the ladder knows no such model or card.
        """
        given = self.prefill_cached_tokens if role == "prefill" else self.cached_tokens
        if given is not None:
            return given
        from ..arithmetic.memory import memory_ladder
        from .machine import Machine, machine
        from .step_model import MODELS as CONFIGS

        found = machine(self.machine)
        if not isinstance(found, Machine) or self.model not in CONFIGS:
            raise ConfigError("cached_tokens=None: this machine is known by its speed alone, so say how many tokens the pool of one rank holds")
        options = self._options(role)
        formats = {name: options[name] for name in ("weights", "experts") if name in options}
        return memory_ladder(CONFIGS[self.model], name, found.card, kv_cache_dtype=self.kv_cache_dtype, step_tokens=self.budget(role),
                             draft_layers=int(bool(options.get("draft_tokens"))), **formats).rank_tokens
