"""`minengine simulate --preset prime-inference`: what was reported of one deployment beside what the models here predict of it."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..workload.scaling import scaled
from ..workload.stats import mean
from ..workload.traces import Session
from .deployment import Deployment
from .machine import machine
from .prediction import Prediction, table
from .predictions import keep
from .rack_fit import preset

__all__ = ["deployment", "loop", "main", "predictions", "replayed"]


def deployment(given: Mapping[str, Any] | None = None, **changes: Any) -> Deployment:
    """The preset's, with changes: everything that simulates the headline starts here."""
    given = preset() if given is None else given
    assumed, base = given["assumed"], given["deployment"]
    options = {name: assumed[name] for name in ("weights", "experts", "draft_tokens", "tokens_per_step")}
    return Deployment(**{"kv_cache_dtype": assumed["kv_cache_dtype"], "model_options": options, **base, **changes})


def loop(given: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """How it is loaded, as `simulate` takes it, with changes."""
    given = preset() if given is None else given
    return {"gap_cap_s": float(given["assumed"]["gap_cap_s"]), **given["loop"], **changes}


def replayed(sessions: Sequence[Session], given: Mapping[str, Any] | None = None) -> list[Session]:
    """The sessions with prompts and answers scaled, each by one factor, to the preset's mean lengths: a few sessions stand for a set that is longer."""
    workload = (preset() if given is None else given)["workload"]
    requests = [request for session in sessions for request in session.requests]
    scale, output_scale = (workload[name] / mean(getattr(request, name) for request in requests) for name in ("input_tokens", "output_tokens"))
    return [scaled(session, scale, session.block_size, output_scale) for session in sessions]


def predictions(given: Mapping[str, Any] | None = None, *, sessions: Sequence[Session] | None = None, faster: float = 1.0,
                progress: Callable[[str], None] = lambda what: None) -> Iterator[Prediction]:
    """All of them, those first that need no cluster.

    Args:
        sessions: as recorded; None leaves out what needs them.
        faster: share of the loop's time that each run has.
    """
    from .prime_steady import steady

    given = preset() if given is None else given
    yield from steady(given=given)
    if sessions is None:
        return
    from .prime_cluster import CLUSTER, Runs

    runs = Runs(lambda **changes: deployment(given, **changes), lambda **changes: loop(given, **changes), replayed(sessions, given), recorded=sessions,
                faster=faster, progress=progress)
    for figures in CLUSTER:
        yield from figures(runs)


def main(quick: bool = False, out: str | None = None, traces: str | None = None) -> int:
    """Print the table; returns the exit code.

    Args:
        quick: a third of the simulated time in each run.
        out: a file that keeps the same, see predictions.py.
        traces: a folder with AgentX sessions; None: as `find_traces` finds them. Of invented ones nothing is simulated.

    Raises:
        ConfigError: no sessions, or a file that cannot be written.
    """
    from ..workload.traces import find_traces, read_agentx

    source = None if traces else find_traces()
    folder = Path(traces) if traces else source.agentx
    sessions = None if source is not None and source.synthetic else [one for path in sorted(folder.glob("*.json")) for one in read_agentx(path)]
    if sessions is not None and not sessions:
        raise ConfigError(f"traces={str(folder)!r}: has no *.json with AgentX sessions; give the folder that has them")
    found = list(predictions(sessions=sessions, faster=1 / 3 if quick else 1.0, progress=lambda what: print(f"simulating {what}", file=sys.stderr)))
    print(table(found))
    if sessions is None:
        print("\nWhat needs the cluster is left out: there are no recorded sessions here, and invented ones predict nothing. Set MINENGINE_TRACES.")
    if out:
        command = "minengine simulate --preset prime-inference" + (" --quick" if quick else "")
        try:
            keep(out, found, command=command, preset=preset(), rack=machine(preset()["deployment"]["machine"]).mapping())
        except OSError as error:
            raise ConfigError(f"out={out!r}: cannot be written ({error.strerror})") from error
    return 0
