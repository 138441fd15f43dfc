"""Sessions made shorter by a stated factor, so that a small machine can replay what a rack recorded, and tokens for them, which no trace has.

Every length is multiplied; gaps stay as they are. A prompt's ids are made anew for whole blocks of the engine: an id stands for the ids that the
trace has in that place, so two prompts begin with the same blocks as far as they did in the trace, but for one: where they part within a block
of the engine, which covers block_size / scale tokens of the trace, it counts as different. The engine and the simulator get the same sessions.
"""
from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import shake_128

from ..config import ConfigError
from .closed_loop import Turn
from .sessions import MOST_TOKENS, Session, SessionSequence, Subagent, TraceRequest

__all__ = ["PromptTokens", "scaled", "scaled_sessions"]


def scaled(session: Session, scale: float, block_size: int, output_scale: float | None = None) -> Session:
    """The session with prompts `scale` and answers `output_scale` (None: the same) times as long, at least one token each.

    Raises:
        ConfigError: a factor that is not positive or makes a request longer than MOST_TOKENS, or a block size below 1.
    """
    factors = {"scale": scale, "output_scale": scale if output_scale is None else output_scale}
    for name, value in factors.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value!r}: use a factor above 0, 1 for lengths as recorded")
    if block_size < 1:
        raise ConfigError(f"block_size={block_size!r}: use tokens, 1 or more")
    return _Scaling(block_size, *factors.values()).session(session)


class _Scaling:
    def __init__(self, block_size: int, scale: float, output_scale: float) -> None:
        self.block_size, self.scale, self.output_scale = block_size, scale, output_scale
        self.ids: dict[tuple[object, ...], int] = {}  # of a place and the trace's ids that it covers
        self.unknown = 0

    def session(self, session: Session) -> Session:
        return Session(session.id, self.block_size, self.items(session.items))

    def items(self, items: Iterable[TraceRequest | Subagent]) -> tuple[TraceRequest | Subagent, ...]:
        return tuple(replace(item, items=self.items(item.items)) if isinstance(item, Subagent) else self.request(item) for item in items)

    def request(self, request: TraceRequest) -> TraceRequest:
        tokens = self._length(request.input_tokens, "scale")
        known = request.hash_ids[:request.input_tokens // request.block_size]  # full blocks: the rest has no name that comes again
        covered = self.block_size / self.scale / request.block_size  # of the trace's blocks, by one of the engine's
        ids = []
        for i in range(tokens // self.block_size):
            first, after = int(i * covered), int((i + 1) * covered) + (int((i + 1) * covered) < (i + 1) * covered)
            place = (i, *known[first:after]) if after <= len(known) else (i, None, self._new())
            ids.append(self.ids.setdefault(place, len(self.ids)))
        return replace(request, input_tokens=tokens, output_tokens=self._length(request.output_tokens, "output_scale"), hash_ids=tuple(ids),
                       block_size=self.block_size)

    def _length(self, tokens: int, factor: str) -> int:
        long = tokens * getattr(self, factor)
        if long > MOST_TOKENS:
            raise ConfigError(f"{factor}={getattr(self, factor):g}: makes {long:.3g} tokens of {tokens:,}; a request has {MOST_TOKENS:,} at most")
        return max(1, round(long))

    def _new(self) -> int:
        self.unknown += 1
        return self.unknown


def scaled_sessions(sessions: Iterable[Session], scale: float, block_size: int, output_scale: float | None = None) -> Iterable[Session]:
    """Sessions each made shorter when it is asked for: of a sequence a sequence, of any other iterable one that can be read as often.

    Raises:
        ConfigError: see `scaled`.
    """
    scaled(Session("", 1, ()), scale, block_size, output_scale)  # what is not possible is said now
    return (_Sequence if isinstance(sessions, Sequence) else _Iterable)(sessions, scale, block_size, output_scale)


class _Iterable:
    def __init__(self, sessions: Iterable[Session], *options: float | None) -> None:
        self.sessions, self.options = sessions, options

    def __iter__(self) -> Iterator[Session]:
        return (scaled(session, *self.options) for session in self.sessions)


class _Sequence(_Iterable, SessionSequence):
    def __len__(self) -> int:
        return len(self.sessions)

    def _at(self, i: int) -> Session:
        return scaled(self.sessions[i], *self.options)


class PromptTokens:
    """Token ids for the prompts of a replay: equal ids of one live session give equal tokens, everything else gives others. The same on every
    machine, and nothing is kept.

    Args:
        first, last: the ids to draw from, both included; those below and above may be control tokens.

    Raises:
        ConfigError: fewer than two ids to draw from.
    """

    def __init__(self, first: int, last: int) -> None:
        if not 0 <= first < last:
            raise ConfigError(f"first={first}, last={last}: use two token ids or more")
        self.first, self.count = first, last - first + 1

    def __call__(self, turn: Turn) -> list[int]:
        request, ids = turn.request, []
        for hash_id in request.hash_ids[:request.input_tokens // request.block_size]:
            ids += self._draw(f"{turn.session} {hash_id}", request.block_size)
        rest = request.input_tokens - len(ids)
        return ids + self._draw(f"{turn.session} {turn.agent} {turn.number} rest", rest)

    def _draw(self, name: str, n: int) -> list[int]:
        numbers = struct.unpack(f"<{n}I", shake_128(name.encode()).digest(4 * n))
        return [self.first + number % self.count for number in numbers]
