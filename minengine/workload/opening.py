"""From the name of a trace to sessions that a closed loop can replay, whatever its format."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .generator import AgentModel
from .reading import Fields, Skipped, as_path, open_text, parsed
from .sessions import Session, TraceError, TraceRequest
from .traces import AgentXFiles, conversations, find_traces, read_csv, read_mooncake

__all__ = ["open_sessions"]

GENERATED = 1 << 20  # sessions: more than a replay takes


def open_sessions(trace: str | os.PathLike[str], *, skip_bad: Skipped | None = None, seed: int = 0) -> tuple[Iterable[Session], str]:
    """(sessions, what they are in words). Nothing is kept of them but what an index needs.

    Args:
        trace: `agentx` or `mooncake`, the ones at hand (`find_traces`); `generated`, drawn by `seed` from a model fitted to public sessions; or a
            path: a folder of AgentX sessions or with one Mooncake file, a .json, .jsonl (of either format) or .csv file. Arrivals are put together
            to conversations.
        skip_bad: counts malformed parts instead of ending at the first.

    Raises:
        TraceError: no such trace, or nothing in it that can be read; or without `skip_bad`, its first session or arrival is malformed.
    """
    if trace == "generated":
        return AgentModel.shipped().sessions(GENERATED, seed), "agents drawn from the model fitted to the public sessions"
    if trace in ("agentx", "mooncake"):
        found = find_traces()
        path, words = getattr(found, trace), f"{trace}: {found.name}"
    else:
        path = as_path(trace)
        words = str(path)
    if path.suffix == ".csv":
        return _arrivals(read_csv, path, skip_bad), f"{words}, each request a session"
    if _is_mooncake(path):
        return _arrivals(read_mooncake, path, skip_bad), f"{words}, arrivals put together to conversations"
    sessions = AgentXFiles(path, skip_bad)
    sessions[0]  # what is no trace is known before anything begins
    return sessions, f"{words}, {len(sessions)} sessions"


def _arrivals(read: Callable[..., Iterator[TraceRequest]], path: Path, skip_bad: Skipped | None) -> _Again:
    passed_over = Skipped()
    if next(read(path, skip_bad=skip_bad and passed_over), None) is None:
        raise TraceError(f"{path}: holds no request that can be read{passed_over.complaint}")
    return _Again(lambda skipped: conversations(read(path, skip_bad=skipped)), skip_bad)


class _Again:
    """What a reader gives, as often as it is asked; what is malformed is counted the first time only."""

    def __init__(self, read: Callable[[Skipped | None], Iterator[Session]], skip_bad: Skipped | None) -> None:
        self._read, self._skipped = read, skip_bad

    def __iter__(self) -> Iterator[Session]:
        skipped = self._skipped
        if skipped is not None:
            self._skipped = Skipped()
        return self._read(skipped)


def _is_mooncake(path: Path) -> bool:
    if path.is_dir():
        return not any(path.glob("*.json")) and any(path.glob("*.jsonl"))
    if path.suffix != ".jsonl":
        return False
    with open_text(path) as lines:
        for line in lines:
            try:
                return "requests" not in Fields(parsed(line, ""), "").value
            except TraceError:
                continue  # for the reader to complain about
    return False
