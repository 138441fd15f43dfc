"""What brings a request's blocks to a decoder: reads of another worker's pool, writes of another worker, a tier. One object a load.

Who touches what:
  started, quiet, isolated     under the connector's lock: the scheduler's thread asks by them whether blocks are still touched
  outcome                      set once, by the thread that moves the rows; from then on the load only has to become quiet
  everything else              the thread that moves the rows
"""
from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Sequence

from ..config import ConfigError
from ..request import Request, Resume
from .agents import Transfer, TransferError
from .kv_io import KVIO
from .moved import TransferFacts
from .reading import Reading
from .source import KVSource, KVTarget, Notice, Reserve

if TYPE_CHECKING:
    from .links import Fetching, Links

ASK_AGAIN_S = 1.0  # a notice to stop that was not answered; twice is harmless
SETTLE_S = 0.2  # after a writer's end, until its last bytes are read or dropped

__all__ = ["Load", "Pull", "Pushed", "TierLoad"]


class Load:
    """The blocks of one request, on their way.

    Attributes:
        num_blocks: when it has landed, how many of the blocks asked for are right, counted from the first.
        outcome: "" while it goes on; "landed", "expired", "failed", "timeout".
        started: it may have begun to touch its blocks.
        quiet: nothing touches its blocks now; once `outcome` is there, or it was cancelled, it never gets loud again.
        offered: the scheduler has been told of the outcome, or poll() will tell it.
        isolated: the scheduler keeps its blocks out of use until it hears `settled`.
    """

    kind = ""

    def __init__(self, request: Request, block_ids: Sequence[int], first: int, fence: Any = None) -> None:
        self.request, self.block_ids, self.first, self.fence = request, tuple(block_ids), first, fence
        self.source = request.source
        self.started = self.isolated = self.offered = False
        self.quiet = True
        self.outcome, self.num_blocks = "", 0
        self.facts = TransferFacts(request.request_id, self.kind)

    def advance(self, io: KVIO, now_s: float) -> None:
        """Begin, look, go on. Only after `started`, only while there is no outcome."""

    def stop(self, io: KVIO, now_s: float) -> bool:
        """Ask what still touches the blocks to end; True: nothing does any more."""
        return True

    def gone(self, now_s: float) -> None:
        """The other side's process has ended, and its transfers fail by themselves."""

    def let_go(self, io: KVIO) -> None:
        """Tell the other side that it is over, where it waits for that. Not before it is quiet."""

    def end(self, outcome: str, error: str = "") -> None:
        self.outcome = self.facts.outcome = outcome
        self.facts.error = error
        if outcome == "landed":
            self.num_blocks = len(self.block_ids) - self.first


class TierLoad(Load):
    """A tier's own thread brings the blocks; it ends in the callback that the connector gave it."""

    kind = "tier"
    job: Any = None


class Pull(Load):
    """Read the rows from the worker that holds them, then the word that says whether it held them throughout."""

    kind = "pull"
    source: KVSource

    def __init__(self, request: Request, block_ids: Sequence[int], first: int, fence: Any = None, timeout_s: float = 10.0, links: Links | None = None) -> None:
        """`links`: to the other ranks that keep something of it."""
        super().__init__(request, block_ids, first, fence)
        self.timeout_s, self.deadline_s = timeout_s, 0.0
        self.facts.peer = self.source.pool.agent
        self.links = links
        self.reading: Reading | None = None  # this rank's share of the rows
        self.elsewhere: Fetching | None = None  # the other ranks'
        self.word: Transfer | None = None
        self.check: int | None = None  # of the words that are read, the one that this load uses

    def advance(self, io: KVIO, now_s: float) -> None:
        try:
            if self.reading is None:
                self._begin(io, now_s)
            elif self.word is None:
                self._read_rows(io, now_s)
            else:
                self._read_word(io, now_s)
        except (TransferError, ConfigError, IndexError) as error:  # IndexError: a source that does not fit its own pool
            self.end("failed", str(error))

    def _begin(self, io: KVIO, now_s: float) -> None:
        start, source = self.first * io.block_size, self.source
        if source.num_tokens < self.request.num_tokens - 1:
            self.end("failed", f"rows of {source.num_tokens} tokens were offered for a request of {self.request.num_tokens}")
        elif start >= source.num_tokens:
            self.end("landed")  # this pool has them all
        elif self.fence is None or self.fence.query():
            io.meet(source.pool)
            self.request.timeline.transfer_start_s, self.deadline_s = now_s, now_s + self.timeout_s
            self.facts.num_tokens, self.facts.num_blocks = source.num_tokens - start, len(self.block_ids) - self.first
            self.reading = Reading(io, source, self.block_ids, start)
            if self.links is not None:  # what this rank has asked its GPU to do with these blocks is over, and so it is on the others
                self.elsewhere = self.links.fetch(source, self.block_ids, start)
            self.reading.advance()

    def _read_rows(self, io: KVIO, now_s: float) -> None:
        late = now_s >= self.deadline_s
        here = self.reading.advance(late)
        if not here or not (self.elsewhere is None or self.elsewhere.done()):
            if late:
                self._too_late()
        elif io.free_checks:  # else in a moment
            self.facts.seconds = now_s - self.request.timeline.transfer_start_s
            self.check = io.free_checks.pop()
            self.word = io.read_word(self.source, self.check)

    def _read_word(self, io: KVIO, now_s: float) -> None:
        state = io.agent.poll(self.word)
        if state == "PROC":
            if now_s >= self.deadline_s:
                self._too_late()
        elif state == "ERR":
            self.end("failed", str(self.word.error or f"the transfer from '{self.facts.peer}' failed"))
        elif int(io.checks[self.check]) != self.source.lease_id:
            self.end("expired", f"the lease at '{self.facts.peer}' had ended by the time its rows were here")
        else:
            self.request.timeline.transfer_end_s = now_s
            self.end("landed")

    def _too_late(self) -> None:
        self.end("timeout", f"reading {self.reading.moved.nbytes} bytes from '{self.facts.peer}' took longer than {self.timeout_s:g} s")

    def end(self, outcome: str, error: str = "") -> None:
        super().end(outcome, error)
        if self.reading is not None:
            self.facts.read(self.reading.moved, *(self.elsewhere.moved if self.elsewhere is not None else ()))

    def stop(self, io: KVIO, now_s: float) -> bool:
        """A read under way cannot be called back: its worker may be standing still, and go on."""
        quiet = self.reading is None or self.reading.release()
        if self.elsewhere is not None:
            quiet = self.elsewhere.stop() and quiet
        if self.word is not None:
            if not io.agent.release(self.word):
                return False
            self.word = None
        if quiet and self.outcome and self.check is not None:
            io.free_checks.append(self.check)
            self.check = None
        return quiet

    def let_go(self, io: KVIO) -> None:
        io.tell(self.source.pool, Notice("fetch", self.source.lease_id))


