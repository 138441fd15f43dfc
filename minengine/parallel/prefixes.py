"""Which rank has probably cached the beginning of a prompt: the one that was last given a prompt that begins so. Pure Python.

A guess that costs nothing to hold: what a rank has evicted since is not known here, and a wrong guess is a prompt that is computed.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["LEAST", "Prefixes"]

LEAST = 1 << 16  # blocks that are remembered, however few can be cached
SLACK = 2  # unfinished requests that a rank may have more than the idlest, and still be worth going to


class Prefixes:
    """
    Args:
        most: blocks that are remembered, the latest ones.
    """

    def __init__(self, most: int = LEAST) -> None:
        self.most = most
        self._rank_of: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, hashes: Sequence[bytes], loads: Sequence[int]) -> int:
        """A rank for the prompt of these blocks, where rank r has `loads[r]` unfinished requests: the one that has half of the prompt, unless it
        has much more to do than the idlest, which is the choice else."""
        least = min(loads)
        known = 0
        while known < len(hashes) and hashes[known] in self._rank_of:
            known += 1
        if known and 2 * known >= len(hashes):
            rank = self._rank_of[hashes[known - 1]]
            if loads[rank] <= least + SLACK:
                return rank
        return loads.index(least)

    def given(self, hashes: Sequence[bytes], rank: int) -> None:
        """That prompt goes to that rank."""
        for h in reversed(hashes):  # the beginning is what others share: it is forgotten last
            self._rank_of[h] = rank
            self._rank_of.move_to_end(h)
        while len(self._rank_of) > self.most:
            self._rank_of.popitem(last=False)

    def forget(self) -> None:
        self._rank_of.clear()
