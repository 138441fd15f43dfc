"""From an engine's options to the engine: in this process alone, or rank 0 of a group with the others in processes of their own."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..engine_args import EngineArgs
from ..engine import LLMEngine

if TYPE_CHECKING:
    from .group import Member

__all__ = ["open_engine"]

SILENCE_S = 60.0  # how long ranks wait for one that does not answer, and has not ended: a stopped process, a step that takes too long


def open_engine(args: EngineArgs, *, before: tuple[Callable[..., Any], Any] | None = None, **options: Any) -> LLMEngine:
    """The engine of `args.ranks`; `close` it, or let go of it, and its processes end.

    Args:
        before: a function of a `Member`, and its other arguments, that every other rank runs before it makes its engine.
        options: `LLMEngine`'s own. Of several ranks, `clock`, `connector` and `storage` are rank 0's; each reads its part of the model itself.

    Raises:
        ConfigError: the model cannot be split so, or rank 0 cannot run as asked.
        GroupError: another rank cannot.
    """
    shape = args.ranks
    if shape.gpus == 1:
        return LLMEngine(args, **options)
    from .data import DataEngine
    from .engine import meet, open_rank
    from .group import Group
    from .tensor import TensorEngine

    _check_model(args)
    threads = max(1, (args.num_threads or _num_cores()) // shape.gpus)
    group = Group(shape.gpus, threads, shape.name)
    try:
        group.call(greet)  # they are all there: nobody waits for one that could not start
        torch.set_num_threads(threads)
        if before is not None:
            group.ask(before[0], *[before[1:]] * (shape.gpus - 1))
            group.results()
        group.ask(open_rank, *[(args, SILENCE_S)] * (shape.gpus - 1))
        with group.watched():
            parallel = meet(group.member, args, SILENCE_S)
            engine = (DataEngine if shape.data > 1 else TensorEngine)(args, group, parallel, **options)
        group.results()
    except BaseException:
        group.close()
        raise
    return engine


def greet(member: Member) -> int:
    """What a rank runs to show that it is there."""
    return member.rank


def _check_model(args: EngineArgs) -> None:
    """Say what is wrong before processes are started."""
    from ..arithmetic.sharding import check_sharding
    from ..model.weights import open_model

    config, _ = open_model(args.model)
    check_sharding(config, args.ranks.name)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
