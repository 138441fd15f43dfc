"""Workers on the nodes of a Ray cluster. Ray chooses the node and keeps its books of CPUs and GPUs; it carries no request and no KV.

    front                                      node
    placement group, actor      ─ Ray ──▶      NodeAgent (ray_node.py)
    a port, a key of its own    ◀─ TCP ─       connects, proves that it has the key, tells the time
                                               starts the worker's process on that connection
    Start, requests, reports    ◀─ TCP ─▶      python -m minengine.disagg.worker
                                               its KV goes to other nodes by NIXL

A worker is one bundle of CPUs (its threads) and GPUs (its ranks): never torn between two nodes. Its process ends when its connection does, and
with its actor, which ends with the front's job.
"""
from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any

from ..config import ConfigError
from .clocks import RemoteClock, set_back, set_forward
from .launch import STOP_S, OnEnd, OnMessage, WorkerProcess, split
from .messages import Ping, Pong, Start
from .ray_node import CLOCK_ASKS, NodeAgent, tune

__all__ = ["RayLauncher", "RayProcess", "accept_worker", "largest_share"]

log = logging.getLogger("minengine.cluster")

PLACE_S = 60.0  # for a node with enough that is free, and for a Python to start there
ANSWER_S = 10.0  # for what takes a node no time
STRANGER_S = 2.0  # for whoever connects to show that it has the key
LOOK_S = 0.25  # whether a worker that is being placed has been given up


class RayLauncher:
    """
    Args:
        address: as Ray has it: ray://HOST:PORT, HOST:PORT, or auto. A connection to Ray that this process has already is used instead.

    Raises:
        ConfigError: Ray is not installed, or cannot be reached there.
    """

    _using = 0  # launchers that share this process's connection to Ray
    _lock = Lock()

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"cluster={address!r}: needs Ray, here and on every node: pip install 'minengine[ray]'; or leave it out "
                              "for workers on this machine") from error
        self.ray = ray
        self._open = True
        host = None if ray.is_initialized() else self._own_host(address)
        with self._lock:
            if not ray.is_initialized():
                _connect(ray, address)
                RayLauncher._using = 1
            elif RayLauncher._using:
                RayLauncher._using += 1  # else somebody else has made the connection, who keeps it
        self.host = host or ray.util.get_node_ip_address()  # where nodes find this process

    @staticmethod
    def _own_host(address: str) -> str | None:
        """This machine's address on its way to the cluster; None: ask Ray."""
        if address == "auto":
            return None
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as link:
                own = link.getsockname()[0]
        except OSError as error:
            raise ConfigError(f"cluster={address!r}: nothing answers there ({error}); start Ray with `ray start --head`, whose port 10001 is for ray://") from error
        return None if own.startswith("127.") or own == "::1" else own  # other nodes cannot reach that

    def gpus(self, start: Start) -> int:
        """Of one worker."""
        wanted = start.args.device.startswith("cuda") or start.args.device == "auto" and self.ray.cluster_resources().get("GPU", 0) > 0
        return start.args.ranks.gpus if wanted else 0

    def shares(self, threads: int | None, count: int) -> list[int]:
        """Threads in all are split evenly; without a number each worker gets as many as let all find a place."""
        if threads is not None:
            return split(threads, count)
        return [largest_share([int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]], count)] * count

    def launch(self, start: Start, on_message: OnMessage, on_end: OnEnd) -> WorkerProcess:
        return RayProcess(self, start, on_message, on_end)

    def close(self) -> None:
        with self._lock:
            if self._open and RayLauncher._using:
                RayLauncher._using -= 1
                if not RayLauncher._using:
                    self.ray.shutdown()
            self._open = False


def _connect(ray: Any, address: str) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except Exception as error:  # ConnectionError, RuntimeError, grpc's own
        raise ConfigError(f"cluster={address!r}: Ray does not connect ({_first_line(error)}); "
                          "start it with `ray start`, with the same versions of Ray and Python on every node") from error
    finally:
        if current_thread() is main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself


