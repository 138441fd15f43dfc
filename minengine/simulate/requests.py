"""A request without its tokens: lengths, a path of runs, and stamps in whole picoseconds, where the engine's has token ids and hashes.

The scheduler sees the engine's `Request` with its counters; what it appends to and never reads back is only counted here, so that an answer of a
thousand tokens takes no more room, and no more time when it is advanced in one go, than one of ten.
"""
from __future__ import annotations

from typing import Any

from ..request import Request, Status
from ..timeline import Timeline
from .nodes import Chain, Run

__all__ = ["SimRequest", "Stamps", "timeline"]

NO_STOPS: frozenset[int] = frozenset()


class _Counted:
    """The list of a request's tokens, whose length its counters say."""

    __slots__ = ()

    def append(self, token: int) -> None:
        pass


TOKENS = _Counted()


class Stamps:
    """When a request's tokens came: how many, the first and the last. Picoseconds."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = self.first = self.last = 0

    def __len__(self) -> int:
        return self.count

    def append(self, now: int) -> None:
        if not self.count:
            self.first = now
        self.count += 1
        self.last = now

    def more(self, n: int, last: int) -> None:
        """So many more, of which only the last one's time is kept; there was one before."""
        self.count += n
        self.last = last


class SimRequest(Request):
    """One turn on one engine.

    Args:
        runs, ends: of its prompt, and of its output (paths.Cutter).
        flight: of whoever handles it.
        resumed: output tokens that come with it, all stamped in `timeline`.
    """

    __slots__ = ("runs", "ends", "flight", "base", "computed", "loaded")

    def __init__(self, request_id: str, prompt_tokens: int, output_tokens: int, runs: tuple[Run, ...], ends: tuple[int, ...], timeline: Timeline, *,
                 flight: Any = None, hold: bool = False, source: Any = None, resumed: int = 0) -> None:
        self.request_id, self.runs, self.ends, self.flight = request_id, runs, ends, flight
        self.token_ids = TOKENS
        self.num_prompt_tokens = prompt_tokens
        self.num_tokens = prompt_tokens + resumed
        self.max_num_tokens = prompt_tokens + output_tokens
        self.num_computed_tokens = self.num_cached_tokens = self.num_hashed_blocks = self.capacity = 0
        self.num_resumed_tokens = resumed
        self.stop_ids = NO_STOPS
        self.block_ids: Any = []
        self.cache_salt = self.grammar = self.finish_reason = self.stop_reason = self.error = None
        self.status = Status.WAITING
        self.timeline = timeline
        self.hold, self.source, self.may_load = hold, source, True
        self.base: int | None = None  # tokens that it had rows of when it was last admitted
        self.computed = 0  # since then
        self.loaded = 0  # of those that it had, from a tier

    def hashes(self, num_blocks: int, block_size: int) -> Chain:
        return Chain(self.runs, self.ends, 0, num_blocks)

    def works(self, tokens: int) -> None:
        """So many of its tokens are computed in a step that begins."""
        if self.base is None:
            self.base, self.computed = self.num_computed_tokens, 0
        self.computed += tokens

    def preempted(self) -> None:
        self.base, self.loaded = None, 0

    def check(self) -> None:
        """Raise AssertionError unless what it has rows of is what was given to it and what was computed for it."""
        if self.base is not None:
            assert self.num_computed_tokens == self.base + self.computed, (
                f"{self}: {self.base} tokens were given and {self.computed} computed")


def timeline(arrival: int) -> Timeline:
    """An empty one, with stamps for tokens that are only counted."""
    found = Timeline(arrival_s=arrival)
    found.token_s = Stamps()  # type: ignore[assignment]
    return found
