"""A closed loop: so many sessions are live at any time, and each request waits for what it waited for when it was recorded.

    loop = ClosedLoop(sessions, concurrency=66)
    for delay_s, turn in loop.begin(): ...          # at once, each after its delay
    for delay_s, turn in loop.ended(turn): ...      # whenever a request has ended: what that sets free, each after its delay

There is no clock in here: who serves the requests, and in which time, is the caller's affair, so the same loop drives the engine, a server
behind a URL and the simulator.

    session   q1 ──think── q2 ─────────────────────────(waits)── q3 ──think── q4
    subagent               └─gap─ s1 ──think── s2 ──┐             │
    subagent               └─gap─ s1 ───────────────┴── the last one's end, gap

What a request waits for: the agent's previous request, and each subagent that had ended before it began. It begins when all of these have
ended and a gap is over: the agent's think time, or where it waited for a subagent the shorter time since that one's end. A subagent begins a
gap after the last request of its parent that had ended before it began. A gap longer than the cap is cut to it.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Iterable, Iterator, NamedTuple

from ..config import ConfigError
from .sessions import MOST_TOKENS, Session, Subagent, TraceError, TraceRequest

__all__ = ["ClosedLoop", "Turn", "Wait", "gap_s", "waits"]

STARTS = ("beginning", "anywhere")
GAPS = ("recorded", "bounded")


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a replay."""

    request: TraceRequest
    session: str  # of this live copy alone: "trace_0010#3". Also its cache salt: copies share nothing
    agent: int  # 0: the session's own; others are its subagents, numbered as in `Session.agents`
    number: int  # of the agent's requests
    cold: bool = False  # an arrival from outside, of no session


def gap_s(request: TraceRequest, previous_s: float, gaps: str = "recorded") -> float:
    """The think time before a request, 0 where none was recorded. `bounded`: no more than since the previous request's start, `previous_s`.

    Why that bound: where the public traces lack a request's `api_time`, the next ones' think times are all counted from the last request that
    had one, so that they add up to more than the time that passed.
    """
    gap = request.think_time_s or 0.0
    return min(gap, max(0.0, request.start_s - previous_s)) if gaps == "bounded" else gap


class Wait(NamedTuple):
    """Before a request: so many ends, and a gap after the last of them."""

    gap_s: float
    ends: int
    after: tuple[int, int] | None  # (agent, number) of the request before it in its agent, or of the one whose end began the agent


def waits(session: Session, gaps: str = "recorded") -> dict[tuple[int, int], Wait]:
    """What each request (agent, number) of a session waits for when it is replayed, no gap cut. Agents as in `Session.agents`.

    Raises:
        TraceError: the session has no request.
    """
    return {node: Wait(step.delay_s, step.waits_for, step.before) for node, step in _Live(session.id, session, math.inf, gaps).steps.items()}


