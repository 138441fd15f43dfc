"""Agents invented from a seed: sessions like those that a model of agents was fitted to, as many as wanted, each drawn when it is asked for.

    model = fit(read_agentx(path))          fitting.  AgentModel.shipped() is fitted to the public sample of agent sessions
    for session in model.sessions(1000, seed=0): ...

A session's quantities are drawn from what was seen, one independent of another: turns, the first prompt, what a turn adds, answers, gaps, how often
a prompt begins anew, and groups of subagents that run side by side. What depends on what in real agents (a long answer is followed by a long read,
one session is busier than another) is not in it, and subagents start none of their own. `minengine.workload.agent_fit.compare` shows what that costs.

Pure Python, and the same on every machine: only sums, products and quotients of `random()` decide.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from .sessions import Session, SessionSequence, Subagent, TraceError, TraceRequest

__all__ = ["AgentKind", "AgentModel", "Spread"]

SHIPPED = Path(__file__).resolve().parent / "agents.json"


class Spread(NamedTuple):
    """A distribution as equally likely parts (least, mean, most), in order: its mean and its quantiles are those of what it was made from."""

    parts: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, values: Sequence[float], parts: int = 20) -> Spread:
        """
        Raises:
            TraceError: no values.
        """
        if not values:
            raise TraceError("spread: there are no values to make one of; fit to sessions with more requests")
        ordered = sorted(values)
        n = min(parts, len(ordered))
        cuts = [i * len(ordered) // n for i in range(n + 1)]
        groups = [ordered[a:b] for a, b in zip(cuts, cuts[1:])]
        return cls(tuple((round(g[0], 6), round(sum(g) / len(g), 6), round(g[-1], 6)) for g in groups))

    def draw(self, rng: Random) -> float:
        """Below or above the part's mean, evenly, so often that the part keeps its mean."""
        low, mean, high = self.parts[int(rng.random() * len(self.parts))]
        which, where = rng.random(), rng.random()
        if high <= low:
            return mean
        return low + (mean - low) * where if which * (high - low) < high - mean else mean + (high - mean) * where

    @property
    def mean(self) -> float:
        return sum(mean for _, mean, _ in self.parts) / len(self.parts)


@dataclass(frozen=True, kw_only=True)
class AgentKind:
    """Agents of one kind: those that a session is, or its subagents."""

    turns: Spread
    first_tokens: Spread  # of the first prompt
    first_shared: Spread  # share of it that an earlier agent of this kind in the session began with too
    new_tokens: Spread  # that a turn adds to the last prompt and its answer
    output_tokens: Spread
    gap_s: Spread  # from an end to the next start
    anew: tuple[tuple[int, float], ...]  # (last prompt up to so many tokens, share of these turns whose prompt does not go on with all of it)
    anew_kept: Spread | None  # of these: share of the last prompt's blocks that the prompt still begins with
    anew_length: Spread | None  # and its length over the last prompt's


