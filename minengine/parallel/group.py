"""The processes of a group: started, told what to do, watched, ended. Rank 0 is the process that made it.

    tell    every other rank runs a function; nobody waits
    call    every rank runs a function, this one too; its results come back in the order of ranks

Another rank is a Python of its own, not a fork, that waits for the next function without using the processor (rank_main.py). A rank that ends
before it is told to ends the group: the others are killed, and whatever waits for them raises `GroupError`.
"""
from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Condition, Thread, current_thread, main_thread
from typing import Any, NamedTuple

from ..children import command
from .comm import PeerLost

__all__ = ["Group", "GroupError", "Member"]

LOST_PEER = 75  # the exit code of a rank that ended because another had
STOP_S = 5.0  # for what a rank is doing when all is to end
LAST_WORDS_S = 3.0  # a rank that lost another is likely to say so before the other's end is noticed


class GroupError(RuntimeError):
    """A rank has ended, or does not answer; the group is over."""


class Member:
    """A rank's process, as the functions that it runs see it. What they leave here is there for the next.

    Attributes:
        folder: where the ranks find each other.
        engine: this rank's, once `open_rank` has made it.
        storage: makes what takes a pool's storage on a device, where that is not the engine's own to allocate.
        transfers: of a rank with requests of its own, what brings blocks from other workers and keeps them for others (disagg/rank_io.py).
    """

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.engine: Any = None
        self.storage: Callable[[str], Any] | None = None
        self.transfers: Any = None


class Job(NamedTuple):
    """What another rank is to run, pickled by reference: a function of a module that it can import."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    answers: bool


class Failed(NamedTuple):
    """Instead of a result: the rank ends with this."""

    error: str


class Group:
    """
    Args:
        size: ranks, this process among them.
        num_threads: of torch, in each of the others.
        name: of the topology, for errors.
    """

    def __init__(self, size: int, num_threads: int, name: str) -> None:
        self.size, self.name = size, name
        self._state = state = _State(tempfile.TemporaryDirectory(prefix="minengine-ranks-"))
        self.member = Member(0, size, state.folder.name)
        self._finalizer = weakref.finalize(self, state.end)  # also when Python ends
        try:
            for rank in range(1, size):
                state.start(rank, size, num_threads)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [process.popen.pid for process in self._state.processes]

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Let the other ranks run `function(member, *args)`.

        Raises:
            GroupError: a rank has ended.
        """
        self._send(Job(function, args, False))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Let all ranks run `function(member, *args)`: their results, in the order of ranks.

        Raises:
            GroupError: a rank has ended, or its function failed. What fails on this rank is raised as it is, and the group is over.
        """
        with self.watched():
            self._send(Job(function, args, True))
            return [function(self.member, *args)] + self.results()

    def ask(self, function: Callable[..., Any], *args_of_rank: tuple[Any, ...]) -> None:
        """Let rank r run `function(member, *args_of_rank[r - 1])`; `results` fetches what they give."""
        if len(args_of_rank) != self.size - 1:
            raise ValueError(f"arguments for {len(args_of_rank)} ranks, and there are {self.size - 1} others")
        for process, args in zip(self._alive(), args_of_rank):
            self._send_to(process, pickle.dumps(Job(function, args, True), pickle.HIGHEST_PROTOCOL))

    def results(self) -> list[Any]:
        """Of ranks 1, 2, ...: what the function gave that they were last asked to run."""
        results = []
        for process in self._alive():
            try:
                result = process.connection.recv()
            except (EOFError, OSError) as error:
                raise self.over(error) from None
            if isinstance(result, Failed):
                raise self.over(GroupError(f"rank {process.rank}: {result.error}")) from None
            results.append(result)
        return results

    def watched(self) -> _Watched:
        """A context in which this rank talks with the others: an error there ends the group, and a lost peer is named. Ctrl-C waits until they have
        talked; a second one does not, and ends the group too."""
        return _Watched(self)

    def over(self, error: BaseException) -> GroupError:
        """End the group because of `error`; returns what to raise: which rank ended, if one did."""
        if self._state.error is None:
            end = self._state.first_end(LAST_WORDS_S) if isinstance(error, (PeerLost, EOFError, OSError)) else None
            if end is not None:
                process, code = end
                words = _last_words(process)
                why = f"rank {process.rank} of {self.size} {_ended(code)}{f' ({words})' if words else ''}"
            else:
                why = f"a rank of {self.size} does not answer: {error}" if isinstance(error, PeerLost) else str(error) or type(error).__name__
            self._state.error = GroupError(f"topology='{self.name}': {why}; the group has ended, start the engine again")
        self.close()
        return self._state.error

    def on_end(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, in any thread, when a rank ends that was not told to; at once if one has."""
        with self._state.changed:
            self._state.listeners.append(tell)
            late = bool(self._state.ends)
        if late:
            tell()

    def check(self) -> None:
        """
        Raises:
            GroupError: the group has ended.
        """
        self._alive()

    def close(self) -> None:
        """End the other ranks; twice is harmless."""
        self._finalizer()

    def _alive(self) -> list[_Process]:
        if self._state.error is not None:
            raise self._state.error
        if not self._finalizer.alive:
            raise GroupError(f"topology='{self.name}': the group was closed; start the engine again")
        if self._state.ends:
            raise self.over(EOFError())
        return self._state.processes

    def _send(self, job: Job) -> None:
        data = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        for process in self._alive():
            self._send_to(process, data)

    def _send_to(self, process: _Process, data: bytes) -> None:
        try:
            process.connection.send_bytes(data)
        except OSError as error:
            raise self.over(error) from None


