"""One simulated deployment as a point: how fast it is for a user, how much it gives per GPU, and what that costs.

    point(decoders=4, sessions=66, **given)["e2e_tok_s_user"]

It is what the Pareto explorer draws, of answers that were simulated ahead, or asked for on the page. Everything that an answer depends on is an
argument, in JSON's kinds: the same arguments give the same point, in a browser's Python as well.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..arithmetic.serving import gpu_hours_per_million
from ..config import ConfigError
from ..workload.generator import AgentModel
from ..workload.sessions import Session
from .cluster import simulate
from .deployment import Deployment

__all__ = ["COUNTS", "DEFAULTS", "DTYPES", "GIVEN", "METRICS", "point"]

COUNTS = {  # least and most of each setting
    "prefills": (1, 4),
    "decoders": (1, 16),
    "max_num_batched_tokens": (256, 65_536),
    "sessions": (1, 1000),
    "gap_cap_s": (0, 3600),
    "seed": (0, 10**6),
}
DTYPES = ("nvfp4_fp8_ds_mla", "fp8")
GIVEN = ("deployment", "loop", "agents", "warm_s", "window_s")  # arguments that points of one grid have in common
DISTINCT = 512  # sessions that a model of agents is asked for; copies of them follow
METRICS = ("e2e_tok_s_user", "e2e_interactivity_p90", "output_tok_s", "output_tok_s_gpu", "in_flight_mean", "requests", "failed", "ttft_s_p50",
           "ttft_s_p90", "queue_s_p50", "queue_s_p90", "itl_s_mean", "hit_rate")  # of minengine.workload.report, which defines them
COUNTED = ("requests_in", "requests_out", "tokens_in", "tokens_out", "blocks_in", "blocks_out", "steps", "dummies", "moves", "retrieved_blocks")


def point(*, deployment: Mapping[str, Any], agents: Mapping[str, Any] | Iterable[Session], warm_s: float, window_s: float,
          loop: Mapping[str, Any] | None = None, prefill: str = "DEP8", prefills: int = 1, decode: str = "TP4", decoders: int = 4,
          kv_cache_dtype: str = DTYPES[0], max_num_batched_tokens: int = 4096, sessions: int = 66, gap_cap_s: int = 10, seed: int = 0,
          gpu_hour_price: float = 0.0) -> dict[str, Any]:
    """Simulate one deployment under so many live sessions.

    Args:
        deployment: fields of a `Deployment` that no setting below names, its machine among them.
        agents: the mapping of an `AgentModel`, whose sessions are drawn by the seed; or sessions of one's own.
        warm_s, window_s: simulated seconds that are left out, and those after them that count.
        loop: other options of `ClosedLoop`.
        gap_cap_s: longest gap between requests that is replayed.
        gpu_hour_price: in any currency; 0: none.

    Returns, ready for JSON: METRICS by their names; hit_rate_by_tier; gpus; gpu_hours_per_million, of output tokens (None if there were none), and
    their cost_per_million; warm_s, window_s; `counts` of the whole run, in which what came in equals what went out (the simulator raises otherwise),
    and `dummies`, steps that idle ranks took to keep their peers going; `digest` of every event.

    Raises:
        ConfigError: a setting outside its limits or of a wrong kind, or some that do not fit together.
    """
    asked = {"prefills": prefills, "decoders": decoders, "max_num_batched_tokens": max_num_batched_tokens, "sessions": sessions, "gap_cap_s": gap_cap_s,
             "seed": seed}
    for name, (least, most) in COUNTS.items():
        value = asked[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{name}={value!r}: use a whole number from {least} to {most}")
    if kv_cache_dtype not in DTYPES:
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r}: use one of {', '.join(DTYPES)}")
    if not warm_s >= 0 or not window_s > 0:
        raise ConfigError(f"warm_s={warm_s!r}, window_s={window_s!r}: use 0 or more, and more than 0")
    one = Deployment.of({**deployment, "prefill": prefill, "prefills": prefills, "decode": decode, "decoders": decoders, "kv_cache_dtype": kv_cache_dtype,
                         "max_num_batched_tokens": max_num_batched_tokens})
    replayed = AgentModel.from_mapping(agents).sessions(DISTINCT, seed) if isinstance(agents, Mapping) else agents
    result = simulate(one, replayed, concurrency=sessions, duration_s=warm_s + window_s, warm_s=warm_s, gap_cap_s=gap_cap_s, seed=seed, **(loop or {}))
    found = {name: result.metrics[name] for name in METRICS}
    found["hit_rate_by_tier"] = {name.removeprefix("hit_rate_"): value for name, value in result.metrics.items() if name.startswith("hit_rate_")}
    hours = gpu_hours_per_million(found["output_tok_s_gpu"]) if found["output_tok_s_gpu"] else None
    return {**found, "gpus": one.gpus, "gpu_hours_per_million": hours, "cost_per_million": hours and hours * gpu_hour_price, "warm_s": warm_s,
            "window_s": window_s, "counts": {name: result.counts[name] for name in COUNTED}, "digest": result.digest}


DEFAULTS: dict[str, Any] = {name: value for name, value in (point.__kwdefaults__ or {}).items() if name not in ("loop", "gpu_hour_price")}
"""What tells points of one grid apart, as it is if it is not said: the published deployment's."""
