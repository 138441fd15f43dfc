"""Points of a sweep: which runs a grid asks for, and what a run's line says. Pure Python, JSON both ways.

    deployment: {prefill: DEP8, decode: TP4, host_tier_bytes: 2000000000000}     fields of a Deployment
    run: {duration_s: 1200, warm_s: 300, gap_cap_s: 10, start_at: anywhere}       of `simulate`, and `trace` (default: agentx)
    grid: {decoders: [2, 3, 4], concurrency: [32, 64]}                            every combination of these
    points: [{decoders: 4, concurrency: 66}]                                      and these, if there are any
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from typing import Any

from ..config import ConfigError
from ..workload.metrics import MetricError
from ..workload.report import Slo
from ..workload.sessions import TraceError
from .cluster import simulate
from .deployment import Deployment
from .limits import ARGUMENTS, check_run, is_number

__all__ = ["DEFAULTS", "RUN", "key", "points", "run_point"]

DEPLOYMENT = tuple(one.name for one in fields(Deployment))
RUN = ("trace", *ARGUMENTS)
DEFAULTS = {name: value for name, value in simulate.__kwdefaults__.items() if name in ARGUMENTS}
PARTS = ("deployment", "run", "grid", "points")


def points(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each point, once, as {"deployment": all its fields, "run": {...}}, checked.

    Raises:
        ConfigError: an unknown part or setting, values that are no list, no points, or a deployment or a run that cannot be.
    """
    unknown = [name for name in grid if name not in PARTS]
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
    found = [_point({**base, **one}) for one in asked]
    try:
        return list({key(one): one for one in found}.values())
    except TypeError as error:
        raise ConfigError(f"grid: has something that JSON does not have ({error}); use texts, numbers, true, false, null, lists and mappings") from error


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
    run = {"trace": "agentx", **{name: value for name, value in settings.items() if name in RUN}}
    if not isinstance(run["trace"], str):
        raise ConfigError(f"trace={run['trace']!r}: use agentx, mooncake, generated, or a path")
    check_run({**DEFAULTS, **_arguments(run)})
    return {"deployment": deployment.mapping(), "run": run}


def _arguments(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of `simulate`."""
    found = {name: value for name, value in run.items() if name != "trace"}
    if found.get("slo") is not None:
        limits = found["slo"]
        known = [one.name for one in fields(Slo)]
        if not isinstance(limits, Mapping) or not all(name in known and (value is None or is_number(value)) for name, value in limits.items()):
            raise ConfigError(f"slo={limits!r}: use a mapping with numbers for some of {', '.join(known)}")
        try:
            found["slo"] = Slo(**limits)
        except MetricError as error:
            raise ConfigError(str(error)) from error
    return found


def key(point: Mapping[str, Any]) -> str:
    """By which a point is known again."""
    return json.dumps({"deployment": point["deployment"], "run": point["run"]}, sort_keys=True)


def run_point(point: Mapping[str, Any], sessions: Iterable[Any], *, records: bool = False, **how: Any) -> dict[str, Any]:
    """The line of a point: its settings, metrics, counts, engines and digest, and of requests that failed the number and the first one's error
    (`failures`); or the `error` that it ended with.

    Args:
        records: with a record a request.
        how: other arguments of `simulate`.
    """
    try:
        result = simulate(Deployment.of(point["deployment"]), sessions, **_arguments(point["run"]), **how)
    except (ConfigError, TraceError, MetricError, OSError) as error:
        return {**point, "error": str(error)}
    line = {**point, "gpus": result.deployment.gpus, "metrics": result.metrics, "counts": result.counts, "engines": result.engines, "digest": result.digest}
    errors = [record.error for record in result.records if record.error is not None]
    if errors:
        line["failures"] = {"requests": len(errors), "first": errors[0]}
    if records:
        line["records"] = [asdict(record) for record in result.records]
    return line
