"""What a stack of tiers is asked to do: loads and stores that somebody waits for, and copies that nobody does."""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Iterator, NamedTuple, Sequence

if TYPE_CHECKING:
    from minengine.kv.tier import Found, Tier
    from minengine.kv.tier_stack import TierStack

__all__ = ["Copy", "Job"]


class Copy(NamedTuple):
    """A block that another tier is to have as well."""

    h: bytes
    parent: bytes | None
    stamp_ns: int
    source: Tier
    target: Tier
    found: Found | None  # its file in `source`, if open


class Job:
    """One load or store. Times are `time.perf_counter()`, None until then."""

    def __init__(self, stack: TierStack, kind: str, hashes: Sequence[bytes], block_ids: Sequence[int], done: Callable[[Job], None] | None) -> None:
        if len(hashes) != len(block_ids):
            raise ValueError(f"{len(hashes)} hashes for {len(block_ids)} blocks: give one a block")
        self.kind, self.hashes, self.block_ids = kind, list(hashes), list(block_ids)
        self.num_blocks = 0  # load: leading blocks that are right in the pool; store: blocks that are in a tier
        self.num_bytes = 0
        self.media: dict[str, int] = {}  # load: blocks by the medium that they came from
        self.dropped = False  # a store that found too many waiting
        self.cancelled = False
        self.ended = False
        self.queued_s = time.perf_counter()
        self.start_s: float | None = None
        self.end_s: float | None = None
        self._stack, self._done = stack, done
        self._work: Iterator[bool] | None = None

    def cancel(self) -> bool:
        """True: nothing touches its blocks any more. If it had not ended, `done` will not be called; if it had, that has been done or is being done.
        False: a block is being moved just now; it ends after that, and `done` follows."""
        return self._stack._cancel(self)
