"""What the front and its workers say to each other, pickled over a socket. Plain data: no process can be confused by another's state.

    front  -> worker   Start, then AddRequest, Resumed, Abort, Release, Renew, Connect, Disconnect, SnapshotPlease, Ping, Stop
    worker -> front    Ready or StartFailed, then Report (one a step), Reserved, Refused, SnapshotTaken, Pong, Failed

A request is known to a worker by a key of its own for every time that it is handed out, the request's id and a running number: whatever comes
under a key that the front has given up is stale, and dropped.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..config import ModelConfig
from ..engine_args import EngineArgs
from ..kv.events import KVEvent, Snapshot
from ..request import Logprob, Resume, SamplingParams, Timeline

if TYPE_CHECKING:
    from ..kv.layout import KVLayout
    from ..prompt import Prompt
    from .source import KVSource, KVTarget, PoolFacts, Reserve

__all__ = ["Abort", "AddRequest", "Connect", "Delta", "Disconnect", "Failed", "HeldRequest", "Ping", "Pong", "Ready", "Refused", "Release", "Renew", "Report",
           "Reserved", "Resumed", "SnapshotPlease", "SnapshotTaken", "Start", "StartFailed", "Stop", "WorkerStats"]


# --- to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start:
    """
    Attributes:
        role: "both", "prefill" or "decode".
        transfer: "auto", "nixl" or "shm": how KV moves; None: it does not.
        alone: every worker of the cluster has one rank. Else weights are compared as they are stored: no rank has all of them.
    """

    name: str
    role: str
    args: EngineArgs
    transfer: str | None = None
    alone: bool = True


@dataclass(frozen=True, kw_only=True)
class AddRequest:
    """
    Attributes:
        timeline: of a request that begins here: when it arrived and was routed.
        resume: what the request has given already, of one that is continued here.
        hold: keep its blocks after its first token, for a decoder.
        source: where the KV of its tokens lies, or who will write it here (kv_transfer="push_layers"); None: it is computed here.
        target: write its KV there, layer by layer, while it is computed.
    """

    key: str
    prompt: Prompt
    params: SamplingParams  # with a seed
    cache_salt: str | None
    timeline: Timeline
    resume: Resume | None = None
    hold: bool = False
    source: KVSource | Reserve | None = None
    target: KVTarget | None = None


class Resumed(NamedTuple):
    """The prefill of a request that was added with a `Reserve` has given this; from now on it goes by another key, so that what was said of
    it before cannot be mistaken."""

    key: str
    request: AddRequest


class Abort(NamedTuple):
    key: str


class Release(NamedTuple):
    """Give up what is held for a decoder; harmless if nothing is."""

    key: str


class Renew(NamedTuple):
    """What is held waits for a decoder that has no room yet: keep it for another lease; harmless if nothing is held."""

    key: str


class Connect(NamedTuple):
    """Another worker's pool: KV may come from it or go to it from now on."""

    facts: PoolFacts


class Disconnect(NamedTuple):
    """The process of that transfer agent has ended."""

    agent: str


class SnapshotPlease(NamedTuple):
    pass


class Ping(NamedTuple):
    number: int


class Stop(NamedTuple):
    pass


# --- from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine is there.

    Attributes:
        fingerprint: of the weights: equal if and only if, in all likelihood, they are.
        layout: where the rows lie in the pool of a rank.
        pools: what others need to reach its pool, one for each rank where they have requests of their own; none without transfers.
        num_threads: of each rank.
        about_transfer: in one line, how KV moves and why so.
    """

    pid: int
    config: ModelConfig
    fingerprint: str
    max_model_len: int
    num_threads: int
    num_blocks: int
    layout: KVLayout
    kv_cache_dtype: str
    pools: tuple[PoolFacts, ...] = ()
    about_transfer: str = ""


class StartFailed(NamedTuple):
    message: str


class Delta(NamedTuple):
    """What is new of a request. `timeline` comes with the first token and with the end; in between `token_s` are the new stamps."""

    key: str
    text: str
    token_ids: list[int]
    token_s: list[float]
    num_cached_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    timeline: Timeline | None = None
    error: str | None = None


class WorkerStats(NamedTuple):
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    steps: int = 0
    jump_forward_tokens: int = 0
    transfers: dict[str, float] = {}  # counts and seconds of the worker's connector since its start


class HeldRequest(NamedTuple):
    """Its prompt is computed, its first token sent, and its rows wait at `source` for a decoder; None: they are being written to it, or could
    not be kept."""

    key: str
    source: KVSource | None


@dataclass(slots=True)
class Report:
    """A step's outcome."""

    deltas: list[Delta] = field(default_factory=list)
    held: list[HeldRequest] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)
    stats: WorkerStats = WorkerStats()


class Reserved(NamedTuple):
    """Blocks wait for the rows of a request that was added with a `Reserve`."""

    key: str
    target: KVTarget


class Refused(NamedTuple):
    """The request can never be served here; nothing of it was computed."""

    key: str
    message: str


class SnapshotTaken(NamedTuple):
    snapshot: Snapshot


@dataclass(frozen=True)
class Pong:
    number: int
    clock_s: float = field(default_factory=time.perf_counter)  # of its machine, when it answered


class Failed(NamedTuple):
    """The worker ends; its last words."""

    message: str
