"""Two public trace formats, read as iterators: agent sessions (AgentX replays them) and Mooncake's requests.

    read_agentx(path)      a session a JSON file: requests with gaps between them, subagents nested inside
    read_mooncake(path)    a request a JSON line: independent arrivals
    find_traces()          where the traces are: yours, the ones beside the checkout, or the small ones shipped here

Neither format holds any text. A prompt is a length and a list of `hash_ids`, one an equal run of tokens (64 in AgentX,
512 in Mooncake); two prompts that start with the same ids start with the same tokens. That is all a cache needs to know.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator

__all__ = ["MOONCAKE_BLOCK", "Session", "Subagent", "TraceError", "TraceRequest", "TraceSource", "find_traces", "hit_share", "leading_hits",
           "read_agentx", "read_mooncake"]

MOONCAKE_BLOCK = 512  # tokens a hash id stands for in Mooncake's format
SHIPPED = Path(__file__).resolve().parent / "data"
BESIDE_CHECKOUT = Path(__file__).resolve().parents[2].parent / "shared" / "data"
VARIABLE = "MINENGINE_TRACES"


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the line or request, the field and the remedy."""


# --- what a trace holds -----------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to the model. Times in seconds, None where the trace does not give them."""

    start_s: float  # since the session's (AgentX) or the trace's (Mooncake) first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]  # leading blocks of the prompt; equal ids stand for equal tokens
    block_size: int  # tokens an id stands for
    api_time_s: float | None = None  # whole request, queueing and first token included
    think_time_s: float | None = None  # gap before it: from the previous request's end in the same agent to its start
    ttft_s: float | None = None

    def cached_tokens(self, hits: int) -> int:
        """Tokens of the prompt that lie in its first `hits` blocks; Mooncake's last block may be a partial one."""
        return min(hits * self.block_size, self.input_tokens)


@dataclass(frozen=True, slots=True)
class Subagent:
    """A helper agent that the session started; all times are on the session's clock. Several may run side by side.

    In the files a subagent's `t` is when it ENDED and its requests' `t` count from its start, `t - duration_ms / 1000`.
    """

    kind: str
    start_s: float
    duration_s: float
    items: tuple["TraceRequest | Subagent", ...]


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's work from first to last request, in the order of the file, subagents nested where they were reported."""

    id: str
    block_size: int
    items: tuple[TraceRequest | Subagent, ...]

    @property
    def agents(self) -> list[list[TraceRequest]]:
        """The requests of each agent, one after the other: the session's own first, then those of each subagent."""
        return list(_agents(self.items))

    @property
    def requests(self) -> list[TraceRequest]:
        """All requests, those of subagents included, in order of their start."""
        return sorted(_flat(self.items), key=lambda request: request.start_s)


def _agents(items: Iterable[TraceRequest | Subagent]) -> Iterator[list[TraceRequest]]:
    yield [item for item in items if isinstance(item, TraceRequest)]
    for item in items:
        if isinstance(item, Subagent):
            yield from _agents(item.items)


def _flat(items: Iterable[TraceRequest | Subagent]) -> Iterator[TraceRequest]:
    for item in items:
        if isinstance(item, Subagent):
            yield from _flat(item.items)
        else:
            yield item


# --- the ideal cache --------------------------------------------------------------------------------------

def leading_hits(requests: Iterable[TraceRequest]) -> Iterator[int]:
    """How many leading blocks of each prompt an ideal cache holds: one a request, in the order given.

    The ideal cache is infinite, instant and shared by exactly the requests passed in: pass one session to ask what its own
    past is worth, a whole Mooncake trace to ask what everybody's past is worth. A block counts if it and all before it
    occurred in the prompt of an EARLIER request; the first unknown block ends the hit, because a row of the cache depends
    on every token before it. Output tokens are not in the traces' ids, so what a model wrote counts when it first comes
    back inside a prompt, not as a hit.
    """
    seen: set[int] = set()
    for request in requests:
        hits = 0
        for block in request.hash_ids:
            if block not in seen:
                break
            hits += 1
        seen.update(request.hash_ids)
        yield hits


def hit_share(groups: Iterable[Iterable[TraceRequest]]) -> float:
    """Ideal block hit: blocks hit over blocks asked for, pooled over groups that share nothing (a group is a session).

    Raises:
        ValueError: no request has a block.
    """
    hits = blocks = 0
    for group in groups:
        group = list(group)
        hits += sum(leading_hits(group))
        blocks += sum(len(request.hash_ids) for request in group)
    if not blocks:
        raise ValueError("groups: no request has a block; pass at least one prompt of a block's length")
    return hits / blocks


# --- readers ----------------------------------------------------------------------------------------------

def read_agentx(path: str | os.PathLike[str]) -> Iterator[Session]:
    """Sessions in the Weka format that AgentX replays: one JSON file a session, read one after the other.

    Args:
        path: one file, or a folder whose `*.json` files are read in order of their names.

    Raises:
        TraceError: no such path, no files in it, or a field that is missing or impossible.
    """
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: holds no .json file; point at a folder of AgentX sessions or at one of them")
    for file in files:
        yield _session(file)


