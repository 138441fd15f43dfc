"""A request on its way through a simulated deployment, and what it came to."""
from __future__ import annotations

from dataclasses import dataclass

from ..timeline import Timeline
from ..workload.closed_loop import Turn
from ..workload.report import Record
from .agenda import SECOND
from .nodes import Chain, Run
from .requests import SimRequest, timeline

__all__ = ["Flight"]


@dataclass(eq=False, slots=True)
class Flight:
    """All times in picoseconds, those of `timeline` too.

    Attributes:
        number: in order of arrival.
        output_tokens: of its answer.
        prefill, decode: names of its engines.
        cached: tokens of the prompt that were found on the prefill engine's device, or brought there from the tier.
        given, loaded, computed: tokens of the prompt that had not to be computed; those of them from the tier; and the others. After a preemption,
            of the second try.
        ended: None while it is under way.
    """

    number: int
    turn: Turn
    arrival: int
    output_tokens: int
    runs: tuple[Run, ...]
    ends: tuple[int, ...]
    timeline: Timeline
    prefill: str = ""
    decode: str = ""
    request: SimRequest | None = None  # where it is now
    cached: int = 0
    given: int = 0
    loaded: int = 0
    computed: int = 0
    ended: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, number: int, turn: Turn, now: int, runs: tuple[Run, ...], ends: tuple[int, ...]) -> Flight:
        return cls(number, turn, now, max(1, turn.request.output_tokens), runs, ends, timeline(now))

    def chain(self, block_size: int) -> Chain:
        """Of the prompt's full blocks."""
        return Chain(self.runs, self.ends, 0, self.turn.request.input_tokens // block_size)

    def new_request(self, *, hold: bool = False, source: object = None, resumed: int = 0) -> SimRequest:
        """For its next engine."""
        self.request = SimRequest(f"{self.number}", self.turn.request.input_tokens, self.output_tokens, self.runs, self.ends, self.timeline, flight=self,
                                  hold=hold, source=source, resumed=resumed)
        return self.request

    def record(self, first_token: str) -> Record:
        """`first_token`: as `Deployment` has it."""
        stamps, times = self.timeline.token_s, self.timeline
        record = Record.of(self.turn, self.arrival / SECOND)
        record.admitted_s = _seconds(times.admitted_s)
        if stamps.count:
            given = times.decode_admitted_s if first_token == "decode" and times.decode_admitted_s is not None else stamps.first
            record.first_token_s = given / SECOND
        record.end_s = _seconds(self.ended)
        record.cached_tokens, record.output_tokens, record.error = self.cached, stamps.count, self.error
        record.num_hits_by_tier = {"device": max(0, self.cached - self.loaded), "host": min(self.loaded, self.cached)}
        return record


def _seconds(picoseconds: int | None) -> float | None:
    return None if picoseconds is None else picoseconds / SECOND
