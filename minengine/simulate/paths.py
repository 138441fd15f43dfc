"""Prompts as paths of runs: a session's prompts are cut where they part or end, once for all its copies. Pure Python."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from ..config import ConfigError
from ..workload.traces import Session, TraceRequest
from .nodes import Run

__all__ = ["Cutter", "Paths", "block_ids", "cut"]

ENDLESS = 1 << 60  # blocks of a request's own output


def block_ids(request: TraceRequest, block_size: int) -> tuple[object, ...]:
    """What the full blocks of a prompt are known by, when blocks have `block_size` tokens and not the trace's own number.

    Raises:
        ConfigError: neither size divides the other.
    """
    own, full = request.block_size, request.input_tokens // block_size
    if own == block_size:
        return request.hash_ids[:full]
    if block_size % own == 0:
        m = block_size // own
        return tuple(request.hash_ids[i * m: i * m + m] for i in range(full))
    if own % block_size == 0:
        m = own // block_size
        return tuple((request.hash_ids[i // m], i % m) for i in range(min(full, m * len(request.hash_ids))))
    raise ConfigError(f"block_size={block_size}: the trace has blocks of {own} tokens; use a size that divides it, or is a multiple of it")


class _Node:
    __slots__ = ("ids", "children", "number")

    def __init__(self, ids: tuple[object, ...]) -> None:
        self.ids = ids
        self.children: dict[object, _Node] = {}
        self.number = -1


def _common(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    """Length of their common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared in one go
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def cut(prompts: Sequence[tuple[object, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Cut prompts, given as their blocks' ids, into the fewest runs that every prompt has all of or none of.

    Returns:
        the length of each run in blocks, and for each prompt the numbers of its runs.
    """
    root = _Node(())
    for ids in prompts:
        node = root
        while ids:
            child = node.children.get(ids[0])
            if child is None:
                node.children[ids[0]] = _Node(ids)
                break
            n = _common(ids, child.ids)
            if n < len(child.ids):  # they part inside it, or the prompt ends there
                head = _Node(child.ids[:n])
                child.ids = child.ids[n:]
                head.children[child.ids[0]] = child
                node.children[ids[0]] = child = head
            node, ids = child, ids[n:]
    lengths: list[int] = []
    paths = []
    for ids in prompts:
        node, path, at = root, [], 0
        while at < len(ids):
            node = node.children[ids[at]]
            if node.number < 0:
                node.number = len(lengths)
                lengths.append(len(node.ids))
            path.append(node.number)
            at += len(node.ids)
        paths.append(tuple(path))
    return lengths, paths


class Paths:
    """The runs of one session's prompts, the same for all its copies."""

    def __init__(self, session: Session, block_size: int) -> None:
        requests = [request for agent in session.agents for request in agent]
        self.lengths, paths = cut([block_ids(request, block_size) for request in requests])
        self.ends = {path: (*accumulate(self.lengths[i] for i in path), ENDLESS) for path in set(paths)}
        self.path_of = {id(request): path for request, path in zip(requests, paths)}
        self.session = session  # kept alive with its requests, which are known by identity
        self.copies = 0  # that are live, or are about to be


class Cutter:
    """Gives each request of each live copy its runs. Sessions are cut when they are taken from what `tapped` returns, one for each copy, and
    forgotten with their last one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._paths: dict[int, Paths] = {}  # by the identity of a request
        self._known: dict[int, Paths] = {}  # by that of a session
        self._copies: dict[str, tuple[Paths, dict[int, Run]]] = {}  # and its runs, by number

    def tapped(self, sessions: Iterable[Session]) -> Iterable[Session]:
        """The same sessions, for a ClosedLoop to take: a sequence stays one."""
        return _TappedSequence(sessions, self) if isinstance(sessions, Sequence) else _Tapped(sessions, self)

    def take(self, session: Session) -> Session:
        if not isinstance(session, Session):
            raise ConfigError(f"sessions: {session!r} is no Session; use what `workload.opening.open_sessions` gives")
        paths = self._known.get(id(session))
        if paths is None:
            paths = self._known[id(session)] = Paths(session, self.block_size)
            self._paths.update(dict.fromkeys(paths.path_of, paths))
        paths.copies += 1
        return session

    def runs(self, copy: str, request: TraceRequest, alone: bool = False) -> tuple[tuple[Run, ...], tuple[int, ...]]:
        """The path of a request of that copy, and before which block each of its runs ends; a last one is for its own output.

        Args:
            alone: it is of no session, and nobody else has any of it.
        """
        if alone:
            full = request.input_tokens // self.block_size
            return ((Run(full), Run(ENDLESS)), (full, ENDLESS)) if full else ((Run(ENDLESS),), (ENDLESS,))
        if copy not in self._copies:
            self._copies[copy] = self._paths[id(request)], {}
        paths, known = self._copies[copy]
        path = paths.path_of[id(request)]
        runs = []
        for number in path:
            run = known.get(number)
            if run is None:
                run = known[number] = Run(paths.lengths[number])
            runs.append(run)
        return (*runs, Run(ENDLESS)), paths.ends[path]

    def forget(self, copy: str) -> None:
        """That copy has ended."""
        paths, _ = self._copies.pop(copy)
        paths.copies -= 1
        if not paths.copies:
            del self._known[id(paths.session)]
            for request in paths.path_of:
                del self._paths[request]


class _Tapped:
    def __init__(self, sessions: Iterable[Session], cutter: Cutter) -> None:
        self._sessions, self._cutter = sessions, cutter

    def __iter__(self) -> Iterator[Session]:
        return map(self._cutter.take, self._sessions)


class _TappedSequence(Sequence[Session]):
    def __init__(self, sessions: Sequence[Session], cutter: Cutter) -> None:
        self._sessions, self._cutter = sessions, cutter

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, i: int) -> Session:
        return self._cutter.take(self._sessions[i])
