"""The generator's model, fitted to sessions, and generated sessions shown beside those that they are like.

    python -m minengine.workload.agent_fit          fits the shipped model anew to the traces at hand
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .closed_loop import waits
from .generator import SHIPPED, AgentKind, AgentModel, Spread
from .sessions import Session, TraceError, TraceRequest
from .stats import mean, percentile
from .traces import find_traces, leading_hits, read_agentx

__all__ = ["QUANTITIES", "compare", "fit"]

ANEW_BELOW = 0.95  # share of the last prompt's blocks; less of them kept: the prompt begins anew
GAP_CAPS_S = (10.0, 300.0)


def fit(sessions: Iterable[Session], fitted: str = "") -> AgentModel:
    """Count everything in one pass over the sessions; lengths, not ids, are kept.

    Gaps are those of a replay, `bounded`. A request without `api_time_s` tells nothing of how long answers take. Subagents of subagents count as
    a session's own.

    Raises:
        TraceError: sessions too few or too short to tell: no second request, or no recorded time.
    """
    own, sub, groups = _Seen(), _Seen(), _Groups()
    outputs: list[int] = []
    times: list[float] = []
    num_turns = size = 0
    for session in sessions:
        size = session.block_size
        waiting = waits(session, "bounded")
        firsts: dict[bool, list[TraceRequest]] = {True: [], False: []}
        for number, agent in enumerate(session.agents):
            if agent:
                seen = own if number == 0 else sub
                seen.agent(agent, [waiting[number, i].gap_s for i in range(len(agent)) if i and waiting[number, i].ends == 1], firsts[number == 0])
                outputs += [r.output_tokens for r in agent if r.api_time_s]
                times += [r.api_time_s for r in agent if r.api_time_s]
        num_turns += len(session.agents[0])
        groups.session(waiting)
    if not times or not own.gap_s:
        raise TraceError("fit: no session has a second request and a recorded api_time; give sessions of agents that were served")
    from .fitting import relative_fit

    fixed, each = (float(f"{price:.4g}") for price in relative_fit([(1, n) for n in outputs], times, nonnegative=True))
    ratio = Spread.of([seconds / (fixed + each * n) for n, seconds in zip(outputs, times)])
    return AgentModel(session=own.kind(), subagent=sub.kind() if sub.turns else None, groups=round(len(groups.sizes) / num_turns, 6),
                      group_sizes=tuple(sorted(groups.sizes)), launch_s=Spread.of(groups.launch_s) if groups.launch_s else None,
                      join_s=Spread.of(groups.join_s or own.gap_s), answer_s=(fixed, each), answer_ratio=ratio, block_size=size, fitted=fitted)


class _Groups:
    """Subagents that begin after the same request."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.launch_s: list[float] = []
        self.join_s: list[float] = []

    def session(self, waiting: Mapping[tuple[int, int], Any]) -> None:
        begun: dict[tuple[int, int] | None, int] = {}
        for (agent, number), wait in waiting.items():
            if agent and number == 0:
                begun[wait.after] = begun.get(wait.after, 0) + 1
                self.launch_s.append(wait.gap_s)
            if agent == 0 and wait.ends > 1:
                self.join_s.append(wait.gap_s)
        self.sizes += begun.values()


class _Seen:
    """What agents of one kind did."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.first_tokens: list[int] = []
        self.first_shared: list[float] = []
        self.new_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.gap_s: list[float] = []
        self.later: list[tuple[int, bool]] = []  # of each later turn: the last prompt's length, and whether it begins anew
        self.anew_kept: list[float] = []
        self.anew_length: list[float] = []

    def agent(self, requests: list[TraceRequest], gaps_s: list[float], firsts: list[TraceRequest]) -> None:
        """`firsts`: first prompts of earlier agents of this kind in the session; this one's is added."""
        self.turns.append(len(requests))
        self.first_tokens.append(requests[0].input_tokens)
        if firsts and firsts[-1].hash_ids:
            self.first_shared.append(_common(firsts[-1].hash_ids, requests[0].hash_ids) / len(firsts[-1].hash_ids))
        firsts.append(requests[0])
        self.output_tokens += [r.output_tokens for r in requests]
        self.gap_s += gaps_s
        for last, request in zip(requests, requests[1:]):
            kept = _common(last.hash_ids, request.hash_ids) / len(last.hash_ids) if last.hash_ids else 1.0
            self.later.append((last.input_tokens, kept < ANEW_BELOW))
            if kept < ANEW_BELOW:
                self.anew_kept.append(kept)
                self.anew_length.append(request.input_tokens / last.input_tokens)
            else:
                self.new_tokens.append(request.input_tokens - last.input_tokens - last.output_tokens)

    def kind(self) -> AgentKind:
        return AgentKind(turns=Spread.of(self.turns), first_tokens=Spread.of(self.first_tokens), first_shared=Spread.of(self.first_shared or [0.0]),
                         new_tokens=Spread.of(self.new_tokens or [0]), output_tokens=Spread.of(self.output_tokens), gap_s=Spread.of(self.gap_s or [0.0]),
                         anew=_by_length(self.later),
                         anew_kept=Spread.of(self.anew_kept) if self.anew_kept else None,
                         anew_length=Spread.of(self.anew_length) if self.anew_length else None)


