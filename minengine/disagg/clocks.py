"""Stamps of other machines. A time means nothing on another machine: each counts (time.perf_counter) from a moment of its own.

What a worker on another node is told and tells is therefore set forward or back, by how far its clock is ahead of the front's; all that the
front knows is on its own clock. Processes of one machine share a clock, and nothing of this is used for them.
"""
from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..timeline import Timeline
from .messages import AddRequest, Delta, Report, Resumed

__all__ = ["RemoteClock", "set_back", "set_forward"]

DRIFT = 1e-4  # seconds a second: more than two clocks run apart


class RemoteClock:
    """How far another machine's clock is ahead of this one's.

    An answer that shows their time was given between our asking and our hearing it; we take the middle, which is wrong by half of what lies
    between at most. That limit grows as the clocks run apart, and an answer that is closer than the last one has become takes its place.

    Attributes:
        ahead_s: their time is ours and so much; error_s: it was at most so wrong when it was found.
    """

    def __init__(self) -> None:
        self.ahead_s, self.error_s = 0.0, float("inf")
        self._found_s = 0.0

    def heard(self, asked_s: float, theirs_s: float, heard_s: float) -> None:
        """
        Args:
            asked_s, heard_s: on our clock; theirs_s: on theirs, somewhere between.
        """
        error_s = (heard_s - asked_s) / 2
        if error_s <= self.error_s + DRIFT * (heard_s - self._found_s):
            self.ahead_s, self.error_s, self._found_s = theirs_s - (asked_s + heard_s) / 2, error_s, heard_s


def set_forward(message: Any, by_s: float) -> Any:
    """A message to a worker, with its stamps on the worker's clock."""
    match message:
        case AddRequest():
            resume = message.resume
            if resume is not None and resume.timeline is not None:
                resume = replace(resume, timeline=_moved(resume.timeline, by_s))
            return replace(message, timeline=_moved(message.timeline, by_s), resume=resume)
        case Resumed(key, request):
            return Resumed(key, set_forward(request, by_s))
    return message


def set_back(message: Any, by_s: float) -> Any:
    """A message of a worker, with its stamps on our clock."""
    if isinstance(message, Report):
        return replace(message, deltas=[_earlier(delta, by_s) for delta in message.deltas])
    return message


def _earlier(delta: Delta, by_s: float) -> Delta:
    return delta._replace(token_s=[stamp - by_s for stamp in delta.token_s], timeline=None if delta.timeline is None else _moved(delta.timeline, -by_s))


def _moved(timeline: Timeline, by_s: float) -> Timeline:
    stamps = {f.name: value + by_s for f in fields(timeline) if f.name.endswith("_s") and isinstance(value := getattr(timeline, f.name), float)}
    return replace(timeline, token_s=[stamp + by_s for stamp in timeline.token_s], **stamps)
