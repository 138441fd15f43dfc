"""From an engine's options to its tiers: where their folders lie, and for which model."""
from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from minengine.config import ConfigError
from minengine.kv.events import EventLog, Medium
from minengine.kv.fingerprint import model_fingerprint
from minengine.kv.layout import KVLayout
from minengine.kv.tier import Tier
from minengine.kv.tier_blocks import BlockBytes, Geometry
from minengine.kv.tier_stack import TierStack

__all__ = ["open_stack", "tier_folders"]


def tier_folders(tier_path: str | None) -> dict[Medium, Path]:
    """Where the tiers of a machine lie. The host tier is in shared memory, where there is such a folder, under a name that goes with `tier_path`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = Path("/dev/shm")
    memory = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    disk = Path(tier_path).expanduser().absolute() if tier_path else cache / "minengine" / "tier"
    own = f"-{sha256(os.fsencode(disk)).hexdigest()[:12]}" if tier_path else ""
    return {"host": memory / f"minengine-{os.geteuid()}{own}", "disk": disk}


def open_stack(*, host_tier_bytes: int, disk_tier_bytes: int, tier_path: str | None, model: Any, kv_layout: KVLayout, kv_cache_dtype: str,
               storage: Tensor, events: EventLog | None = None, fingerprint: str | None = None) -> TierStack | None:
    """The tiers that the options ask for, for the pool in `storage`; None if they ask for none. `fingerprint`: the model's, where it is known.

    Raises:
        ConfigError: a folder cannot be used.
    """
    sizes = {"host": host_tier_bytes, "disk": disk_tier_bytes}
    wanted = {medium: folder for medium, folder in tier_folders(tier_path).items() if sizes[medium]}
    if not wanted:
        return None
    geometry = Geometry.of(kv_layout, kv_cache_dtype, fingerprint or model_fingerprint(model))
    tiers = []
    for medium, folder in wanted.items():
        try:
            tiers.append(Tier(folder, geometry, sizes[medium], medium))
        except ConfigError as error:
            raise ConfigError(f"{medium}_tier_bytes={sizes[medium]}: {error}") from error
    return TierStack(tiers, BlockBytes(storage, kv_layout), events=events)
