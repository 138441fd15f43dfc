"""From an engine's options to what brings its blocks from elsewhere: tiers, other workers' pools, both, or nothing."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from ..engine import LLMEngine
    from .agents import Agent
    from .connector import WorkerConnector

__all__ = ["open_connector"]


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
