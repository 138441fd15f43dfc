"""What a simulation can be asked for: kinds and limits of the arguments of `simulate`, checked before anything begins.

A limit is there for what would never end, or would say nothing until somebody stops it. A deployment has limits of its own.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import inf
from typing import Any

from ..config import ConfigError
from ..workload.closed_loop import ClosedLoop
from ..workload.report import Slo

__all__ = ["ARGUMENTS", "check_run", "is_number", "is_whole"]

LOOP = tuple(name for name in inspect.signature(ClosedLoop).parameters if name != "sessions")
ARGUMENTS = ("slo", "duration_s", "warm_s", *LOOP)
NUMBERS = {"duration_s": 10_000_000, "warm_s": 10_000_000, "gap_cap_s": inf, "start_within_s": 10_000_000, "cold_per_s": 1000}  # from 0 to this
WHOLE = {"concurrency": (1, 5_000), "seed": (0, inf), "cold_tokens": (0, 10_000_000), "cold_output_tokens": (0, 10_000_000)}  # from, to
MOST_COLD = 1_000_000  # arrivals from outside in all


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_run(given: Mapping[str, Any]) -> None:
    """
    Args:
        given: of ARGUMENTS: `duration_s`, `warm_s`, `concurrency`, and any others.

    Raises:
        ConfigError: an unknown argument, one of a wrong kind, or one outside its limits.
    """
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise ConfigError(f"{name} is unknown; use {', '.join(ARGUMENTS)}")
        if name in NUMBERS and not (is_number(value) and 0 <= value <= NUMBERS[name]):
            most = f"from 0 to {NUMBERS[name]:,}" if NUMBERS[name] < inf else "of 0 or more"
            text = " (YAML takes 1e3 for a text: write 1000)" if isinstance(value, str) else ""
            raise ConfigError(f"{name}={value!r}: use a number {most}{text}")
        if name in WHOLE and not (is_whole(value) and WHOLE[name][0] <= value <= WHOLE[name][1]):
            least, most = WHOLE[name]
            raise ConfigError(f"{name}={value!r}: use a whole number" + (f" from {least} to {most:,}" if most < inf else f", {least} or more"))
    if given.get("slo") is not None and not isinstance(given["slo"], Slo):
        raise ConfigError(f"slo={given['slo']!r}: use a Slo, or None for none")
    if not given["warm_s"] < given["duration_s"]:
        raise ConfigError(f"warm_s={given['warm_s']!r}, duration_s={given['duration_s']!r}: use a time, and less of it for warming up")
    cold = given.get("cold_per_s", 0) * given["duration_s"]
    if cold > MOST_COLD:
        raise ConfigError(f"cold_per_s={given['cold_per_s']!r}: makes {cold:,.0f} requests in duration_s={given['duration_s']!r}; use {MOST_COLD:,} at most")
    ClosedLoop((), **{name: given[name] for name in LOOP if name in given})  # says what is wrong with the rest
