"""What a scheduler asks of whoever brings blocks from elsewhere and takes copies of them: a tier below, another engine's pool.

Pure Python. Real ones move bytes (disagg/connector.py), the simulator's lets time pass, and a test's does what the test needs.
All calls come under the engine's lock and must return at once; answers come later, by the scheduler's `landed`, `load_failed`,
`settled` and `stored`, under the same lock, never from within these calls.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Sequence

if TYPE_CHECKING:
    from ..request import Request

__all__ = ["KVConnector"]


class KVConnector(Protocol):
    def find(self, hashes: Sequence[bytes]) -> int:
        """How many of these hashes, counted from the first, can be loaded from outside the pool. A guess: what is gone by the time it is
        loaded lands short."""
        ...

    def load(self, request: Request, block_ids: Sequence[int], num_cached_blocks: int, hashes: Sequence[bytes]) -> None:
        """Start to bring content into a request's blocks. Ends in `landed` or `load_failed`.

        Args:
            block_ids: of all its tokens. The first `num_cached_blocks` have their content and are not to be written.
            hashes: without a `request.source`, what belongs into the blocks from there on, one by one; with one, empty: then all rows that
                the cached blocks lack are wanted, up to that of token `request.num_tokens - 2`. That may be none, and the source is
                to be let go of all the same.
        """
        ...

    def cancel(self, request: Request) -> bool:
        """The request needs its load no more. True: nothing touches its blocks from now on. False: something may; they are kept out of use
        until `settled`."""
        ...

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> bool | None:
        """These blocks are full and computed. Copy them out, or not; they stay as they are until they are given back by `stored`, which the
        scheduler waits for in any case. False: they are not wanted, and are given back with that."""
        ...
