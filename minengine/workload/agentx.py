"""Agent sessions in the Weka format that AgentX replays: a session a JSON file, or a session a line of a .jsonl file.

    {"id", "block_size", "requests": [{"t", "type": "n"|"s", "in", "out", "hash_ids", "api_time"?, "think_time"?, "ttft"?},
                                      {"t", "type": "subagent", "subagent_type", "duration_ms", "requests": [...]}, ...]}

Times in seconds but for `duration_ms`. A subagent's `t` is when it ended, on the clock of what it is listed in; its requests' `t` count from its
start, `t - duration_ms / 1000`. Fields that say nothing to a cache or a scheduler (model, tools, stop reason) are not read.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterable, Iterator

from .reading import Fields, Skipped, as_path, open_text, parsed, read_lines
from .sessions import Session, SessionSequence, Subagent, TraceError, TraceRequest

__all__ = ["AgentXFiles", "read_agentx", "write_agentx"]

DECIMALS = 6  # of a time that is written: microseconds, and what was read with as many comes back as it was


def read_agentx(path: str | os.PathLike[str], skip_bad: Skipped | None = None) -> Iterator[Session]:
    """Sessions one after the other; one is in memory at a time.

    Args:
        path: a .json file, a .jsonl file, or a folder whose `*.json` files are read in order of their names.
        skip_bad: counts malformed sessions instead of ending at the first.

    Raises:
        TraceError: no such path, no files in it; or without `skip_bad`, a field that is missing or impossible.
    """
    for file in _files(as_path(path)):
        if file.suffix == ".jsonl":
            yield from read_lines(file, lambda fields: _session(fields, fields.where.rpartition(", ")[2]), skip_bad)
            continue
        try:
            with open_text(file) as stream:
                session = _session(Fields(parsed(stream.read(), str(file)), str(file)), file.stem)
        except TraceError as error:
            if skip_bad is None:
                raise
            skip_bad.note(error)
        else:
            yield session


class AgentXFiles(SessionSequence):
    """The sessions of a path as a sequence that reads one whenever it is asked for it, and keeps none: a set of any size in any order.

    Args, Raises: as `read_agentx`, and where there is no session; with `skip_bad` all are read once at the beginning, to know which to leave out.
    """

    def __init__(self, path: str | os.PathLike[str], skip_bad: Skipped | None = None) -> None:
        self._places: list[tuple[Path, int, int]] = []  # file; number of the line and where it begins, both 0 for a file that is one session
        for file in _files(as_path(path)):
            self._places += [(file, 0, 0)] if file.suffix != ".jsonl" else _lines(file)
        if skip_bad is not None:
            self._places = [place for i, place in enumerate(self._places) if self._is_good(i, skip_bad)]
        if not self._places:
            raise TraceError(f"{path}: holds no session that can be read{skip_bad.complaint if skip_bad else ''}")

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, i: int) -> Session:
        file, number, offset = self._places[i]
        if not number:
            return next(read_agentx(file))
        with file.open("rb") as stream:
            stream.seek(offset)
            where = f"{file}, line {number}"
            return _session(Fields(parsed(stream.readline().decode(errors="replace"), where), where), f"line {number}")

    def _is_good(self, i: int, skip_bad: Skipped) -> bool:
        try:
            self._at(i)
        except TraceError as error:
            skip_bad.note(error)
            return False
        return True


def write_agentx(path: str | os.PathLike[str], sessions: Iterable[Session]) -> int:
    """Write sessions as they come, so that a generator of any length needs no memory; returns how many.

    Args:
        path: a .jsonl file, a line a session, or a folder, a file a session named after its id.

    Raises:
        TraceError: a prompt whose ids are not those of its full blocks; or in a folder, an id that is no file name or comes twice.
    """
    path, number = Path(path), 0
    if path.suffix == ".jsonl":
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as out:
            for number, session in enumerate(sessions, 1):
                out.write(_line(session))
        return number
    path.mkdir(parents=True, exist_ok=True)
    written: set[str] = set()
    for number, session in enumerate(sessions, 1):
        if session.id in written or Path(session.id).name != session.id:
            raise TraceError(f"session {session.id!r}: {'comes twice' if session.id in written else 'is no file name'}; write a .jsonl file instead")
        written.add(session.id)
        (path / f"{session.id}.json").write_text(_line(session), encoding="utf-8")
    return number


# --- reading ------------------------------------------------------------------------------------------------

def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: holds no .json file; point at a folder of AgentX sessions or at one of them")
    return files


def _lines(file: Path) -> Iterator[tuple[Path, int, int]]:
    with open_text(file), file.open("rb") as lines:
        offset = 0
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield file, number, offset
            offset += len(line)


def _session(top: Fields, name: str) -> Session:
    """`name`: of one that has no id."""
    size = top.whole("block_size", at_least=1)
    session = Session(str(top.get("id", name)), size, _items(top, size, 0.0))
    if not any(session.agents):
        raise top.error("requests", "holds no request", "a session has at least one")
    return session


def _items(parent: Fields, block_size: int, offset_s: float) -> tuple[TraceRequest | Subagent, ...]:
    """The requests of a session or of a subagent that started `offset_s` into it, subagents within subagents included."""
    items: list[TraceRequest | Subagent] = []
    for fields in parent.objects("requests"):
        kind = fields.get("type")
        if kind == "subagent":
            duration_s = fields.number("duration_ms") / 1000
            start_s = offset_s + fields.number("t") - duration_s
            items.append(Subagent(str(fields.get("subagent_type", "")), start_s, duration_s, _items(fields, block_size, start_s)))
        elif kind in ("n", "s"):
            items.append(fields.request(start_s=offset_s + fields.number("t"), input_name="in", output_name="out", block_size=block_size,
                                        full_blocks_only=True))
        else:
            raise fields.error("type", f"is {kind!r}", "use 'n', 's' or 'subagent'")
    return tuple(items)


# --- writing ------------------------------------------------------------------------------------------------

def _line(session: Session) -> str:
    requests = [_written(item, session, 0.0) for item in session.items]
    return json.dumps({"id": session.id, "block_size": session.block_size, "hash_id_scope": "local", "requests": requests}, separators=(",", ":")) + "\n"


def _written(item: TraceRequest | Subagent, session: Session, offset_s: float) -> dict[str, Any]:
    if isinstance(item, Subagent):
        return {"t": round(item.start_s - offset_s + item.duration_s, DECIMALS), "type": "subagent", "subagent_type": item.kind,
                "duration_ms": round(item.duration_s * 1000, DECIMALS), "requests": [_written(inner, session, item.start_s) for inner in item.items]}
    if item.block_size != session.block_size or len(item.hash_ids) != item.input_tokens // session.block_size:
        raise TraceError(f"session {session.id}: a prompt of {item.input_tokens} tokens has {len(item.hash_ids)} ids of {item.block_size} tokens; "
                         f"give one for each full block of {session.block_size}")
    times = {"api_time": item.api_time_s, "think_time": item.think_time_s, "ttft": item.ttft_s}
    return {"t": round(item.start_s - offset_s, DECIMALS), "type": "n" if item.ttft_s is None else "s", "in": item.input_tokens, "out": item.output_tokens,
            "hash_ids": list(item.hash_ids), **{name: round(value, DECIMALS) for name, value in times.items() if value is not None}}
