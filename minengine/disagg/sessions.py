"""Which decoder a session stays on: its next turn finds the rows of all turns before it there."""
from __future__ import annotations

from collections import OrderedDict
from typing import Callable

__all__ = ["Sessions"]


class Sessions:
    """Bindings of sessions to decoders; one that is idle for `idle_s` is forgotten."""

    def __init__(self, clock: Callable[[], float], idle_s: float) -> None:
        self._clock, self.idle_s = clock, idle_s
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()  # session -> decoder, last use; least recent first

    def __len__(self) -> int:
        return len(self._bound)

    def decoder_of(self, session: str) -> str | None:
        """Forgets the idle ones first."""
        now_s = self._clock()
        while self._bound and next(iter(self._bound.values()))[1] < now_s - self.idle_s:
            self._bound.popitem(last=False)
        return self._bound.get(session, (None, 0.0))[0]

    def bind(self, session: str, decoder: str) -> None:
        """The session is used now, and stays on `decoder` from here on."""
        self._bound[session] = decoder, self._clock()
        self._bound.move_to_end(session)
