"""Many points at once: on all cores of this machine, or on a Ray cluster; a line a finished point, so that what is done stays done."""
from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TextIO

from ..config import ConfigError
from ..workload.sessions import TraceError
from .limits import is_whole
from .points import key, run_point

__all__ = ["finished", "opened", "run_here", "run_on_ray", "sweep"]

REACH_S = 5.0  # for a cluster's machine to answer, before Ray is asked, which would try for minutes
BEGINS = '{"deployment": '  # each line


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
        ConfigError: `out` cannot be written, is something else, or is another sweep's that runs; there is no such cluster; or no process is to run.
    """
    if processes is not None and not (is_whole(processes) and processes >= 1):
        raise ConfigError(f"processes={processes!r}: use a whole number, 1 or more")
    path = Path(out)
    with _written(path) as lines:
        done = finished(path)
        wanted = {key(point): point for point in points}
        left = [point for name, point in wanted.items() if name not in done]
        progress(len(wanted) - len(left), len(wanted))
        with closing(run_here(left, processes) if address is None else run_on_ray(left, address)) as runner:
            for i, line in enumerate(runner, 1):
                done[key(line)] = line
                try:
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
                except OSError as error:
                    raise _unwritable(path, error) from error
                progress(len(wanted) - len(left) + i, len(wanted))
    return [done[key(point)] for point in points]


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """The file, to add to, by one sweep at a time."""
    try:
        lines = path.open("a", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    with lines:
        try:
            import fcntl

            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # a system that has no such lock
            pass
        except OSError as error:
            raise ConfigError(f"out={str(path)!r}: another sweep is writing to it; wait for its end, or name another file") from error
        yield lines


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"out={str(path)!r}: cannot be written ({error.strerror}); name another file")


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """The points that a file has, by their keys. A last line without its end was cut off with whoever wrote it: it is removed.

    Raises:
        ConfigError: a file of something else.
    """
    if not path.is_file():
        return {}
    try:
        *whole, cut = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text; name a file of its own for each sweep") from error
    found, foreign = {}, "is no point of a sweep; name a file of its own for each sweep"
    for number, line in enumerate(whole, 1):
        try:
            one = json.loads(line)
            name = key(one)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: {foreign}") from error
        if "error" not in one:
            found[name] = one
    if cut:
        if not (cut.startswith(BEGINS) or BEGINS.startswith(cut)):
            raise ConfigError(f"{path}, line {len(whole) + 1}: {foreign}")
        path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    return found


def run_here(points: Sequence[Mapping[str, Any]], processes: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of the points, as they are done."""
    processes = min(len(points), processes or os.cpu_count() or 1)
    if processes <= 1:
        yield from map(_run, points)
        return
    with _interrupts_ignored():
        pool = multiprocessing.get_context("spawn").Pool(processes)
    with pool:
        yield from pool.imap_unordered(_run, points)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that begin meanwhile leave Ctrl-C, which reaches all of them, to this one: it ends them."""
    if current_thread() is not main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)


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
        _reach(address)
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


def _reach(address: str) -> None:
    """Raise ConfigError unless something listens there."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:  # nobody there, or no HOST:PORT
        raise ConfigError(f"cluster={address!r}: cannot be reached ({error}); start Ray with `ray start --head`, and use its HOST:PORT, ray://HOST:PORT "
                          "or auto") from error


def _run(point: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sessions, _ = opened(point["run"]["trace"], point["run"].get("seed", 0))
    except (TraceError, ConfigError, OSError) as error:
        return {**point, "error": str(error)}
    return run_point(point, sessions)


@lru_cache(maxsize=2)
def opened(trace: str, seed: int) -> tuple[Any, str]:
    """Sessions of one trace, for all points of a process, and what they are in words; those that fit are kept, others are read when they are asked for."""
    from ..workload.opening import open_sessions

    sessions, words = open_sessions(trace, seed=seed)
    return (list(sessions) if trace == "agentx" else sessions), words
