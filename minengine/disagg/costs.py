"""What it costs to send a request to a worker, in blocks: the lowest wins, ties at random.

    cost = prefill_load_scale * max(0, prefill_blocks - credit) + decode_blocks + request_weight * requests + recent_weight * recent_blocks

`prefill_blocks`: the request's own and those queued there; `credit`: what of it is cached there, by medium; `decode_blocks`: those of the requests
that the worker is busy with. So far it is Dynamo's formula. `recent_blocks` is ours: what the worker was given lately, whether done or not. Without
it a worker that has everybody's system prompt would get every request that comes while nothing runs, and the other caches would lie empty.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Sequence

from .kv_index import Overlap

__all__ = ["RouterOptions", "choose", "decode_cost", "prefill_cost"]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    prefill_load_scale: float = 1.0
    overlap_score_credit: float = 1.0  # for a block on the device
    overlap_score_credit_decay: float = 0.0  # 1: halves that credit when the worker has one such request more to prefill than the idlest
    host_cache_hit_weight: float = 0.75  # credit for a block in the host tier
    disk_cache_hit_weight: float = 0.25
    request_weight: float = 1.0  # blocks that a request costs beside its own
    transfer_scale: float = 0.1  # what a block to be moved to a decoder costs, against one to be computed
    recent_weight: float = 1.0
    recent_requests: int = 64  # how many requests, over all workers, until what a worker was given counts 1/e
    temperature: float = 0.0  # > 0: a softmax over the negative cost, scaled to 0..1, instead of the lowest
    sticky: bool | None = None  # a session stays on one decoder; None: under kv_aware only
    session_idle_s: float = 3600.0  # then a session is forgotten
    lease_s: float = 60.0  # how long a place is held without a sign of its request
    failure_threshold: int = 3  # these three and the next: see Breaker
    failure_window_s: float = 30.0
    cool_off_s: float = 5.0
    max_cool_off_s: float = 60.0


def prefill_cost(options: RouterOptions, blocks: int, overlap: Overlap, queued: int, excess: int, decode_blocks: int, requests: int, recent: float) -> float:
    """Of `blocks` blocks on an engine that prefills, with `queued` blocks still to compute, `excess` more than the idlest has."""
    decay = 1 / (1 + options.overlap_score_credit_decay * excess / max(1, blocks))
    credit = (options.overlap_score_credit * decay * overlap.device + options.host_cache_hit_weight * overlap.host
              + options.disk_cache_hit_weight * overlap.disk)
    return options.prefill_load_scale * max(0.0, queued + blocks - credit) + decode_blocks + options.request_weight * requests + options.recent_weight * recent


def decode_cost(options: RouterOptions, blocks: int, overlap: Overlap, decode_blocks: int, requests: int, recent: float) -> float:
    """Of `blocks` blocks on a decoder, which computes none of them: those that it lacks are moved there."""
    moved = options.transfer_scale * (blocks - overlap.device)
    return moved + decode_blocks + blocks + options.request_weight * requests + options.recent_weight * recent


def choose(costs: Sequence[float], temperature: float, random: Random) -> int:
    """The index of the lowest cost; with a temperature, drawn by a softmax over the negative costs, which are scaled to 0..1 first."""
    low, high = min(costs), max(costs)
    if temperature <= 0 or low == high:
        best = [i for i, cost in enumerate(costs) if cost == low]
        return best[random.randrange(len(best))]
    weights = [math.exp((low - cost) / (high - low) / temperature) for cost in costs]
    return random.choices(range(len(costs)), weights)[0]
