"""Many points at once: on all cores of this machine, or on a Ray cluster; a line a finished point, so that what is done stays done."""
from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .points import key, run_point

__all__ = ["finished", "run_here", "run_on_ray", "sweep"]


def sweep(points: Sequence[Mapping[str, Any]], out: str | os.PathLike[str], *, processes: int | None = None, address: str | None = None,
          progress: Callable[[int, int], None] = lambda done, of: None) -> list[dict[str, Any]]:
    """Run the points that `out` does not hold yet, and add a line to it as each is done.

    Args:
        points: as `points.points` gives them.
        processes: at once; None: one a core.
        address: of a Ray cluster, as Ray has it; None: this machine.
        progress: called with points done and points in all, at the beginning and after each.

    Returns:
        the lines of all points, in their order; those that failed have an `error`, and are run again next time.

    Raises:
        ConfigError: `out` cannot be written, or is something else; or there is no such cluster.
    """
    path = Path(out)
    done = finished(path)
    wanted = {key(point): point for point in points}
    left = [point for name, point in wanted.items() if name not in done]
    runner = run_here(left, processes) if address is None else run_on_ray(left, address)
    progress(len(wanted) - len(left), len(wanted))
    try:
        with path.open("a", encoding="utf-8") as lines:
            for i, line in enumerate(runner, 1):
                done[key(line)] = line
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                progress(len(wanted) - len(left) + i, len(wanted))
    except OSError as error:
        raise ConfigError(f"out={str(path)!r}: cannot be written ({error.strerror}); name another file") from error
    return [done[key(point)] for point in points]


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """The points that a file has, by their keys. A last line without its end was cut off with whoever wrote it: it is removed.

    Raises:
        ConfigError: a file of something else.
    """
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = json.loads(line)
            name = key(one)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: is no point of a sweep; name a file of its own for each sweep") from error
        if "error" not in one:
            found[name] = one
    return found


def run_here(points: Sequence[Mapping[str, Any]], processes: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of the points, as they are done."""
    processes = min(len(points), processes or os.cpu_count() or 1)
    if processes <= 1:
        yield from map(_run, points)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, points)


def run_on_ray(points: Sequence[Mapping[str, Any]], address: str) -> Iterator[dict[str, Any]]:
    """`run_here` with a core of the cluster for each point. Nodes have minengine and the trace where this machine has them.

    Raises:
        ConfigError: Ray is not installed, or nothing answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"cluster={address!r}: needs Ray, here and on every node: pip install 'minengine[ray]'; or leave it out to use "
                          "this machine") from error
    if not points:
        return
    own = not ray.is_initialized()
    if own:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"cluster={address!r}: nothing answers there ({error}); start Ray with `ray start --head`") from error
    try:
        remote = ray.remote(num_cpus=1)(_run)
        running = [remote.remote(point) for point in points]
        while running:
            (first, *_), running = ray.wait(running)
            yield ray.get(first)
    finally:
        if own:
            ray.shutdown()


def _run(point: Mapping[str, Any]) -> dict[str, Any]:
    return run_point(point, _sessions(point["run"]["trace"], point["run"].get("seed", 0)))


@lru_cache(maxsize=2)
def _sessions(trace: str, seed: int) -> Any:
    """Of one trace, for all points of a process; those that fit are kept, others are read when they are asked for."""
    from ..workload.opening import open_sessions

    sessions, _ = open_sessions(trace, seed=seed)
    return list(sessions) if trace == "agentx" else sessions
