"""A block pool for prompts that are known by their paths: its unit is a run, blocks that every prompt has all of or none of.

It has BlockPool's interface and says its lengths in blocks, so the engine's scheduler runs on it unchanged; but a session of 140,000 tokens
is some forty runs and not two thousand blocks.

    Run       blocks that always travel together; a prompt is a path of runs, and its request's own output is a last one, of no other prompt
    Chain     what a hash chain is to BlockPool: the runs of a prompt, from one block to another
    Table     what a list of block ids is: ranges of runs whose content is known, and how many blocks have none yet
    Part      a range of a run that the pool has, all of whose blocks have the same holders

Runs are cut where prompts part, but a request may find the first blocks of one only (the others are evicted, or not computed yet), so ranges of
runs are shared, released and evicted, and parts are split where such a range ends. Free blocks have no numbers: one is as good as another.
BlockPool chooses whom it evicts among its RESERVE oldest blocks by their neighbours; here it is strictly the oldest, which is what BlockPool does
without a reserve.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ..kv.blocks import OutOfBlocks

__all__ = ["Chain", "NodePool", "Piece", "Run", "Table"]


class Run:
    """Blocks that always travel together. It is known by itself: equal lengths are not equal runs."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


Piece = tuple[Run | None, int, int]
"""Blocks `start` to `stop` of a run; without a run, so many blocks whose content nobody can find."""


class Chain:
    """Blocks `first` to `stop` of a path of runs, the i-th of which ends before block `ends[i]` of the path."""

    __slots__ = ("runs", "ends", "first", "stop")

    def __init__(self, runs: Sequence[Run], ends: Sequence[int], first: int, stop: int) -> None:
        self.runs, self.ends, self.first, self.stop = runs, ends, first, stop

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, part: slice) -> Chain:
        start, stop, _ = part.indices(len(self))
        return Chain(self.runs, self.ends, self.first + start, self.first + max(start, stop))

    def pieces(self) -> Iterator[Piece]:
        if self.first < self.stop:
            i = bisect_right(self.ends, self.first)
            begins = self.ends[i - 1] if i else 0
            first = self.first
            while first < self.stop:
                stop = min(self.ends[i], self.stop)
                yield self.runs[i], first - begins, stop - begins
                first, begins, i = stop, self.ends[i], i + 1


class Table:
    """The blocks of one request: `pieces` of its chain, in order, then `blank` blocks that are not computed yet."""

    __slots__ = ("pieces", "settled", "blank")

    def __init__(self, pieces: list[Piece], settled: int, blank: int = 0) -> None:
        self.pieces, self.settled, self.blank = pieces, settled, blank

    def __len__(self) -> int:
        return self.settled + self.blank

    def __add__(self, new: Table) -> Table:
        """With blank blocks after them."""
        return Table(self.pieces.copy(), self.settled, self.blank + new.blank)

    def __iadd__(self, new: Table) -> Table:
        self.blank += new.blank
        return self

    def __getitem__(self, part: int | slice) -> Table | None:
        """A slice has the blocks whose content can be found, for somebody who reads them; a single block has no name."""
        if isinstance(part, int):
            return None
        first, stop, _ = part.indices(len(self))
        found: list[Piece] = []
        end = self.settled
        for run, a, b in reversed(self.pieces):  # it is mostly the last ones that are asked for
            begin = end - b + a
            if run is not None and begin < stop and end > first:
                found.append((run, a + max(first, begin) - begin, a + min(stop, end) - begin))
            if begin <= first:
                break
            end = begin
        found.reverse()
        return Table(found, sum(b - a for _, a, b in found))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


class _Part:
    """Blocks `start` to `stop` of `run`, held `held` times; in the list of idle parts, between `older` and `younger`, while that is 0."""

    __slots__ = ("run", "start", "stop", "held", "older", "younger")

    def __init__(self, run: Run | None, start: int, stop: int, held: int) -> None:
        self.run, self.start, self.stop, self.held = run, start, stop, held
        self.older: _Part = self
        self.younger: _Part = self

    def link(self, older: _Part) -> None:
        """Stand right after that one."""
        self.older, self.younger = older, older.younger
        older.younger = self.younger.older = self

    def unlink(self) -> None:
        self.older.younger, self.younger.older = self.younger, self.older


