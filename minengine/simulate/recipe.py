"""A trace in, a number of GPUs out, with a range: how many groups of engines so many sessions need at a speed for each.

    size({"1:4": deployment, ...}, sessions, concurrency=500, bar=100, points=(32, 64, 96), cases=({"seed": 0}, {"seed": 1}))

A group (a deployment) is simulated with a few numbers of sessions; between two of them, the speed is taken to fall on a straight line. Groups share
nothing, so twice the groups carry twice the sessions. The range is over the cases, which are what one does not know: the draw, the pauses, the tier.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..arithmetic.serving import AtBar, at_bar
from ..config import ConfigError
from ..workload.report import DEFINITIONS
from ..workload.traces import Session
from .cluster import simulate
from .deployment import Deployment
from .limits import is_number, is_whole

__all__ = ["Sized", "carried", "size"]


class Sized(NamedTuple):
    """What one kind of group comes to. Pairs are the least and the most over the cases."""

    name: str
    group_gpus: int
    carried: tuple[float, float]  # sessions of one group at the bar
    groups: tuple[int, int]  # (0, 0): in some case no number of groups will do
    gpus: tuple[int, int]
    open: bool  # some case carried more than the largest number that was simulated: it may need fewer

    @property
    def holds(self) -> bool:
        """Every case has a number of groups that will do."""
        return self.groups[0] > 0


def carried(deployment: Deployment, sessions: Iterable[Session], bar: float, points: Sequence[int], *, metric: str = "e2e_tok_s_user", **case: Any) -> AtBar | None:
    """How many sessions one deployment carries with `metric` at `bar` or above; None: not even the fewest that were asked about.

    Args:
        points: numbers of live sessions to simulate, rising.
        metric: of `workload.report.report`, in tok/s.
        case: other arguments of `simulate`, and fields of the deployment to replace.

    Raises:
        ConfigError: points that do not rise, no such metric, no bar, or see `simulate`.
    """
    if not isinstance(points, Sequence) or not points or not all(map(is_whole, points)) or any(a >= b for a, b in zip((0, *points), points)):
        raise ConfigError(f"points={points!r}: use rising numbers of sessions, 1 or more")
    speeds = [name for name, (unit, _) in DEFINITIONS.items() if unit == "tok/s"]
    if metric not in speeds:
        raise ConfigError(f"metric={metric!r}: use one of {', '.join(speeds)}")
    if not (is_number(bar) and bar > 0):
        raise ConfigError(f"bar={bar!r}: use tok/s, more than 0")
    if not isinstance(deployment, Deployment):
        raise ConfigError(f"deployment={deployment!r}: use a Deployment")
    changed = {name: case.pop(name) for name in list(case) if name in Deployment.__dataclass_fields__}
    one = replace(deployment, **changed)
    curve = []
    for point in points:
        metrics = simulate(one, sessions, concurrency=point, **case).metrics
        curve.append((point, metrics[metric] or 0.0, metrics["output_tok_s_gpu"] or 0.0))
    return at_bar(curve, bar)


def size(candidates: Mapping[str, Deployment], sessions: Iterable[Session], *, concurrency: int, bar: float, points: Sequence[int],
         cases: Sequence[Mapping[str, Any]] = ({},), metric: str = "e2e_tok_s_user", progress: Callable[[], None] = lambda: None, **common: Any) -> list[Sized]:
    """Size every candidate for `concurrency` live sessions; those that hold in all cases first, fewest GPUs in the worst case first.

    Args:
        sessions: an iterable that can be gone through again, as a list or a generator's `sessions()` can.
        cases: arguments of `carried`, each a future that the range must cover; `common` is in all of them.
        progress: called after each case of each candidate.

    Raises:
        ConfigError: no candidates, no cases, fewer than one session, or see `carried`.
    """
    if not (is_whole(concurrency) and concurrency >= 1):
        raise ConfigError(f"concurrency={concurrency!r}: use a whole number of sessions, 1 or more")
    if not isinstance(candidates, Mapping) or not candidates:
        raise ConfigError(f"candidates={candidates!r}: use at least one deployment, by its name")
    if not isinstance(cases, Sequence) or not cases or not all(isinstance(case, Mapping) for case in cases):
        raise ConfigError(f"cases={cases!r}: use at least one mapping of settings; ({{}},) is the case with none")
    found = []
    for name, deployment in candidates.items():
        reached = []
        for case in cases:
            reached.append(carried(deployment, sessions, bar, points, metric=metric, **{**common, **case}))
            progress()
        least, most = (pick((one.sessions if one else 0.0) for one in reached) for pick in (min, max))
        groups = tuple(math.ceil(concurrency / n) if n else 0 for n in (most, least)) if least else (0, 0)
        found.append(Sized(name, deployment.gpus, (least, most), groups, (groups[0] * deployment.gpus, groups[1] * deployment.gpus),
                           any(one is not None and one.open for one in reached)))
    return sorted(found, key=lambda one: (not one.holds, one.gpus[1], one.gpus[0]))
