"""From an engine's options to what brings its blocks from elsewhere: tiers, other workers' pools, both, or nothing."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from ..engine import LLMEngine
    from ..parallel.group import Member
    from .agents import Agent
    from .connector import WorkerConnector

__all__ = ["open_connector", "open_group_connector", "weights_fingerprint"]


def open_connector(engine: LLMEngine, agent: Agent | None = None, *, wake: Callable[[], None], fingerprint: str | None = None,
                   **options: Any) -> WorkerConnector | None:
    """The connector of an engine that has tiers, or an agent; None: its pool is all there is. `engine.pool.events`, if set, tells of tiers too.

    Args:
        wake, fingerprint: see `WorkerConnector`, as for `options`; what the fingerprint costs, a read of all weights, is paid once.

    Raises:
        ConfigError: a tier's folder cannot be used.
    """
    args = engine.args
    if agent is None and not args.host_tier_bytes and not args.disk_tier_bytes:
        return None
    from ..kv.tier_open import open_stack
    from .connector import WorkerConnector

    tier = open_stack(host_tier_bytes=args.host_tier_bytes, disk_tier_bytes=args.disk_tier_bytes, tier_path=args.tier_path, model=engine.model,
                      kv_layout=engine.kv.kv_layout, kv_cache_dtype=engine.kv.kv_cache_dtype, storage=engine.kv.storage, events=engine.pool.events,
                      fingerprint=fingerprint)
    return WorkerConnector(engine, agent, tier=tier, wake=wake, fingerprint=fingerprint, **options)


def open_group_connector(engine: Any, agent: Agent, *, wake: Callable[[], None], fingerprint: str) -> WorkerConnector:
    """The connector of an engine of several ranks, each with an agent over its own pool (`rank_io.open_rank_agent`, run before the engines were made).

    Args:
        agent: rank 0's, over the pool of rank 0's engine.

    Raises:
        TimeoutError: a rank does not come.
        GroupError: a rank ended, or failed.
    """
    from .connector import WorkerConnector
    from .data_connector import DataConnector
    from .links import Links
    from .rank_io import join_rank
    from .source import RankFacts

    group = engine.group
    links = Links(group.member.folder, group.size)
    group.ask(join_rank, *[(fingerprint,)] * (group.size - 1))
    links.accept(group.check)
    pools = group.results()
    if engine.args.ranks.data > 1:
        connector = DataConnector(engine, agent, links=links, pools=tuple(pools), wake=wake, fingerprint=fingerprint)
        engine.hands_over = True
    else:
        connector = WorkerConnector(engine, agent, links=links, others=[RankFacts(pool.agent, pool.metadata, pool.address) for pool in pools], wake=wake,
                                    fingerprint=fingerprint)
    links.listen()
    return connector


def weights_fingerprint(engine: Any) -> str:
    """Of the weights as they are stored, which does not depend on the ranks that have them: each rank reads some of them once more, whole."""
    from ..kv.fingerprint import joint_fingerprint, source_sums
    from ..model.weights import open_model

    if engine.args.ranks.gpus > 1:
        sums = engine.group.call(rank_sums)
    else:
        sums = [source_sums(open_model(engine.args.model)[1], 0, 1)]
    return joint_fingerprint(engine.config, engine.model.dtype, sums)


def rank_sums(member: Member) -> dict[str, bytes]:
    """A rank's share of what `weights_fingerprint` reads."""
    from ..kv.fingerprint import source_sums
    from ..model.weights import open_model

    return source_sums(open_model(member.engine.args.model)[1], member.rank, member.size)
