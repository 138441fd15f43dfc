"""The connector of rank 0 of a worker whose ranks have requests of their own: its own requests', and the way to those of the others."""
from __future__ import annotations

from typing import Any

from .connector import WorkerConnector
from .links import Gone, Links, Met, RankState, ReleaseHeld, RenewHeld
from .source import PoolFacts

__all__ = ["DataConnector"]


class DataConnector(WorkerConnector):
    """Every rank has a pool and a connector. What the front says of a request goes to all of them: only one has it, to the others it is nothing.

    Args:
        links: to the connectors of the other ranks.
        pools: theirs.
    """

    def __init__(self, engine: Any, agent: Any, *, links: Links, pools: tuple[PoolFacts, ...], **options: Any) -> None:
        super().__init__(engine, agent, **options)
        self._ranks, self._pools = links, pools
        links.on_state = self._changed

    def _changed(self, state: RankState) -> None:
        if state.may_step:
            self.engine.wake()
        self.wake()

    @property
    def pools(self) -> tuple[PoolFacts, ...]:
        return self.facts, *self._pools

    @property
    def num_free_blocks(self) -> int:
        """Of the fullest rank."""
        return min([self.engine.num_free_blocks, *(state.num_free_blocks for state in self._ranks.states.values())])

    def counts(self) -> dict[str, float]:
        """All ranks' together."""
        every = [super().counts(), *(state.transfers for state in self._ranks.states.values())]
        return {name: sum(each[name] for each in every) for name in every[0]}

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._ranks.tell(ReleaseHeld(request_id))

    def renew(self, request_id: str) -> None:
        super().renew(request_id)
        self._ranks.tell(RenewHeld(request_id))

    def connect(self, pool: PoolFacts) -> None:
        super().connect(pool)
        self._ranks.tell(Met(pool))

    def peer_gone(self, agent: str) -> None:
        super().peer_gone(agent)
        self._ranks.tell(Gone(agent))
