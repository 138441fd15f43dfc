"""What a router is asked and what it answers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Sequence

from .kv_index import Overlap

__all__ = ["NoPlace", "NoWorker", "Role", "Route", "RouteRequest", "WorkerSpec"]

Role = Literal["both", "prefill", "decode"]


class NoWorker(RuntimeError):
    """No worker of a role that is needed gets requests now; `retry_after_s` says when a trial may start, None that nobody knows."""

    def __init__(self, what: str, retry_after_s: float | None) -> None:
        super().__init__(f"no {what} is up" if retry_after_s is None else f"no {what} is up; the next is tried in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class NoPlace(RuntimeError):
    """Every decoder that is up holds as many requests as it may; route again when one has ended."""


@dataclass(frozen=True)
class WorkerSpec:
    name: str
    role: Role = "both"  # "both": an engine that prefills and decodes
    places: int = 1 << 30  # requests that it may hold at once as a decoder
    machine: str = ""  # workers of one machine share its host and disk tiers


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    request_id: str
    num_tokens: int  # of the prompt, and of the output given already where a request is continued
    hashes: Sequence[bytes] = ()  # of its full blocks, as minengine.kv.blocks.block_hash chains them; () routes by load alone
    session_id: str | None = None
    exclude: frozenset[str] = frozenset()  # workers to keep away from, while others are up


@dataclass(frozen=True)
class Route:
    request_id: str
    prefill: str  # the same as `decode` where one engine does both
    decode: str
    overlap: Overlap  # of the prompt with what the prefill worker has
    trial: bool = False  # it is what decides whether a worker that failed gets requests again

    @property
    def cached_blocks(self) -> int:
        return self.overlap.total