def read_mooncake(path: str | os.PathLike[str]) -> Iterator[TraceRequest]:
    """Requests in Mooncake's format, one JSON object a line, read line by line.

    Args:
        path: a .jsonl file, or a folder that holds exactly one.

    Raises:
        TraceError: no such path, or a line that is no JSON, or a field that is missing or impossible.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if len(files) != 1:
            raise TraceError(f"{path}: holds {len(files)} .jsonl files; name the one to read")
        path = files[0]
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                fields = _Fields(_json(line, where), where)
                yield fields.request(start_s=fields.number("timestamp") / 1000, input_name="input_length", output_name="output_length",
                                     block_size=MOONCAKE_BLOCK, full_blocks_only=False)


def _session(file: Path) -> Session:
    with _open(file) as stream:
        top = _Fields(_json(stream.read(), str(file)), str(file))
    size = top.whole("block_size", at_least=1)
    items = _items(top, size, 0.0)
    if not any(True for _ in _flat(items)):
        raise top.error("requests", "holds no request", "a session has at least one")
    return Session(str(top.get("id", file.stem)), size, items)


def _items(parent: "_Fields", block_size: int, offset_s: float) -> tuple[TraceRequest | Subagent, ...]:
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


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened ({error.strerror}); check the path, or set {VARIABLE}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: is no complete JSON ({error.msg} at character {error.pos}); fetch the file again") from error


class _Fields:
    """A JSON object and where it stands, so that every complaint can say both."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise TraceError(f"{where}: is a {type(value).__name__} where an object was expected; check that the file is in the stated format")
        self.value = value

    def error(self, name: str, what: str, remedy: str) -> TraceError:
        return TraceError(f"{self.where}, field '{name}': {what}; {remedy}")

    def get(self, name: str, default: Any = None) -> Any:
        return self.value.get(name, default)

    def number(self, name: str) -> float:
        """A finite number, 0 or more."""
        given = self.value.get(name)
        if given is None:
            raise self.error(name, "is missing", "every request needs it")
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
            raise self.error(name, f"is {given!r}", "use a number, 0 or more")
        return given

    def maybe(self, name: str) -> float | None:
        return None if self.value.get(name) is None else float(self.number(name))

    def whole(self, name: str, at_least: int = 0) -> int:
        given = self.number(name)
        if given != int(given) or given < at_least:
            raise self.error(name, f"is {given!r}", f"use a whole number, {at_least} or more")
        return int(given)

    def objects(self, name: str) -> Iterator["_Fields"]:
        given = self.value.get(name)
        if not isinstance(given, list):
            raise self.error(name, "is missing" if given is None else "is no list", "list the requests there")
        for i, item in enumerate(given):
            yield _Fields(item, f"{self.where}, {name}[{i}]")

    def request(self, *, start_s: float, input_name: str, output_name: str, block_size: int, full_blocks_only: bool) -> TraceRequest:
        tokens, ids = self.whole(input_name), self.value.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise self.error("hash_ids", "is missing" if ids is None else "is no list of whole numbers", "give one id a block of the prompt")
        expected = tokens // block_size if full_blocks_only else -(-tokens // block_size)
        if len(ids) != expected:
            raise self.error("hash_ids", f"has {len(ids)} ids and {tokens} tokens in blocks of {block_size} make {expected}",
                             f"check '{input_name}' and the block size")
        return TraceRequest(start_s, tokens, self.whole(output_name), tuple(ids), block_size, self.maybe("api_time"), self.maybe("think_time"),
                            self.maybe("ttft"))


# --- where the traces are ---------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where traces were found; `name` says it for a reader, without a path."""

    agentx: Path
    mooncake: Path
    name: str
    synthetic: bool


def find_traces() -> TraceSource:
    """The traces to use: the folder named by `MINENGINE_TRACES`, else `../shared/data` beside the checkout, else the shipped ones.

    A folder of traces holds `agentx/*.json` and `mooncake/*.jsonl`.

    Raises:
        TraceError: `MINENGINE_TRACES` is set and names no such folder; it is never passed over in silence.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not _has_traces(Path(named)):
            raise TraceError(f"{VARIABLE}={named}: has no agentx/*.json and mooncake/*.jsonl; correct it, or unset it to use the shipped traces")
        return _source(Path(named), f"the traces that {VARIABLE} names", False)
    if _has_traces(BESIDE_CHECKOUT):
        return _source(BESIDE_CHECKOUT, "the public traces kept beside the checkout", False)
    return _source(SHIPPED, "the small synthetic traces that ship with minengine", True)


def _has_traces(folder: Path) -> bool:
    return any(folder.glob("agentx/*.json")) and any(folder.glob("mooncake/*.jsonl"))


def _source(folder: Path, name: str, synthetic: bool) -> TraceSource:
    return TraceSource(folder / "agentx", folder / "mooncake", name, synthetic)