class Pushed(Load):
    """Another worker writes the rows; this side waits for its notice, and for the token that its prefill ends in.

    It lands when both are there. Without the rows it fails, but not before the front has said how far the request has come: the token may
    have been sent already. If nothing at all is said for `wait_s`, the request is computed here from its beginning, and the front takes
    what comes first, this or the prefill worker's token.
    """

    kind = "push"
    source: Reserve

    def __init__(self, request: Request, block_ids: Sequence[int], first: int, reservation: int, timeout_s: float = 10.0, wait_s: float = 30.0) -> None:
        super().__init__(request, block_ids, first)
        self.reservation, self.timeout_s, self.wait_s = reservation, timeout_s, wait_s
        self.deadline_s: float | None = None  # for the rows, once it was told
        self.word_by_s: float | None = None  # for being told
        self.facts.peer, self.facts.num_blocks = self.source.pool.agent, len(block_ids) - first
        self.facts.num_tokens = request.num_tokens
        self.resume: Resume | None = None  # under the connector's lock, as `told` is
        self.told = False  # the front has said how the prefill ended
        self.rows_are_there = self.broken = False
        self.ask_s, self.gone_s = -math.inf, math.inf

    def target(self, io: KVIO) -> KVTarget:
        return KVTarget(io.facts, self.reservation, self.block_ids, self.first * io.block_size, self.request.num_tokens)

    def advance(self, io: KVIO, now_s: float) -> None:
        if not self.told:
            if self.word_by_s is None:
                self.word_by_s = now_s + self.wait_s
            elif now_s >= self.word_by_s:
                self.end("timeout", f"nobody has said within {self.wait_s:g} s what became of the prefill at '{self.facts.peer}'")
            return
        if self.deadline_s is None:
            self.deadline_s = now_s + self.timeout_s
        if self.rows_are_there:
            self.end("landed")
        elif self.broken:
            self.end("failed", self.facts.error or f"'{self.facts.peer}' did not write all rows")
        elif now_s >= self.deadline_s:
            self.end("timeout", f"'{self.facts.peer}' has not written all rows {self.timeout_s:g} s after its first token")

    def notice(self, notice: Notice, now_s: float) -> None:
        """"push" or "fail" came from the writer: either way it writes no more."""
        if notice.kind == "push":
            self.rows_are_there = True
            timeline = self.request.timeline
            timeline.transfer_end_s = now_s
            if len(notice.text) == 8:
                timeline.transfer_start_s, = struct.unpack("<d", notice.text)
                self.facts.seconds = now_s - timeline.transfer_start_s
        else:
            self.broken = True

    def stop(self, io: KVIO, now_s: float) -> bool:
        """The writer answers when it writes no more; one that stands still, when it goes on."""
        if now_s >= self.gone_s:
            return True
        if now_s >= self.ask_s:
            self.ask_s = now_s + ASK_AGAIN_S
            io.tell(self.source.pool, Notice("stop", self.reservation, io.facts.metadata))
        return False

    def gone(self, now_s: float) -> None:
        """The writer's process has ended; its last bytes may still be in a socket of this one."""
        self.broken, self.gone_s = True, now_s + SETTLE_S