class ClosedLoop:
    """
    Args:
        sessions: a sequence is taken in an order drawn by the seed, again and again, with a new order and new copies each time. It may read a
            session only when asked for it. Any other iterable is taken in its own order, one by one, and again when it is over; an iterator,
            which can be read once, leaves the loop to run dry.
        concurrency: sessions that are live at any time, each with its subagents.
        gap_cap_s: longest gap that is replayed.
        seed: of the order, and of all that is drawn.
        gaps: `recorded` or `bounded`, as `gap_s` takes it.
        start_within_s: the first sessions begin at moments drawn within this time.
        start_at: where the first sessions begin. `anywhere`: at the request that was the last one at a moment drawn from the session's
            recorded time, gaps cut: what came before is left out. It carries the session's whole past, which nobody has cached yet. Those that
            follow begin at their beginning.
        cold_per_s: requests a second from outside the sessions, on average, at random moments (`cold`): a Poisson process, in milliseconds, so
            COLD_MOST at most.
        cold_tokens, cold_output_tokens: their lengths.

    Raises:
        ConfigError: a setting that is not possible, or no sessions.
        TraceError: a session without a request, when its turn comes.
    """

    def __init__(self, sessions: Iterable[Session], *, concurrency: int, gap_cap_s: float = 300.0, seed: int = 0, gaps: str = "recorded",
                 start_within_s: float = 0.0, start_at: str = "beginning", cold_per_s: float = 0.0, cold_tokens: int = 0,
                 cold_output_tokens: int = 0) -> None:
        _demand(_is_whole(concurrency) and concurrency >= 1, f"concurrency={concurrency!r}: use a whole number of sessions, 1 or more")
        _demand(_is_whole(seed) and seed >= 0, f"seed={seed!r}: use a whole number, 0 or more")
        _demand(_is_number(gap_cap_s) and gap_cap_s >= 0, f"gap_cap_s={gap_cap_s!r}: use seconds, 0 or more")
        _demand(_is_number(start_within_s) and 0 <= start_within_s < math.inf, f"start_within_s={start_within_s!r}: use seconds, 0 or more")
        _demand(gaps in GAPS, f"gaps={gaps!r}: use {' or '.join(GAPS)}")
        _demand(start_at in STARTS, f"start_at={start_at!r}: use {' or '.join(STARTS)}")
        _demand(_is_number(cold_per_s) and 0 <= cold_per_s <= COLD_MOST, f"cold_per_s={cold_per_s!r}: use requests a second, 0 to {COLD_MOST}")
        for name, tokens in (("cold_tokens", cold_tokens), ("cold_output_tokens", cold_output_tokens)):
            _demand(_is_whole(tokens) and (not cold_per_s or 1 <= tokens <= MOST_TOKENS),
                    f"{name}={tokens!r}: use 1 to {MOST_TOKENS} tokens where cold_per_s is not 0")
        self.concurrency, self.gap_cap_s, self.gaps = concurrency, gap_cap_s, gaps
        self.sessions_begun = self.sessions_ended = 0
        self._start_within_s, self._start_at = start_within_s, start_at
        self._cold_per_s, self._cold = cold_per_s, (cold_tokens, cold_output_tokens)
        self._rng, self._cold_rng = Random(f"{seed} sessions"), Random(f"{seed} cold")
        self._feed = _in_seeded_order(sessions, self._rng) if isinstance(sessions, Sequence) else _in_own_order(sessions)
        self._copies: Counter[str] = Counter()
        self._live: dict[str, _Live] = {}

    @property
    def live(self) -> int:
        """Sessions that have begun, or are about to, and have not ended."""
        return len(self._live)

    def begin(self) -> list[tuple[float, Turn]]:
        """(delay in seconds from now, turn) of all that can begin by itself. Call it once, first.

        Raises:
            ConfigError: there are no sessions.
        """
        found: list[tuple[float, Turn]] = []
        for _ in range(self.concurrency):
            delay_s = self._rng.random() * self._start_within_s
            found += [(delay_s + after_s, turn) for after_s, turn in self._open(self._start_at)]
        _demand(bool(self._live), "sessions: is empty; give at least one")
        return found

    def ended(self, turn: Turn) -> list[tuple[float, Turn]]:
        """What the end of this turn sets free: (delay in seconds from that end, turn). A session's last end begins the next session.

        Raises:
            ValueError: the turn is not under way: it ended before, or was never begun.
        """
        if turn.cold:
            return []
        live = self._live.get(turn.session)
        if live is None or (turn.agent, turn.number) not in live.under_way:
            raise ValueError(f"{turn.session}, agent {turn.agent}, request {turn.number}: is not under way")
        found = live.end((turn.agent, turn.number))
        if not live.unfinished:
            del self._live[turn.session]
            self.sessions_ended += 1
            found = self._open("beginning")
        return found

    def cold(self) -> Iterator[tuple[float, Turn]]:
        """(seconds since the beginning, turn) of the arrivals from outside, without end; none if `cold_per_s` is 0. Read one when the last came."""
        now_ms = number = 0
        tokens, output_tokens = self._cold
        while self._cold_per_s:
            # Whole milliseconds, because the last bit of a logarithm differs between platforms.
            now_ms += round(-math.log(1 - self._cold_rng.random()) / self._cold_per_s * 1000)
            request = TraceRequest(now_ms / 1000, tokens, output_tokens, tuple(range(tokens // COLD_BLOCK)), COLD_BLOCK)
            yield now_ms / 1000, Turn(request, f"cold arrival#{number}", 0, 0, cold=True)
            number += 1

    def _open(self, start_at: str) -> list[tuple[float, Turn]]:
        session = next(self._feed, None)
        if session is None:
            return []
        self.sessions_begun += 1
        name = f"{session.id}#{self._copies[session.id]}"
        self._copies[session.id] += 1
        live = self._live[name] = _Live(name, session, self.gap_cap_s, self.gaps)
        return live.begin(self._rng.random() if start_at == "anywhere" else None)


COLD_MOST = 1000  # a second: arrivals are in whole milliseconds
COLD_BLOCK = 64  # tokens of an id in a cold prompt: which ids stand where no id is ever repeated matters to nobody


def _demand(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_seeded_order(sessions: Sequence[Session], rng: Random) -> Iterator[Session]:
    while sessions:
        draws = [rng.random() for _ in range(len(sessions))]  # a loop over them would read each
        for i in sorted(range(len(draws)), key=draws.__getitem__):
            yield sessions[i]


def _in_own_order(sessions: Iterable[Session]) -> Iterator[Session]:
    again = True
    while again:
        again = False
        for session in sessions:
            again = True
            yield session


# --- one live session ---------------------------------------------------------------------------------------

Node = tuple[int, int]  # agent, number


class _End(NamedTuple):
    """Of a subagent, on the trace's clock."""

    ended_s: float  # as recorded
    answered_s: float  # its last request
    last: Node


@dataclass(slots=True)
class _Step:
    """One request of the session: how many ends it waits for, the gap after the last of them, and who waits for its own end."""

    request: TraceRequest
    delay_s: float
    before: Node | None  # in its agent, or the one whose end began the agent
    waits_for: int = 0
    sets_free: list[Node] = field(default_factory=list)


class _Live:
    """A copy of a session under way."""

    def __init__(self, name: str, session: Session, gap_cap_s: float, gaps: str) -> None:
        self.name, self.gap_cap_s, self.gaps = name, gap_cap_s, gaps
        self.steps: dict[Node, _Step] = {}
        self.num_agents = 0
        self._agent(session.items, None)
        if not self.steps:
            raise TraceError(f"session {session.id}: holds no request; a session has at least one")
        self.under_way: set[Node] = set()
        self.unfinished = len(self.steps)

    # --- what waits for what -------------------------------------------------------------------------------

    def _agent(self, items: Sequence[TraceRequest | Subagent], begun_by: tuple[Node, float] | None, ended_s: float = 0.0) -> list[_End]:
        """Note an agent and its subagents.

        Args:
            begun_by: the request whose end began it, and that end on the trace's clock.
            ended_s: when it ended, on the trace's clock.

        Returns the ends of all agents in here, its own included, that none of its requests waits for.
        """
        agent, self.num_agents = self.num_agents, self.num_agents + 1
        requests = [item for item in items if isinstance(item, TraceRequest)]
        previous_s = 0.0
        for number, request in enumerate(requests):
            own = gap_s(request, previous_s, self.gaps)
            if number == 0 and agent:  # a subagent's first: no think time, but the time since it could begin
                own = max(0.0, request.start_s - (begun_by[1] if begun_by else 0.0))
            before = (agent, number - 1) if number else begun_by and begun_by[0]
            self.steps[agent, number] = _Step(request, own, before)
            if before:
                self._edge(before, (agent, number))
            previous_s = request.start_s
        ends = [request.start_s + (request.api_time_s or 0.0) for request in requests]
        left: list[_End] = []
        for item in items:
            if isinstance(item, Subagent):
                parent = max((i for i, end_s in enumerate(ends) if end_s <= item.start_s), default=-1)
                began = ((agent, parent), ends[parent]) if parent >= 0 else begun_by
                for end in self._agent(item.items, began, item.start_s + item.duration_s):
                    # Only a request after the one that began it may wait for it, so that no two can wait for one another.
                    waiter = next((i for i in range(parent + 1, len(requests)) if requests[i].start_s >= end.ended_s), None)
                    if waiter is None:
                        left.append(end)
                    else:
                        self._edge(end.last, (agent, waiter))
                        step = self.steps[agent, waiter]
                        step.delay_s = min(step.delay_s, max(0.0, requests[waiter].start_s - end.answered_s))
        if agent and requests:
            left.append(_End(ended_s, ends[-1], (agent, len(requests) - 1)))
        return left

    def _edge(self, before: Node, after: Node) -> None:
        self.steps[before].sets_free.append(after)
        self.steps[after].waits_for += 1

    # --- its course ------------------------------------------------------------------------------------------

    def begin(self, at: float | None) -> list[tuple[float, Turn]]:
        """The requests that wait for nobody; with `at`, a share of the session's recorded time, those that do when all before it is left out."""
        own = [step for (agent, _), step in self.steps.items() if agent == 0]
        if at is not None and own:
            first = self._request_at(at, own)
            begin_s = own[first].request.start_s
            kept: set[Node] = set()
            for node, step in self.steps.items():
                if (node[1] >= first) if node[0] == 0 else (step.before in kept or step.request.start_s >= begin_s):
                    kept.add(node)
            for node in [n for n in self.steps if n not in kept]:
                self._free(node)
            for node, step in self.steps.items():
                if not step.waits_for:
                    step.delay_s = 0.0 if node[0] == 0 else max(0.0, step.request.start_s - begin_s)
        return [self._turn(node) for node, step in self.steps.items() if not step.waits_for]

    def _request_at(self, share: float, own: list[_Step]) -> int:
        """Which of the session's own requests was the last to begin at `share` of its recorded time, gaps cut."""
        begins, now_s = [], 0.0
        for step in own:
            now_s += self._cut(step.delay_s)
            begins.append(now_s)
            now_s += step.request.api_time_s or 0.0
        return max((i for i, begin_s in enumerate(begins) if begin_s <= share * now_s), default=0)

    def end(self, node: Node) -> list[tuple[float, Turn]]:
        self.under_way.remove(node)
        return [self._turn(after) for after in self._free(node)]

    def _free(self, node: Node) -> list[Node]:
        """It is over, or left out. Those that waited for nothing else any more."""
        self.unfinished -= 1
        following = [after for after in self.steps.pop(node).sets_free if after in self.steps]
        for after in following:
            self.steps[after].waits_for -= 1
        return [after for after in following if not self.steps[after].waits_for]

    def _turn(self, node: Node) -> tuple[float, Turn]:
        self.under_way.add(node)
        step = self.steps[node]
        return self._cut(step.delay_s), Turn(step.request, self.name, *node)

    def _cut(self, gap: float) -> float:
        return min(gap, self.gap_cap_s)
