"""Which workers a cluster has, and whether they fit together."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

from ..config import ConfigError
from ..engine_args import EngineArgs
from .launch import LocalLauncher
from .messages import Ready, Start
from .router import POLICIES
from .source import check_pools

__all__ = ["ClusterArgs", "check_fit", "plan"]

TRANSFERS = ("auto", "nixl", "shm")
RANK_FIELDS = {"topology", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "decode_context_parallel_size"}


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """
    Attributes:
        prefill: workers that only read prompts; 0: every worker does both.
        decode: workers that write the answers.
        prefill_args, decode_args: fields of EngineArgs that are different on the workers of that role.
        prefill_topology, decode_topology: the `topology` of the workers of that role; None: what the engine's arguments say.
        worker_timeout_s: a worker that says nothing for so long gets no requests, and its own are continued elsewhere.
        transfer: "nixl", "shm" (a copy through shared memory, on one machine), or "auto": NIXL where it is there.
        cluster: whose nodes the workers run on, an address as Ray has it: "ray://HOST:PORT", "HOST:PORT" or "auto"; None: on this machine.
    """

    prefill: int = 0
    decode: int = 1
    router_policy: str = "kv_aware"
    prefill_args: Mapping[str, Any] | None = None
    decode_args: Mapping[str, Any] | None = None
    prefill_topology: str | None = None
    decode_topology: str | None = None
    worker_timeout_s: float = 5.0
    transfer: str = "auto"
    cluster: str | None = None

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {remedy}")

        def whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        demand(whole(self.prefill) and 0 <= self.prefill <= 1024, "prefill", "use 0 (every worker reads prompts itself) or a number of workers")
        demand(whole(self.decode) and 1 <= self.decode <= 1024, "decode", "use 1 or more workers; somebody has to write the answers")
        demand(self.router_policy in POLICIES, "router_policy", f"use one of {', '.join(POLICIES)}")
        demand(self.transfer in TRANSFERS, "transfer", f"use one of {', '.join(TRANSFERS)}")
        demand(isinstance(self.worker_timeout_s, (int, float)) and 0.1 <= self.worker_timeout_s <= 86400, "worker_timeout_s", "use 0.1 to 86400 seconds")
        for name in ("prefill_args", "decode_args"):
            demand(getattr(self, name) is None or isinstance(getattr(self, name), Mapping), name, "use a dict of engine options")
        demand(self.prefill > 0 or not self.prefill_args, "prefill_args", "there is no prefill worker to have them; use decode_args, or prefill=1")
        demand(self.prefill > 0 or self.prefill_topology is None, "prefill_topology", "there is no prefill worker to have it; use decode_topology, or prefill=1")
        for name in ("prefill", "decode"):
            topology, own = f"{name}_topology", getattr(self, f"{name}_args") or {}
            demand(getattr(self, topology) is None or not own.keys() & RANK_FIELDS, topology,
                   f"{name}_args names {', '.join(sorted(own.keys() & RANK_FIELDS))} as well; leave one of the two out")
        demand(self.prefill > 0 or self.transfer == "auto", "transfer", "without prefill workers no KV moves; leave it out, or use prefill=1")
        demand(self.cluster is None or isinstance(self.cluster, str) and re.fullmatch(r"auto|(ray://)?[^\s/]+:\d{1,5}", self.cluster) is not None, "cluster",
               "use ray://HOST:PORT, HOST:PORT or auto, or leave it out for workers on this machine")
        demand(self.cluster is None or self.transfer != "shm", "transfer", "nodes of a cluster share no memory; use nixl, or leave out cluster")


def plan(args: EngineArgs, cluster: ClusterArgs, shares: Callable[[int | None, int], list[int]] | None = None) -> list[Start]:
    """The workers, prefill first. The machine's cores, or `args.num_threads`, are split among the ranks of those whose own arguments name no number.

    Args:
        shares: a launcher's, how they are split (launch.py).

    Raises:
        ConfigError: an argument of a role is none of the engine's, or KV cannot move between two roles as asked.
    """
    if args.kv_transfer != "pull" and not cluster.prefill:
        raise ConfigError(f"kv_transfer={args.kv_transfer!r}: without prefill workers no KV moves; leave it out, or use prefill=1")
    roles = ["prefill"] * cluster.prefill + ["decode" if cluster.prefill else "both"] * cluster.decode
    transfer = "nixl" if cluster.cluster is not None else cluster.transfer
    numbers = dict.fromkeys(roles, 0)
    of_role = {role: _engine_args(args, cluster, role) for role in numbers}
    alone = all(one.ranks.gpus == 1 for one, _ in of_role.values())
    if args.kv_transfer == "push_layers" and not alone:
        name, one = next((role, one) for role, (one, _) in of_role.items() if one.ranks.gpus > 1)
        raise ConfigError(f"kv_transfer='push_layers': a layer is written from one pool to one other, and topology='{one.ranks.name}' of the {name} workers has "
                          f"{one.ranks.gpus}; use kv_transfer='pull'")
    of_ranks = iter((shares or LocalLauncher().shares)(args.num_threads, sum(of_role[role][0].ranks.gpus for role in roles)))
    starts = []
    for role in roles:
        engine, own_threads = of_role[role]
        share = sum(next(of_ranks) for _ in range(engine.ranks.gpus))
        if not own_threads:
            engine = replace(engine, num_threads=share)
        starts.append(Start(name=f"{'engine' if role == 'both' else role}{numbers[role]}", role=role, args=engine,
                            transfer=transfer if cluster.prefill else None, alone=alone))
        numbers[role] += 1
    return starts


def _engine_args(args: EngineArgs, cluster: ClusterArgs, role: str) -> tuple[EngineArgs, bool]:
    """Of the workers of a role, and whether they have a number of threads of their own."""
    name = "prefill" if role == "prefill" else "decode"
    own = dict(getattr(cluster, f"{name}_args") or {})
    if "kv_transfer" in own:
        raise ConfigError(f"{name}_args: kv_transfer={own['kv_transfer']!r} is between the roles, and the same for both; give it as the cluster's own kv_transfer")
    topology = getattr(cluster, f"{name}_topology")
    fields = {field: getattr(args, field) for field in args.__dataclass_fields__}
    try:
        engine = EngineArgs.from_options({**fields, **own} if topology is None else {**fields, **own, "topology": topology})
    except ConfigError as error:
        raise ConfigError(f"{name}_args: {error}" if topology is None else f"{name}_topology: {error}") from error
    return engine, "num_threads" in own


def check_fit(ready: Mapping[str, Ready]) -> None:
    """
    Raises:
        ConfigError: two workers cannot serve the same requests; one sentence that says which and why.
    """
    (first, one), *others = ready.items()
    for name, other in others:
        if other.config != one.config or other.fingerprint != one.fingerprint:
            raise ConfigError(f"model: worker {name} runs another model than {first} ({_about(other)}, and {_about(one)}); start all with the same model and dtype")
        if other.max_model_len != one.max_model_len:
            raise ConfigError(f"max_model_len: worker {name} takes {other.max_model_len} tokens and {first} {one.max_model_len}; give all the same, "
                              "and each a pool that holds it (kv_cache_memory_bytes)")
        if other.kv_cache_dtype != one.kv_cache_dtype:
            raise ConfigError(f"kv_cache_dtype: worker {name} keeps rows as {other.kv_cache_dtype} and {first} as {one.kv_cache_dtype}; use one for all")
        if other.pools and one.pools:
            check_pools(one.pools[0], other.pools[0])


def _about(ready: Ready) -> str:
    config = ready.config
    return f"{config.architecture} with {config.num_hidden_layers} layers of {config.hidden_size}, weights {ready.fingerprint[:8]}"
