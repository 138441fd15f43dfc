"""The other process of a transfer: an agent that does what its parent asks of it over a pipe. `python tests/transfer_peer.py FD NAME KIND`."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class PeerProcess:
    """An agent in a process of its own; `ask` returns what the method in `_Peer` of that name returns."""

    def __init__(self, name: str, kind: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno()), name, kind], pass_fds=[theirs.fileno()],
                                            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"})
        self._pipe = Connection(ours.detach())

    def ask(self, what: str, *given):
        self._pipe.send((what, given))
        return self._pipe.recv()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._pipe.close()
        self.go_on()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


class _Peer:
    def __init__(self, name: str, kind: str) -> None:
        from minengine.disagg.transfer import open_agent

        self.agent = open_agent(name, kind)
        self.storages = []

    def allocate(self, nbytes: int) -> tuple[bytes, int]:
        self.storages.append(self.agent.allocate(nbytes))
        return self.agent.metadata(), self.storages[-1].data_ptr()

    def fill(self, content: bytes, which: int = 0) -> None:
        import torch

        self.storages[which][: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def content(self, which: int = 0) -> bytes:
        return self.storages[which].numpy().tobytes()

    def connect(self, metadata: bytes) -> str:
        return self.agent.connect(metadata)

    def notify(self, peer: str, message: bytes) -> None:
        self.agent.notify(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        return self.agent.notifications()


def main(fd: str, name: str, kind: str) -> None:
    pipe, peer = Connection(int(fd)), _Peer(name, kind)
    try:
        while True:
            what, given = pipe.recv()
            pipe.send(getattr(peer, what)(*given))
    except EOFError:
        peer.agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
