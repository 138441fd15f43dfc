"""Points of a sweep: which runs a grid asks for, and what a run's line says. Pure Python, JSON both ways.

    deployment: {prefill: DEP8, decode: TP4, host_tier_bytes: 2000000000000}     fields of a Deployment
    run: {duration_s: 1200, warm_s: 300, gap_cap_s: 10, start_at: anywhere}       of `simulate`, and `trace` (default: agentx)
    grid: {decoders: [2, 3, 4], concurrency: [32, 64]}                            every combination of these
    points: [{decoders: 4, concurrency: 66}]                                      and these, if there are any
"""
from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from ..config import ConfigError
from ..workload.closed_loop import ClosedLoop
from ..workload.report import Slo
from .cluster import simulate
from .deployment import Deployment

__all__ = ["RUN", "key", "points", "run_point"]

DEPLOYMENT = tuple(one.name for one in fields(Deployment))
RUN = ("trace", "slo", "concurrency", "duration_s", "seed", "gap_cap_s", "warm_s",
       *(name for name in inspect.signature(ClosedLoop).parameters if name not in ("sessions", "concurrency", "seed", "gap_cap_s")))
PARTS = ("deployment", "run", "grid", "points")


def points(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each point as {"deployment": all its fields, "run": {...}}, checked.

    Raises:
        ConfigError: an unknown part or setting, values that are no list, no points, or a deployment that cannot be.
    """
    unknown = sorted(set(grid) - set(PARTS))
    if unknown:
        raise ConfigError(f"grid: {unknown[0]} is unknown; use {', '.join(PARTS)}")
    base = {**_mapping(grid, "deployment"), **_mapping(grid, "run")}
    axes = _mapping(grid, "grid")
    for name, values in axes.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f"grid: {name}={values!r}: use a list of values")
    asked = [dict(zip(axes, values)) for values in product(*axes.values())] if axes else []
    listed = grid.get("points") or []
    if not isinstance(listed, Sequence) or not all(isinstance(one, Mapping) for one in listed):
        raise ConfigError(f"grid: points={listed!r}: use a list of mappings")
    asked += [dict(one) for one in listed]
    if not asked:
        raise ConfigError("grid: asks for nothing; give lists under grid, or points")
    return [_point({**base, **one}) for one in asked]


def _mapping(grid: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = grid.get(part) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"grid: {part}={found!r}: use a mapping of settings")
    return found


def _point(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name not in DEPLOYMENT and name not in RUN:
            raise ConfigError(f"grid: {name} is unknown; use a field of a deployment ({', '.join(DEPLOYMENT)}) or of a run ({', '.join(RUN)})")
    deployment = Deployment.of({name: value for name, value in settings.items() if name in DEPLOYMENT})
    return {"deployment": deployment.mapping(), "run": {"trace": "agentx", **{name: value for name, value in settings.items() if name in RUN}}}


def key(point: Mapping[str, Any]) -> str:
    """By which a point is known again."""
    return json.dumps({"deployment": point["deployment"], "run": point["run"]}, sort_keys=True)


def run_point(point: Mapping[str, Any], sessions: Iterable[Any], **how: Any) -> dict[str, Any]:
    """The line of a point: its settings, metrics, counts, engines and digest; or the `error` that it ended with.

    Args:
        how: other arguments of `simulate`.
    """
    run = {name: value for name, value in point["run"].items() if name != "trace"}
    if run.get("slo") is not None:
        run["slo"] = Slo(**run["slo"])
    try:
        result = simulate(Deployment.of(point["deployment"]), sessions, **run, **how)
    except ConfigError as error:
        return {**point, "error": str(error)}
    return {**point, "gpus": result.deployment.gpus, "metrics": result.metrics, "counts": result.counts, "engines": result.engines, "digest": result.digest}
