"""The other process of a transfer: an agent that does what its parent asks of it over a pipe. `python tests/transfer_peer.py FD NAME KIND`."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).resolve().parents[1]
LONG_S = 60
SIZE = 8 << 20


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


class Pair:
    """An agent here with `storage`, and one in another process with as much, at `address`."""

    def __init__(self, kind: str, name: str, nbytes: int = SIZE) -> None:
        from minengine.disagg.transfer import open_agent

        self.agent = open_agent(f"{name}-here", kind)
        self.storage = self.agent.allocate(nbytes)
        self.other = PeerProcess(f"{name}-there", kind)
        metadata, self.address = self.other.ask("allocate", nbytes)
        self.peer = self.agent.connect(metadata)

    def close(self) -> None:
        self.other.close()
        self.agent.close()

    def read(self, parts, **options):
        return self.agent.read(self.peer, self.address, parts, **options)

    def write(self, parts, **options):
        return self.agent.write(self.peer, self.address, parts, **options)

    def done(self, transfer) -> None:
        from minengine.disagg.agents import wait

        assert wait(self.agent, transfer, LONG_S) == "DONE", transfer.error
        assert self.agent.release(transfer)


def until(found):
    """What `found` returns once that is not empty; messages may come a little after the data."""
    end = monotonic() + LONG_S
    while not (got := found()):
        assert monotonic() < end, "nothing came"
        sleep(0.001)
    return got


def stand_still() -> None:
    """What happens to a read of a peer that is stopped: it goes on, is killed, or is declared dead. Needs UCX_TLS=tcp,self."""
    from minengine.disagg.agents import PeerGone, TransferError, wait
    from minengine.disagg.pieces import Pieces

    for ending in ("goes on", "is killed", "is declared dead"):
        pair = Pair("nixl", ending.replace(" ", "-"))
        agent, other = pair.agent, pair.other
        other.ask("fill", b"\x09" * SIZE)
        pair.done(pair.read(Pieces.one(64)))
        pair.storage.zero_()
        other.stop()
        transfer = pair.read(Pieces.one(SIZE), notify=b"read")
        assert wait(agent, transfer, 0.5) == "PROC"
        assert not agent.release(transfer) and agent.telemetry(transfer).descriptors is None
        try:
            agent.disconnect(pair.peer)
        except TransferError as error:
            assert "cannot be disconnected while 1 transfers" in str(error)
        else:
            raise AssertionError("a peer that may write was let go")
        if ending == "goes on":
            other.go_on()
            pair.done(transfer)
            assert bytes(pair.storage.numpy()) == b"\x09" * SIZE
            assert until(lambda: other.ask("notifications")) == [(agent.name, b"read")]
        else:
            other.process.kill()
            if ending == "is declared dead":
                agent.disconnect(pair.peer, dead=True)
            assert wait(agent, transfer, LONG_S) == "ERR", ending
            assert isinstance(transfer.error, PeerGone) and agent.release(transfer)
        pair.close()


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
