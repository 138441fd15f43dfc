"""Where workers run, and how the front talks to one: the part of their supervision (supervise.py) that depends on the place.

    LocalLauncher   processes of this machine, over socket pairs
    RayLauncher     processes on the nodes of a Ray cluster, over TCP (ray_launch.py; nothing here imports Ray)
"""
from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, Callable, Protocol

from .messages import Start
from .spawn import spawn

__all__ = ["STOP_S", "Launcher", "LocalLauncher", "LocalProcess", "OnEnd", "OnMessage", "WorkerProcess", "open_launcher", "split"]

STOP_S = 5.0  # for a step that is under way when all is to end

OnMessage = Callable[["WorkerProcess", Any], None]
OnEnd = Callable[["WorkerProcess", "int | str"], None]


class WorkerProcess:
    """One process, from its start to its end, wherever it is. A thread reads what it says; another writes, so that nobody waits for one that does
    not read.

    Args:
        on_message: called in the reading thread; on_end: the same, once, with the exit code, or in words what became of it.

    Attributes:
        pid: on its machine; None until it has been started there.
        node: which machine; "" for this one.
    """

    pid: int | None = None
    node: str = ""

    def __init__(self, name: str, on_message: OnMessage, on_end: OnEnd) -> None:
        self.name = name
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._on_message, self._on_end = on_message, on_end

    @property
    def about(self) -> str:
        """For people."""
        return f"process {self.pid}{f' on {self.node}' if self.node else ''}"

    def send(self, message: Any) -> None:
        """Returns at once; nothing is sent to one that has ended."""
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def kill(self) -> None:
        """Returns at once; `wait` for it."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended by then."""
        raise NotImplementedError

    def _write_to(self, connection: Connection) -> None:
        """Send what is in the outbox and what comes into it, until None."""
        def write() -> None:
            try:
                while (data := self._outbox.get()) is not None:
                    connection.send_bytes(data)
            except OSError:  # it has ended: the reading thread sees that too
                pass

        Thread(target=write, name=f"{self.name} writes", daemon=True).start()

    def _read_from(self, connection: Connection) -> None:
        """Until its end of the connection is closed. What is sent from then on is dropped."""
        try:
            while True:
                self._on_message(self, connection.recv())
        except (EOFError, OSError):
            pass
        self._outbox.put(None)


class Launcher(Protocol):
    def shares(self, threads: int | None, count: int) -> list[int]: ...  # threads of each of `count` workers, of so many in all; None: of all there are
    def launch(self, start: Start, on_message: OnMessage, on_end: OnEnd) -> WorkerProcess: ...  # returns at once; OSError: it cannot be started
    def close(self) -> None: ...  # when all its processes have ended


def open_launcher(cluster: str | None) -> Launcher:
    """
    Args:
        cluster: see ClusterArgs; None: this machine.

    Raises:
        ConfigError: that cluster cannot be reached, or Ray is not installed.
    """
    if cluster is None:
        return LocalLauncher()
    from .ray_launch import RayLauncher

    return RayLauncher(cluster)


class LocalLauncher:
    def shares(self, threads: int | None, count: int) -> list[int]:
        return split(threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1), count)

    def launch(self, start: Start, on_message: OnMessage, on_end: OnEnd) -> WorkerProcess:
        return LocalProcess(start, on_message, on_end)

    def close(self) -> None:
        pass


def split(threads: int, count: int) -> list[int]:
    """As evenly as it goes, one at least."""
    return [max(1, threads // count + (i < threads % count)) for i in range(count)]


class LocalProcess(WorkerProcess):
    """A child of this process, which ends with the thread that makes it."""

    def __init__(self, start: Start, on_message: OnMessage, on_end: OnEnd) -> None:
        super().__init__(start.name, on_message, on_end)
        mine, its = socket.socketpair()
        try:
            self._popen = spawn(its.fileno(), start.args.num_threads or 1, sys.path)
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        self.pid = self._popen.pid
        self._connection = Connection(mine.detach())
        Thread(target=self._read, name=f"{self.name} reads", daemon=True).start()
        self._write_to(self._connection)
        self.send(start)

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        self._read_from(self._connection)
        if not self.wait(STOP_S):  # it let go of its end and does not end
            self.kill()
            self.wait()
        self._connection.close()
        self._on_end(self, self._popen.returncode)