class _Watched:
    def __init__(self, group: Group) -> None:
        self._group = group
        # Only what Python itself does with Ctrl-C, an exception out of nowhere, would leave the others in the middle of a word.
        self._holds = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._interrupted = False

    def __enter__(self) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: Any) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(error, PeerLost):
            raise self._group.over(error) from error
        if error is not None and not isinstance(error, GroupError):
            self._group.over(error)
        if error is None and self._interrupted:
            raise KeyboardInterrupt


class _Process(NamedTuple):
    rank: int
    popen: subprocess.Popen
    connection: Connection


class _State:
    """What outlives a Group that nobody refers to any more, until its processes have ended."""

    def __init__(self, folder: tempfile.TemporaryDirectory) -> None:
        self.folder = folder
        self.processes: list[_Process] = []
        self.ends: list[tuple[_Process, int]] = []  # with the exit code; of those that ended unasked, in that order
        self.changed = Condition()
        self.listeners: list[Callable[[], None]] = []
        self.ending = False
        self.error: GroupError | None = None

    def start(self, rank: int, size: int, num_threads: int) -> None:
        mine, its = socket.socketpair()
        threads = str(num_threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        try:
            # Its standard input never brings anything; its end says that this process has ended, however that came about.
            # A session of its own: Ctrl-C in a terminal is for rank 0, which then ends the others.
            popen = subprocess.Popen(command("minengine.parallel.rank_main", its.fileno(), rank, size, self.folder.name, path=sys.path),
                                     env=env, pass_fds=[its.fileno()], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        process = _Process(rank, popen, Connection(mine.detach()))
        self.processes.append(process)
        Thread(target=self._watch, args=(process,), name=f"watches rank {rank}", daemon=True).start()

    def _watch(self, process: _Process) -> None:
        code = process.popen.wait()
        with self.changed:
            if self.ending:
                return
            self.ends.append((process, code))
            self.changed.notify_all()
            listeners = list(self.listeners)
        for other in self.processes:  # nobody waits for a rank that is no more: gloo sees a closed connection, not a stopped peer
            if other is not process and code != LOST_PEER:
                other.popen.kill()
        for tell in listeners:
            tell()

    def first_end(self, timeout_s: float) -> tuple[_Process, int] | None:
        """The end that the others followed; None if no rank has ended by then but for want of another."""
        def cause() -> tuple[_Process, int] | None:
            return next((end for end in self.ends if end[1] != LOST_PEER), None)

        with self.changed:
            self.changed.wait_for(lambda: cause() is not None, timeout_s)
            return cause()

    def end(self) -> None:
        with self.changed:
            self.ending = True
        failed = bool(self.ends) or self.error is not None
        for process in self.processes:
            if failed:
                process.popen.kill()
            process.popen.stdin.close()
        for process in self.processes:
            try:
                process.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.connection.close()
        self.folder.cleanup()


def _last_words(process: _Process) -> str:
    """Why a rank's function failed, if it has said so and nobody has read it."""
    try:
        while process.connection.poll():
            said = process.connection.recv()
            if isinstance(said, Failed):
                return said.error
    except (EOFError, OSError):
        pass
    return ""


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