@dataclass(frozen=True, kw_only=True)
class AgentModel:
    """
    Attributes:
        session, subagent: the two kinds; None: there are no subagents.
        groups: share of a session's turns after whose end subagents start.
        group_sizes: how many each time; one is drawn.
        launch_s, join_s: from that end to a subagent's start, and from the last subagent's end to the next turn.
        answer_s: seconds a request took: (fixed, an output token), times `answer_ratio`.
        block_size: of the ids.
        fitted: to what, in words.
    """

    session: AgentKind
    subagent: AgentKind | None
    groups: float
    group_sizes: tuple[int, ...]
    launch_s: Spread | None
    join_s: Spread | None
    answer_s: tuple[float, float]
    answer_ratio: Spread
    block_size: int
    fitted: str

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise TraceError(f"agent model: {name}={getattr(self, name)!r}: {remedy}")

        demand(_is_whole(self.block_size, 1), "block_size", "use tokens, 1 or more")
        demand(_is_number(self.groups), "groups", "use a share of the turns, 0 or more")
        demand(all(_is_whole(size, 1) for size in self.group_sizes), "group_sizes", "use whole numbers, 1 or more")
        demand(len(self.answer_s) == 2 and all(map(_is_number, self.answer_s)), "answer_s", "use two numbers of seconds, 0 or more")
        for name in ("group_sizes", "subagent", "launch_s", "join_s") if self.groups else ():
            demand(bool(getattr(self, name)), name, f"is needed where groups is {self.groups:g}")

    @classmethod
    def shipped(cls) -> AgentModel:
        """Fitted to the public sample of 23 agent sessions in AgentX's format."""
        return cls.from_mapping(json.loads(SHIPPED.read_text(encoding="utf-8")))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> AgentModel:
        """What `mapping` gave, perhaps by way of JSON.

        Raises:
            TraceError: a field is missing, unknown or no model's.
        """
        try:
            values = {**given, "session": _kind(given["session"]), "subagent": given["subagent"] and _kind(given["subagent"]),
                      "group_sizes": tuple(given["group_sizes"]), "answer_s": tuple(given["answer_s"])}
            for name in ("launch_s", "join_s", "answer_ratio"):
                values[name] = _spread(given[name])
            return cls(**values)
        except TraceError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"agent model: {type(error).__name__} {error}; use a file that was written from `AgentModel.mapping`") from error

    def mapping(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def sessions(self, n: int, seed: int = 0) -> Sequence[Session]:
        """`n` sessions, each drawn from (seed, its place) when it is asked for, and not kept.

        Raises:
            TraceError: `n` or `seed` is no whole number, 0 or more.
        """
        for name, value in (("n", n), ("seed", seed)):
            if not _is_whole(value):
                raise TraceError(f"sessions: {name}={value!r}: use a whole number, 0 or more")
        return _Drawn(self, n, seed)

    def draw(self, rng: Random, name: str) -> Session:
        """One session."""
        return _Drawing(self, rng).session(name)


def _spread(given: Any) -> Spread | None:
    """Also of a Spread that JSON or `asdict` made a list of."""
    if given is None:
        return None
    (parts,) = given
    return Spread(tuple((float(low), float(mean), float(high)) for low, mean, high in parts))


def _kind(given: Mapping[str, Any]) -> AgentKind:
    spreads = {f.name: _spread(given[f.name]) for f in fields(AgentKind) if f.name != "anew"}
    return AgentKind(anew=tuple((int(up_to), float(share)) for up_to, share in given["anew"]), **spreads)


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


class _Drawn(SessionSequence):
    def __init__(self, model: AgentModel, n: int, seed: int) -> None:
        self.model, self.n, self.seed = model, n, seed

    def __len__(self) -> int:
        return self.n

    def _at(self, i: int) -> Session:
        return self.model.draw(Random(f"{self.seed} {i}"), f"agent-{self.seed}-{i}")


class _Drawing:
    """One session while it is drawn. Times are whole milliseconds on the session's clock."""

    def __init__(self, model: AgentModel, rng: Random) -> None:
        self.model, self.rng = model, rng
        self.last_id = 0
        self.first_ids: dict[int, list[int]] = {}  # of the last first prompt of each kind

    def session(self, name: str) -> Session:
        items, _ = self._agent(self.model.session, 0.0)
        return Session(name, self.model.block_size, tuple(items))

    def _agent(self, kind: AgentKind, start_s: float) -> tuple[list[TraceRequest | Subagent], float]:
        """An agent whose first request starts at `start_s`; its items, and its end."""
        model, rng, size = self.model, self.rng, self.model.block_size
        items: list[TraceRequest | Subagent] = []
        tokens = output = 0
        ids: list[int] = []
        end_s = ready_s = start_s  # of the last request; of all that the next one waits for
        joins = False
        turns = max(1, round(kind.turns.draw(rng)))
        for turn in range(turns):
            tokens, ids = self._prompt(kind, turn, tokens + output, tokens, ids)
            output = max(1, round(kind.output_tokens.draw(rng)))
            gap_s = 0.0 if turn == 0 else max(0.0, (model.join_s if joins else kind.gap_s).draw(rng))
            begin_s = _ms(ready_s + gap_s)
            fixed, each = model.answer_s
            took_s = max(0.001, _ms((fixed + each * output) * model.answer_ratio.draw(rng)))
            items.append(TraceRequest(begin_s, tokens, output, tuple(ids), size, took_s, _ms(begin_s - end_s)))
            ready_s = end_s = _ms(begin_s + took_s)
            joins = kind is model.session and turn + 1 < turns and rng.random() < model.groups
            if joins:
                for _ in range(model.group_sizes[int(rng.random() * len(model.group_sizes))]):
                    began_s = _ms(end_s + max(0.0, model.launch_s.draw(rng)))
                    inner, inner_end_s = self._agent(model.subagent, began_s)
                    items.append(Subagent("generated", began_s, _ms(inner_end_s - began_s), tuple(inner)))
                    ready_s = max(ready_s, inner_end_s)
        return items, ready_s

    def _prompt(self, kind: AgentKind, turn: int, past_tokens: int, last_tokens: int, last_ids: list[int]) -> tuple[int, list[int]]:
        """(tokens, ids) of a prompt: it goes on with the last one, or anew, or is the first."""
        rng = self.rng
        if turn == 0:
            tokens = max(1, round(kind.first_tokens.draw(rng)))
            before = self.first_ids.get(id(kind), [])
            known = before[:int(kind.first_shared.draw(rng) * len(before))]
        elif kind.anew_kept is not None and rng.random() < next((share for up_to, share in kind.anew if last_tokens <= up_to), 1.0):
            tokens = max(1, round(last_tokens * kind.anew_length.draw(rng)))
            known = last_ids[:int(kind.anew_kept.draw(rng) * len(last_ids))]
        else:
            tokens, known = max(1, past_tokens + round(kind.new_tokens.draw(rng))), last_ids
        ids = known[:tokens // self.model.block_size]
        new = tokens // self.model.block_size - len(ids)
        ids = [*ids, *range(self.last_id + 1, self.last_id + 1 + new)]
        self.last_id += new
        if turn == 0:
            self.first_ids[id(kind)] = ids
        return tokens, ids


def _ms(seconds: float) -> float:
    return round(seconds, 3)
