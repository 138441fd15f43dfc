"""Traces of agents and of chat: where they are, and what a cache can make of them.

    read_agentx(path)      sessions with gaps between their requests, subagents nested inside (agentx.py)
    read_mooncake(path)    independent arrivals, a request a JSON line (mooncake.py)
    read_csv(path)         arrivals with lengths alone, such as Splitwise's (csv_trace.py)
    find_traces()          where the traces are: yours, the ones beside the checkout, or the small ones shipped here

All are read as iterators, and with `skip_bad` malformed parts are counted and passed over. No format holds any text. A prompt is a length and a
list of `hash_ids`, one an equal run of tokens (64 in AgentX, 512 in Mooncake); two prompts that start with the same ids start with the same
tokens. That is all a cache needs to know.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator

from .agentx import AgentXFiles, read_agentx, write_agentx
from .csv_trace import read_csv
from .mooncake import MOONCAKE_BLOCK, conversations, read_mooncake, write_mooncake
from .reading import VARIABLE, Skipped
from .sessions import Session, Subagent, TraceError, TraceRequest

__all__ = ["MOONCAKE_BLOCK", "AgentXFiles", "Session", "Skipped", "Subagent", "TraceError", "TraceRequest", "TraceSource", "conversations",
           "find_traces", "hit_share", "leading_hits", "read_agentx", "read_csv", "read_mooncake", "write_agentx", "write_mooncake"]

SHIPPED = Path(__file__).resolve().parent / "data"
BESIDE_CHECKOUT = Path(__file__).resolve().parents[2].parent / "shared" / "data"


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
