"""What a trace holds: requests with their lengths and gaps, the agent session that they belong to, and its subagents. No text, as no trace has any."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Iterable, Iterator

__all__ = ["MOST_TOKENS", "Session", "SessionSequence", "Subagent", "TraceError", "TraceRequest"]

MOST_TOKENS = 1 << 24  # of a prompt or an answer: far above any model's positions, and its ids still fit in memory


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the line or request, the field and the remedy."""


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


class SessionSequence(Sequence):
    """Sessions that are made when they are asked for, and not kept: `_at` makes one. A slice is a list of them."""

    def _at(self, i: int) -> Session:
        raise NotImplementedError

    def __getitem__(self, i: int | slice) -> Session | list[Session]:
        if isinstance(i, slice):
            return [self._at(k) for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self._at(i % len(self))


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
