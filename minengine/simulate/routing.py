"""The cluster's own router over simulated engines: it asks their pools instead of listening to their events."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable

from ..disagg.kv_index import KVIndex, Overlap
from ..disagg.router import Router
from .engines import Engine
from .nodes import Chain
from .wire import Tier

__all__ = ["PoolIndex", "SimRouter"]


class PoolIndex(KVIndex):
    """What each engine has of a prompt, seen in its pools: of several ranks, the one that has most. As events would tell, without their delay."""

    def __init__(self, engines: Mapping[str, Engine], tier: Tier | None, tiered: Iterable[str]) -> None:
        super().__init__()
        self._engines, self._host, self._tiered = engines, tier, frozenset(tiered)

    def overlaps(self, hashes: Chain, workers: Iterable[str]) -> dict[str, Overlap]:
        found, in_tier = {}, {}
        first = hashes.runs[0]
        for name in workers:
            engine, device = self._engines[name], 0
            if any(scheduler.pool.has(first) for scheduler in engine.schedulers):
                engine.settle()
                device = max(len(scheduler.pool.find(hashes)) for scheduler in engine.schedulers)
            host = 0
            if self._host is not None and name in self._tiered:
                if device not in in_tier:
                    in_tier[device] = self._host.find(hashes[device:])
                host = in_tier[device]
            found[name] = Overlap(device, host)
        return found


class SimRouter(Router):
    """
    Args:
        lengths: calls `progressed` for every request that decodes. It is asked before decoders are compared, and not at every token.
    """

    def __init__(self, *args: Any, lengths: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._lengths = lengths

    def _pick(self, role: str, *args: Any) -> Any:
        if role == "decode" and self.policy == "kv_aware":
            self._lengths()
        return super()._pick(role, *args)
