"""What a group's ranks have and have done, counted where it happens. `minengine.arithmetic.sharding` says what it should come to."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kv.cache import KVCache
from ..kv.fingerprint import model_tensors
from ..model.decoder import Decoder
from .comm import Traffic
from .engine import RankEngine
from .group import Group, Member

__all__ = ["GroupCounts", "RankCounts", "count_group", "count_rank"]


@dataclass(frozen=True)
class RankCounts:
    """One rank's."""

    rank: int
    kv_bytes: int  # of its pool, as allocated
    weight_bytes: int  # of its part of the model, as it lies in memory
    rows: int  # of the first layer's cache that were ever written
    forwards: int  # dummy ones included
    dummy_forwards: int  # that it took only for others
    traffic: dict[str, Traffic]  # by purpose

    @property
    def all_to_all_wait_s(self) -> float:
        """Seconds until the other ranks had come to the exchanges of tokens: their sizes are exchanged first, and weigh nothing."""
        return self.traffic["moe.sizes"].seconds if "moe.sizes" in self.traffic else 0.0

    @property
    def collectives(self) -> int:
        return sum(one.calls for one in self.traffic.values())

    @property
    def sent_bytes(self) -> int:
        return sum(one.nbytes for one in self.traffic.values())


@dataclass(frozen=True)
class GroupCounts:
    """All ranks', since the group was made. What happened in between is the difference of two."""

    topology: str
    ranks: tuple[RankCounts, ...]

    def copies(self, tokens: int, kv_heads: int = 1) -> float:
        """Copies of each cached row in the group, if its caches were empty before `tokens` tokens were computed, all of them different.

        `kv_heads`: of the model; 1 for a latent.
        """
        return sum(rank.rows for rank in self.ranks) / (tokens * kv_heads)


def count_group(group: Group, topology: str) -> GroupCounts:
    return GroupCounts(topology, tuple(group.call(count_rank)))


@torch.inference_mode()
def count_rank(member: Member) -> RankCounts:
    engine: RankEngine = member.engine
    runner = engine.runner
    return RankCounts(member.rank, engine.kv.storage.nbytes, weight_bytes(engine.model), _rows(engine.kv), runner.forwards, runner.dummy_forwards,
                      {name: replace(one) for name, one in engine.parallel.traffic.items()})


def weight_bytes(model: Decoder) -> int:
    """Bytes of a model's tensors; what is another's memory in another shape counts once."""
    seen: dict[object, int] = {}
    for name, tensor in model_tensors(model):
        if not name.endswith("inv_freq"):  # computed, not read
            place = id(tensor) if tensor.is_mkldnn else (tensor.data_ptr(), tensor.numel())
            seen[place] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _rows(kv: KVCache) -> int:
    """Rows of the first layer, one a token and head, that are not all zeros."""
    return int((kv.pages(0) != 0).any(-1).sum())
