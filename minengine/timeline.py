"""When each thing happened to a request. Pure Python."""
from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

__all__ = ["Timeline", "WaitParts"]


class WaitParts(NamedTuple):
    """What a request whose prefix came from a tier waited for, in seconds."""

    retrieve_s: float  # the bytes were on their way
    poll_s: float  # they were there, and nobody had looked
    hand_off_s: float  # seen, until the scheduler knew
    admit_s: float  # known, until a step took the request


@dataclass(slots=True)
class Timeline:
    """When each thing happened, in seconds on the engine's clock; None until it has. The processes of one machine share a clock
    (time.perf_counter), so a timeline may be continued by another engine."""

    arrival_s: float = 0.0
    admitted_s: float | None = None  # first scheduled
    token_s: list[float] = field(default_factory=list)  # one stamp an output token, when it was emitted
    finished_s: float | None = None
    num_preemptions: int = 0
    routed_s: float | None = None  # its workers were chosen
    retrieve_start_s: float | None = None  # of a load from a tier: the bytes are asked for,
    retrieve_end_s: float | None = None  # they are there,
    polled_s: float | None = None  # somebody sees it,
    handed_off_s: float | None = None  # and the scheduler knows
    prefill_start_s: float | None = None  # first tokens of the prompt in a step
    transfer_start_s: float | None = None  # from one engine to another: rows are on their way,
    transfer_end_s: float | None = None  # all of them are there,
    landed_s: float | None = None  # and the scheduler knows (of a tier's load, too)
    decode_admitted_s: float | None = None  # first scheduled by the engine that continues it

    @property
    def prefill_end_s(self) -> float | None:
        """The prompt is computed: that is when its first token comes."""
        return self.token_s[0] if self.token_s else None

    def resumed(self, num_tokens: int, own: Timeline) -> Timeline:
        """A copy with a stamp for each of `num_tokens` tokens, to go on with; what `own` knows already stays as it is there."""
        stamps = self.token_s[:num_tokens]
        stamps += [stamps[-1] if stamps else self.arrival_s] * (num_tokens - len(stamps))
        kept = {f.name: value for f in fields(own) if f.default is None and (value := getattr(own, f.name)) is not None}
        return replace(self, token_s=stamps, **kept)

    def wait_parts(self) -> WaitParts | None:
        """The four parts of a wait for a tier; None if there was none, or it is not over."""
        times = (self.retrieve_start_s, self.retrieve_end_s, self.polled_s, self.handed_off_s, self.admitted_s)
        return None if None in times else WaitParts(*(b - a for a, b in zip(times, times[1:])))

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, queueing included."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between neighbouring output tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:])]

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s