class NodePool:
    """`BlockPool` over runs; see there for what its methods mean."""

    events = None  # the simulator's router looks for itself

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: the pool needs at least one block")
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self._parts: dict[Run, list[_Part]] = {}  # of each run that something is known of, in order
        self._ends = _Part(None, 0, 0, 0)  # of the ring of idle parts: its `younger` is the oldest
        self._free = num_blocks  # blocks without content that nobody holds
        self._idle = 0  # blocks with content that nobody holds
        self.num_evictions = 0
        self.num_taken = self.num_given_back = 0  # blocks, each time that somebody began to hold one, and that somebody let go of one

    @property
    def num_free_blocks(self) -> int:
        return self._free + self._idle

    @property
    def num_cached_blocks(self) -> int:
        return sum(part.stop - part.start for parts in self._parts.values() for part in parts)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, n: int, after: object = None) -> Table:
        """
        Raises:
            OutOfBlocks: fewer than `n` can be handed out; nothing is taken.
        """
        if n > self._free + self._idle:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} of {self.num_blocks} can be handed out")
        lacking = n - self._free
        if lacking > 0:
            self._evict(lacking)
        self._free -= n
        self.num_taken += n
        return Table([], 0, n)

    def _evict(self, n: int) -> None:
        self.num_evictions += n
        self._idle -= n
        self._free += n
        while n:
            oldest = self._ends.younger
            taken = min(n, oldest.stop - oldest.start)
            oldest.stop -= taken  # the last block of a prompt goes first
            n -= taken
            if oldest.start == oldest.stop:
                oldest.unlink()
                self._drop(oldest)

    def _drop(self, part: _Part) -> None:
        parts = self._parts[part.run]
        parts.remove(part)
        if not parts:
            del self._parts[part.run]

    def has(self, run: Run) -> bool:
        """Something of it can be found."""
        return run in self._parts

    def find(self, chain: Chain) -> Table:
        """The longest known beginning of a chain; holds nothing."""
        found: list[Piece] = []
        n = 0
        known = self._parts
        for piece in chain.pieces():
            run, start, stop = piece
            if run not in known:
                break
            at = start
            for part in known[run]:
                if part.start > at:
                    break
                if part.stop > at:
                    at = part.stop
                    if at >= stop:
                        break
            if at < stop:
                if at > start:
                    found.append((run, start, at))
                    n += at - start
                break
            found.append(piece)
            n += stop - start
        return Table(found, n)

    def num_idle(self, table: Table) -> int:
        n = 0
        for run, start, stop in table:
            for part in self._parts[run]:
                if not part.held and part.start < stop and part.stop > start:
                    n += min(stop, part.stop) - max(start, part.start)
        return n

    def share(self, table: Table) -> None:
        """
        Raises:
            KeyError: blocks that the pool does not know.
        """
        self.num_taken += len(table)
        for run, start, stop in table:
            if run is None:
                raise KeyError("blocks without content cannot be shared")
            for part in self._between(run, start, stop):
                if not part.held:
                    part.unlink()
                    self._idle -= part.stop - part.start
                part.held += 1

    def release(self, table: Table | Sequence[Piece]) -> None:
        """
        Raises:
            KeyError: blocks that the pool does not know. ValueError: that nobody holds.
        """
        self.num_given_back += len(table)
        if isinstance(table, Table):
            self._free += table.blank
        for run, start, stop in reversed(table.pieces if isinstance(table, Table) else table):
            if run is None:
                self._free += stop - start
                continue
            for part in reversed(self._between(run, start, stop)):
                if not part.held:
                    raise ValueError("blocks are released and nobody holds them")
                part.held -= 1
                if not part.held:
                    self._idle += part.stop - part.start
                    youngest = self._ends.older
                    if youngest.run is run and youngest.start == part.stop:  # what came before it in its run: one part again
                        part.stop = youngest.stop
                        youngest.unlink()
                        self._parts[run].remove(youngest)
                    part.link(self._ends.older)

    def _between(self, run: Run, start: int, stop: int) -> list[_Part]:
        """The parts of blocks `start` to `stop`, all of which are known, cut where those begin and end."""
        parts = self._parts[run]
        if len(parts) == 1 and parts[0].start == start and parts[0].stop == stop:
            return parts.copy()
        self._cut(parts, start)
        self._cut(parts, stop)
        found = [part for part in parts if start <= part.start < stop]
        if sum(part.stop - part.start for part in found) != stop - start:
            raise KeyError(f"blocks {start} to {stop} of a run: some of them are not known")
        return found

    def _cut(self, parts: list[_Part], at: int) -> None:
        for i, part in enumerate(parts):
            if part.start < at < part.stop:
                head = _Part(part.run, part.start, at, part.held)
                part.start = at
                parts.insert(i, head)
                if not part.held:
                    head.link(part)  # the tail is the older one
                return

    def offer(self, table: Table, chain: Chain, first: int, root: bytes) -> None:
        """Make its blocks from `first` on, which are computed, findable, to the end of the chain. What is known already stays as it is, and
        these blocks have content that nobody finds."""
        table.blank -= len(chain) - first
        table.settled += len(chain) - first
        pieces = table.pieces
        for run, start, stop in chain[first:].pieces():
            parts = self._parts.setdefault(run, [])
            i = 0
            while start < stop:
                while i < len(parts) and parts[i].stop <= start:
                    i += 1
                known = i < len(parts) and parts[i].start <= start
                end = min(stop, parts[i].stop if known else parts[i].start if i < len(parts) else stop)
                if known:
                    pieces.append((None, start, end))
                else:
                    last = pieces[-1] if pieces else None
                    before = parts[i - 1] if i else None
                    if before is not None and before.stop == start and before.held == 1 and last is not None and last[0] is run and last[2] == start:
                        before.stop = end  # nobody but this request holds what is before it
                        pieces[-1] = run, last[1], end
                    else:
                        parts.insert(i, _Part(run, start, end, 1))
                        pieces.append((run, start, end))
                start = end

    def check(self, tables: Iterable[Table | Sequence[Piece]]) -> None:
        """Raise AssertionError unless free, idle and held blocks are the whole pool and counts equal the tables' references."""
        held: dict[Run, list[Piece]] = {}
        unknown = 0
        for table in tables:
            unknown += table.blank if isinstance(table, Table) else 0
            for piece in table:
                if piece[0] is None:
                    unknown += piece[2] - piece[1]
                else:
                    held.setdefault(piece[0], []).append(piece)
        assert held.keys() <= self._parts.keys(), "a table holds what the pool does not know"
        idle = known = 0
        for run, parts in self._parts.items():
            assert parts and all(0 <= part.start < part.stop <= run.length for part in parts), "a part is empty, or longer than its run"
            assert all(a.stop <= b.start for a, b in zip(parts, parts[1:])), "parts overlap"
            for part in parts:
                counts = {sum(start <= block < stop for _, start, stop in held.get(run, ())) for block in (part.start, part.stop - 1)}
                assert counts == {part.held}, f"blocks are held {part.held} times and stand in {counts} tables"
                known += part.stop - part.start
                idle += 0 if part.held else part.stop - part.start
        assert idle == self._idle, f"{idle} blocks are idle and {self._idle} are counted"
        ring, part = 0, self._ends.younger
        while part is not self._ends:
            assert not part.held and part in self._parts[part.run], "a part waits for eviction and is in use"
            ring, part = ring + part.stop - part.start, part.younger
        assert ring == idle, "idle parts are not in line for eviction"
        assert self._free + known + unknown == self.num_blocks, (
            f"blocks leaked: free {self._free} + known {known} + without content {unknown} != {self.num_blocks}")