def largest_share(cores: list[int], count: int) -> int:
    """The most threads that each of `count` workers can have, each on one node of so many cores; 1 if there are too few."""
    return next((share for share in range(max(cores, default=1), 1, -1) if sum(n // share for n in cores) >= count), 1)


class _Lost(Exception):
    """What became of a worker, in words that go on from its name."""


class RayProcess(WorkerProcess):
    """A worker's process on some node. One thread has it placed and started, then reads what it says, then clears up."""

    def __init__(self, launcher: RayLauncher, start: Start, on_message: OnMessage, on_end: OnEnd) -> None:
        super().__init__(start.name, lambda process, message: on_message(process, self._heard(message)), on_end)
        self._launcher, self._start = launcher, start
        self._clock = RemoteClock()
        self._asked: dict[int, float] = {}  # pings under way: when
        self._killed, self._ended = Event(), Event()
        self._link: socket.socket | None = None
        self._actor: Any = None
        self._group: Any = None
        self.send(start)
        Thread(target=self._run, name=f"{self.name} reads", daemon=True).start()

    def send(self, message: Any) -> None:
        if isinstance(message, Ping):
            self._asked[message.number] = time.perf_counter()
        super().send(set_forward(message, self._clock.ahead_s))

    def _heard(self, message: Any) -> Any:
        if isinstance(message, Pong) and message.number in self._asked:
            self._clock.heard(self._asked.pop(message.number), message.clock_s, time.perf_counter())
        return set_back(message, self._clock.ahead_s)

    def kill(self) -> None:
        self._killed.set()
        link = self._link
        if link is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)  # a worker ends with its connection, and `_run` ends one that cannot
            except OSError:  # it is closed already
                pass

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ended.wait(timeout_s)

    # --- the reading thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            end: int | str = self._live()
        except _Lost as lost:
            end = str(lost)
        except Exception as error:  # without its connection to the cluster Ray raises errors of many kinds
            log.debug("worker %s", self.name, exc_info=True)
            end = f"was lost ({_first_line(error)})"
        self._clear()
        self._ended.set()
        self._on_end(self, end)

    def _live(self) -> int | str:
        """From its placing to its end; returns its exit code, or what became of it."""
        with self._start_somewhere() as connection:
            self._write_to(connection)
            self._read_from(connection)
        if self._killed.is_set():
            self._actor.kill.remote()
        try:
            return self._result(self._actor.wait.remote(), STOP_S)
        except TimeoutError:
            return f"let go of its connection and had not ended {STOP_S:g} s later; its node may be gone"

    def _start_somewhere(self) -> Connection:
        """
        Raises:
            _Lost: there is no place, it cannot be started there, or it has been killed meanwhile.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        launcher, threads, gpus = self._launcher, self._start.args.num_threads or 1, self._launcher.gpus(self._start)
        self._group = placement_group([{"CPU": threads, **({"GPU": gpus} if gpus else {})}], strategy="STRICT_PACK")
        self._actor = launcher.ray.remote(NodeAgent).options(num_cpus=threads, num_gpus=gpus, max_concurrency=3,
                                                             scheduling_strategy=PlacementGroupSchedulingStrategy(self._group)).remote()
        with socket.create_server((launcher.host, 0), family=socket.AF_INET6 if ":" in launcher.host else socket.AF_INET) as listening:
            try:
                address, number = self._result(self._actor.connect.remote(listening.getsockname()[:2]), PLACE_S, unless_killed=True)
            except TimeoutError:
                if self._group.wait(LOOK_S):
                    raise _Lost(f"was placed, and its node has not started a Python for it within {PLACE_S:g} s") from None
                raise _Lost(f"was not placed: for {PLACE_S:g} s no node of the cluster had {threads} CPUs{f' and {gpus} GPUs' if gpus else ''} free; "
                            "ask for fewer workers or threads (num_threads), or add a node") from None
            self.node = f"{address} (Ray node {number[:8]})"
            key = secrets.token_bytes(32)
            started = self._actor.start.remote(key, threads)
            self._link = accept_worker(listening, key, self._clock, ANSWER_S)
            if self._link is None:
                raise _Lost(f"was not started on {self.node}, which did not show its key")
        try:
            self.pid = self._result(started, ANSWER_S, unless_killed=True)
        except TimeoutError:
            raise _Lost(f"was not started on {self.node}, which does not answer") from None
        return Connection(os.dup(self._link.fileno()))

    def _result(self, asked: Any, timeout_s: float, *, unless_killed: bool = False) -> Any:
        """What a method of the actor returned.

        Raises:
            TimeoutError: nothing by then.
            _Lost: it failed, or the actor has ended.
        """
        ray, until_s = self._launcher.ray, time.monotonic() + timeout_s
        while not ray.wait([asked], timeout=max(0.0, min(LOOK_S, until_s - time.monotonic())))[0]:
            if unless_killed and self._killed.is_set():
                raise _Lost("was ended before it had started")
            if time.monotonic() >= until_s:
                raise TimeoutError
        try:
            return ray.get(asked)
        except ray.exceptions.RayTaskError as error:
            raise _Lost(f"could not be started on {self.node or 'its node'} ({_first_line(error.cause)})") from error
        except ray.exceptions.RayActorError as error:
            raise _Lost(f"has gone with its node, or cannot run on it ({_first_line(error)})") from error

    def _clear(self) -> None:
        """Give back what Ray keeps for it, and whatever is left of it there."""
        if self._link is not None:
            self._link.close()
        try:
            if self._actor is not None:
                self._launcher.ray.kill(self._actor)  # and what it started
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
        except Exception:  # no cluster any more: nothing there either
            log.debug("worker %s", self.name, exc_info=True)


def accept_worker(listening: socket.socket, key: bytes, clock: RemoteClock, timeout_s: float) -> socket.socket | None:
    """The connection of the node that has the key, which has told `clock` its time; whoever else connects is sent away. None: it has not come."""
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        listening.settimeout(left_s)
        try:
            link, _ = listening.accept()
        except TimeoutError:
            break
        tune(link)
        _limit(link, min(left_s, STRANGER_S))
        try:
            with Connection(os.dup(link.fileno())) as connection:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                for _ in range(CLOCK_ASKS):
                    asked_s = time.perf_counter()
                    connection.send_bytes(b"")
                    (theirs_s,) = struct.unpack("<d", connection.recv_bytes())
                    clock.heard(asked_s, theirs_s, time.perf_counter())
            _limit(link, 0.0)
            return link
        except (AuthenticationError, EOFError, OSError):
            link.close()
    return None


def _limit(link: socket.socket, timeout_s: float) -> None:
    """Of each read and write of a blocking socket; 0 for none."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6)))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