def _by_length(later: list[tuple[int, bool]], classes: int = 4) -> tuple[tuple[int, float], ...]:
    """(up to so many tokens, share of those that begin anew), the turns in equal numbers; a prompt longer than any seen always does."""
    ordered = sorted(later)
    n = min(classes, len(ordered))
    parts = [ordered[i * len(ordered) // n:(i + 1) * len(ordered) // n] for i in range(n)]
    return tuple((part[-1][0], round(sum(anew for _, anew in part) / len(part), 6)) for part in parts)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --- beside each other ------------------------------------------------------------------------------------------

QUANTITIES = {
    "turns": "requests of a session's own",
    "subagents": "of a session",
    "input_tokens": "of a prompt",
    "new_tokens": "of a prompt that an ideal cache of the session's own past does not hold",
    "output_tokens": "of an answer",
    "gap_s": "before a request, as a replay takes it, uncut",
    "answer_s": "of a request, as recorded",
}


def compare(**groups: Iterable[Session]) -> dict[str, dict[str, dict[str, float]]]:
    """{quantity: {group: {"mean", "p10", "p50", "p90"}}} for each of QUANTITIES, and for each group's share in flight at two caps on gaps and
    ideal hit of tokens, as {"mean"} alone. Sessions are read once, one after the other.

    Raises:
        TraceError: a group without sessions.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, sessions in groups.items():
        values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        shares = list(_shares(sessions, values))
        if not shares:
            raise TraceError(f"{label}: has no sessions to compare")
        for name, some in values.items():
            if some:
                found.setdefault(name, {})[label] = {"mean": mean(some), **{f"p{q}": percentile(some, q) for q in (10, 50, 90)}}
        for i, cap_s in enumerate(GAP_CAPS_S):
            busy, idle = (sum(share[i][j] for share in shares) for j in (0, 1))
            found.setdefault(f"in_flight_share_{cap_s:g}s", {})[label] = {"mean": busy / (busy + idle)}
        asked = sum(values["input_tokens"])
        found.setdefault("ideal_hit", {})[label] = {"mean": 1 - sum(values["new_tokens"]) / asked}
    return found


def _shares(sessions: Iterable[Session], values: dict[str, list[float]]) -> Iterator[list[tuple[float, float]]]:
    """Add each session's values; gives its (seconds in flight, idle seconds) for each cap."""
    for session in sessions:
        waiting = waits(session, "bounded")
        values["turns"].append(len(session.agents[0]))
        values["subagents"].append(len(session.agents) - 1)
        requests = session.requests
        for request, hits in zip(requests, leading_hits(requests)):
            values["input_tokens"].append(request.input_tokens)
            values["new_tokens"].append(request.input_tokens - request.cached_tokens(hits))
            values["output_tokens"].append(request.output_tokens)
            if request.api_time_s is not None:
                values["answer_s"].append(request.api_time_s)
        values["gap_s"] += [wait.gap_s for (_, number), wait in waiting.items() if number]
        busy = sum(r.api_time_s or 0.0 for r in requests)
        yield [(busy, sum(min(wait.gap_s, cap_s) for wait in waiting.values())) for cap_s in GAP_CAPS_S]


if __name__ == "__main__":
    source = find_traces()
    if source.synthetic:
        raise SystemExit("there are no public traces at hand: nothing to fit the shipped model to")
    model = fit(read_agentx(source.agentx), "the public sample of 23 agent sessions in AgentX's format (1,372 requests)")
    SHIPPED.write_text(json.dumps(model.mapping(), indent=1) + "\n", encoding="utf-8")
