"""Which part of each weight a rank takes. It is cut out while it is read: a rank never holds a whole model, nor from safetensors a whole matrix."""
from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from ..model.weights import WeightSource
from .ranks import Ranks

__all__ = ["ShardedSource"]

# The axis along which tensor-parallel ranks split a weight: outputs (0), where each rank computes some of them, or inputs (1), where each
# computes a part of the sum that makes every output. What is not named here is whole on every rank.
AXES = {
    "q_b_proj": 0, "kv_b_proj": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1,  # head by head
    "gate_proj": 0, "up_proj": 0, "down_proj": 1,
    "embed_tokens": 0, "lm_head": 0,  # tokens
}
EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class ShardedSource(WeightSource):
    """A rank's parts of another source's tensors, under the same names.

    Args:
        num_experts: routed experts of the model; 0: it has none.
    """

    def __init__(self, source: WeightSource, ranks: Ranks, num_experts: int) -> None:
        super().__init__(source.origin, source.dtype, source.device)
        self.rope_interleaved = source.rope_interleaved
        self._source, self._ranks = source, ranks
        self._experts = ranks.experts(num_experts)

    def names(self) -> Iterable[str]:
        """Experts that are on other ranks are not this one's to take."""
        return [name for name in self._source.names() if (expert := EXPERT.search(name)) is None or int(expert[1]) in self._experts]

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def load(self, name: str) -> Tensor:
        axis = AXES.get(name.split(".")[-2]) if "." in name else None
        if axis is None or (self._ranks.ep_size > 1 and EXPERT.search(name)):
            return self._source.load(name)
        return self._source.load_part(name, axis, self._ranks.part)
