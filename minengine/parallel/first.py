"""What rank 0's engine is to whoever uses it, whatever its ranks share: the group's counts, and its end."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine_args import EngineArgs
from .comm import Parallel
from .counts import GroupCounts, count_group
from .engine import RankEngine
from .group import Group, Member

__all__ = ["FirstEngine"]


class FirstEngine(RankEngine):
    """Rank 0 of a group, whose other ranks end with it."""

    def __init__(self, args: EngineArgs, group: Group, parallel: Parallel, **options: Any) -> None:
        super().__init__(args, parallel=parallel, **options)
        self.group = group
        group.member.engine = self

    def counts(self) -> GroupCounts:
        """What every rank has and has done, counted now; call between steps."""
        return count_group(self.group, self.args.ranks.name)

    def zero_kv_cache(self) -> None:
        self.group.call(zero)

    def on_lost(self, tell: Callable[[], None]) -> None:
        self.group.on_end(tell)

    def check(self) -> None:
        self.group.check()

    def close(self) -> None:
        self.group.close()


def zero(member: Member) -> None:
    """On every rank."""
    member.engine.kv.zero_()
