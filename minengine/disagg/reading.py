"""One rank reads its share of a request's rows from those that have them, part after part."""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .agents import Transfer, TransferError
from .kv_io import KVIO, Part
from .moved import RankMoved
from .source import KVSource

__all__ = ["Reading"]


class Reading:
    """
    Raises:
        IndexError: a source that does not fit its own pool.

    Attributes:
        moved: what it reads, all of it counted at the start.
    """

    def __init__(self, io: KVIO, source: KVSource, block_ids: Sequence[int], start: int) -> None:
        self.io, self.source = io, source
        self._parts: deque[Part] = deque(part for part in io.rows_of(source, block_ids, start) if part.pieces.merged)
        self._transfer: Transfer | None = None
        self.moved = RankMoved(io.rank)
        for part in self._parts:
            self.moved.took(*part)

    def advance(self, late: bool = False) -> bool:
        """Look, and begin the next part if one is over, unless it is too `late` for that; True: all is here.

        Raises:
            TransferError, ConfigError: a part failed, or cannot begin.
        """
        if self._transfer is not None:
            state = self.io.agent.poll(self._transfer)
            if state == "PROC":
                return False
            if state == "ERR":
                raise TransferError(str(self._transfer.error or f"the transfer from '{self._transfer.peer}' failed"))
            self.moved.ended(self.io.agent.telemetry(self._transfer))
            self.release()
        if not self._parts or late:
            return not self._parts
        self._transfer = self.io.read_rows(self.source, self._parts.popleft())
        return False

    def release(self) -> bool:
        """True: nothing is being read. A read under way cannot be called back: its worker may be standing still, and go on."""
        if self._transfer is not None and self.io.agent.release(self._transfer):
            self._transfer = None
        return self._transfer is None
