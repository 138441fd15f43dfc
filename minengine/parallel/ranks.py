"""A rank's place in its topology. No torch here."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..arithmetic.copies import Topology
from ..arithmetic.sharding import check_sharding, rank_share
from ..config import GlmConfig, LlamaConfig, ModelConfig

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of a group of `shape.gpus`.

    Ranks are numbered through; neighbours form a DCP group: of TP4+DCP2, 0 and 1, 2 and 3.
    """

    shape: Topology
    rank: int

    @property
    def size(self) -> int:
        return self.shape.gpus

    @property
    def tp_size(self) -> int:
        return self.shape.tensor

    @property
    def tp_rank(self) -> int:
        return self.rank if self.shape.tensor > 1 else 0

    @property
    def dp_size(self) -> int:
        return self.shape.data

    @property
    def dp_rank(self) -> int:
        return self.rank if self.shape.data > 1 else 0

    @property
    def ep_size(self) -> int:
        return self.shape.experts

    @property
    def ep_rank(self) -> int:
        return self.rank if self.shape.experts > 1 else 0

    @property
    def dcp_size(self) -> int:
        return self.shape.context

    @property
    def dcp_rank(self) -> int:
        return self.rank % self.shape.context

    def part(self, total: int) -> range:
        """This rank's part of an axis that tensor-parallel ranks split."""
        return rank_share(total, self.tp_size, self.tp_rank)

    def experts(self, num_experts: int) -> range:
        """The routed experts of which this rank has something: some, whole, or a part of each."""
        return rank_share(num_experts, self.ep_size, self.ep_rank)

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model as it is on this rank: with its heads and its part of each expert. Vocabulary and number of experts stay the model's.

        Raises:
            ConfigError: the model cannot be split so.
        """
        check_sharding(config, self.shape.name)
        tp = self.tp_size
        if isinstance(config, LlamaConfig):
            return replace(config, num_attention_heads=config.num_attention_heads // tp, num_key_value_heads=config.num_key_value_heads // tp)
        assert isinstance(config, GlmConfig)
        width = config.moe_intermediate_size // (tp if self.ep_size == 1 else 1)
        return replace(config, num_attention_heads=config.num_attention_heads // tp, moe_intermediate_size=width)
