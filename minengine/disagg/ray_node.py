"""What Ray runs on a node for one worker: an actor that starts the worker's process there, and is there as long as it is.

It imports neither torch nor the engine; the process that it starts is the one that a front starts on its own machine (spawn.py).
"""
from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from .spawn import spawn

__all__ = ["CLOCK_ASKS", "CONNECT_S", "NodeAgent", "tune"]

CLOCK_ASKS = 8  # times that the front asks for this machine's time
CONNECT_S = 10.0


class NodeAgent:
    """An actor. Its methods run in threads of their own, in the order connect, start, wait; `kill` at any time."""

    _connection: Connection
    _popen: subprocess.Popen

    def connect(self, address: tuple[str, int]) -> tuple[str, str]:
        """Connect to the front; returns this node's address and its number.

        Raises:
            OSError: the front cannot be reached.
        """
        import ray

        with socket.create_connection(address, timeout=CONNECT_S) as link:
            link.settimeout(None)
            tune(link)
            self._connection = Connection(link.detach())
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def start(self, key: bytes, threads: int) -> int:
        """Prove to the front that this is the process that it waits for, and let it do the same; tell it the time; then give the connection to a
        worker. Returns the worker's process number.

        Raises:
            AuthenticationError, EOFError, OSError: it is not the front, or has gone.
        """
        import ray

        ray_folder = os.path.dirname(ray.__file__)  # Ray puts packages of its own in front of everybody's
        with self._connection as connection:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            for _ in range(CLOCK_ASKS):
                connection.recv_bytes()
                connection.send_bytes(struct.pack("<d", time.perf_counter()))
            self._popen = spawn(connection.fileno(), threads, [path for path in sys.path if not path.startswith(ray_folder)])
        return self._popen.pid

    def wait(self) -> int:
        """The worker's exit code, when it has ended."""
        return self._popen.wait()

    def kill(self) -> None:
        self._popen.kill()


def tune(link: socket.socket) -> None:
    """A connection between a front and a worker: a small message goes at once, and a machine that is gone is noticed within half a minute, whoever
    has something to say."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):  # seconds; the last in ms
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
