"""Where NIXL is not: the same face over files in shared memory, for processes of one machine.

Each agent has a private folder with a file for each stretch of memory it allocates, which peers map, and a socket for messages. A
thread copies the pieces, another receives messages. The folder goes with the agent; one whose process was killed is swept by the
next agent that starts: its lock is free then.
"""
from __future__ import annotations

import mmap
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from minengine.disagg.agents import Memory, Peer, PeerGone, Region, Report, Transfer, TransferError, pack, unpack
from minengine.disagg.pieces import Pieces

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

__all__ = ["ShmAgent", "sweep"]

PREFIX = "minengine-shm-"
SEND_LIMIT_S = 1.0  # a peer's thread takes messages at once unless the peer stands still
LARGEST_MESSAGE = 65536


@dataclass
class _Job:
    """A transfer's copies, for the thread that makes them."""

    src: np.ndarray
    dst: np.ndarray
    notify: bytes
    done: bool = False
    error: TransferError | None = None
    posted_s: float = 0.0
    ended_s: float = 0.0


class ShmAgent(Memory):
    """
    Args:
        name: unique among the agents that meet.
        reason: why this agent and not NIXL, for `describe`.

    Raises:
        TransferError: this system has no Unix sockets or no file locks.
    """

    def __init__(self, name: str, reason: str = "asked for") -> None:
        super().__init__(name, "shm")
        if fcntl is None or not hasattr(socket, "AF_UNIX"):
            raise TransferError(f"workers cannot share memory on this system, and NIXL is not used: {reason}")
        self._reason = reason
        self._born = secrets.token_hex(8)
        sweep()
        self._folder, self._alive = _new_folder(_base())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._folder / "messages"))
        self._arrived: deque[tuple[str, bytes]] = deque()
        self._jobs: SimpleQueue[tuple[Transfer, _Job] | None] = SimpleQueue()
        self._maps: dict[str, np.ndarray] = {}  # peers' memory by file
        self._flying: set[Transfer] = set()
        self._clear = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # at the interpreter's end too
        threading.Thread(target=_receive, args=(self._socket, self._arrived), name=f"{name} messages", daemon=True).start()
        threading.Thread(target=_move, args=(self._jobs,), name=f"{name} copies", daemon=True).start()

    def describe(self) -> str:
        return f"{self.name}: memory shared by the processes of this machine, not NIXL ({self._reason})"

    # --- memory and peers ---

    def allocate(self, nbytes: int, device: str = "cpu") -> Tensor:
        """nbytes zeros, uint8, in a file of this agent's; goes with it.

        Raises:
            TransferError: GPU memory, or not enough shared memory.
        """
        if torch.device(device).type != "cpu":
            raise TransferError(f"workers can share a cache on '{device}' with NIXL only (pip install 'minengine[nixl]')")
        if nbytes < 1:
            raise TransferError("memory that is empty cannot be shared")
        with self._lock:
            path = self._folder / str(len(self._storages))
            with open(path, "xb+") as file:
                try:
                    os.ftruncate(file.fileno(), nbytes)
                    if hasattr(os, "posix_fallocate"):  # else what does not fit ends the process at the first write
                        os.posix_fallocate(file.fileno(), 0, nbytes)
                    storage = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
                except OSError as error:
                    path.unlink()
                    raise TransferError(f"{nbytes} bytes of shared memory cannot be had: {error.strerror}") from error
            self._storages[storage.data_ptr()] = Region(storage.data_ptr(), nbytes, "cpu", str(path)), storage
        return storage

    def register(self, storage: Tensor) -> int:
        """
        Returns:
            the address of its first byte.

        Raises:
            TransferError: this agent has not allocated it.
        """
        if storage.data_ptr() not in self._storages:
            raise TransferError("without NIXL only memory that the agent has allocated can be shared: take it from allocate()")
        return storage.data_ptr()

    def metadata(self) -> bytes:
        with self._lock:
            regions = tuple(region for region, _ in self._storages.values())
            return pack(Peer(self.name, self.kind, self._born, regions, str(self._folder / "messages").encode()))

    def connect(self, metadata: bytes) -> str:
        """
        Raises:
            PeerGone: its memory is not there any more.
            TransferError: bytes that are no metadata; a process of this name is connected, with transfers under way.
        """
        peer = unpack(metadata, self.kind)
        with self._lock:
            known = self._peers.get(peer.name)
            if known is not None and known.born != peer.born:
                self.disconnect(peer.name)
            for region in peer.regions:
                if region.place not in self._maps:
                    try:
                        with open(region.place, "rb+") as file:
                            self._maps[region.place] = np.frombuffer(mmap.mmap(file.fileno(), region.nbytes), np.uint8)
                    except (OSError, ValueError) as error:
                        raise PeerGone(f"worker '{peer.name}' is gone: its memory cannot be opened") from error
            self._peers[peer.name] = peer
            return peer.name

    def disconnect(self, peer: str, dead: bool = False) -> None:
        """Forget a peer; one that is not known is no error.

        Raises:
            TransferError: transfers with it are under way, and it is not said to be dead.
        """
        with self._lock:
            if peer not in self._peers:
                return
            under_way = sum(transfer.peer == peer and self.poll(transfer) == "PROC" for transfer in self._flying)
            if under_way and not dead:
                raise TransferError(f"worker '{peer}' cannot be disconnected while {under_way} transfers with it are under way")
            for region in self._peers.pop(peer).regions:
                self._maps.pop(region.place, None)

    # --- transfers ---

    def read(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"") -> Transfer:
        """As `TransferAgent.read`."""
        return self._start("READ", peer, address, pieces, local, notify)

    def write(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"") -> Transfer:
        """As `TransferAgent.write`."""
        return self._start("WRITE", peer, address, pieces, local, notify)

    def poll(self, transfer: Transfer) -> str:
        """ "PROC", "DONE" or "ERR" with `transfer.error`; with the last two nobody touches its memory any more."""
        job: _Job = transfer.handle
        if transfer.state == "PROC" and job.done:
            parts, transfer.error = transfer.pieces, job.error
            if job.error is None:
                transfer.report = Report(parts.asked, parts.merged, parts.merged, parts.total_bytes, 0.0, job.ended_s - job.posted_s)
            transfer.state = "DONE" if job.error is None else "ERR"
        return transfer.state

    def release(self, transfer: Transfer) -> bool:
        """Forget a transfer that has ended. False while it is under way."""
        with self._lock:
            if self.poll(transfer) == "PROC":
                return False
            self._flying.discard(transfer)
            return True

    def telemetry(self, transfer: Transfer) -> Report:
        return transfer.report or Report(transfer.pieces.asked, transfer.pieces.merged, None, transfer.pieces.total_bytes, None, None)

    def notify(self, peer: str, message: bytes) -> None:
        """
        Raises:
            PeerGone: its process has ended.
            TransferError: it has stood still for a second and takes no more messages.
        """
        _send(self.name, self._peer(peer), message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) of all that have arrived since the last call, in their order."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """End the threads and remove the folder; peers that have mapped its memory keep it."""
        with self._lock:
            self._jobs.put(None)
            if self._clear.alive:
                self._socket.shutdown(socket.SHUT_RDWR)
                self._clear()
                self._alive.close()

    def _start(self, operation: str, peer: str, address: int, pieces: Pieces, local: Tensor | None, notify: bytes) -> Transfer:
        with self._lock:
            ours, theirs, here, there = self._sides(operation, peer, address, pieces, local)
            near, far = self._storages[ours.address][1].numpy(), self._maps[theirs.place]
            job = _Job(far if operation == "READ" else near, near if operation == "READ" else far, notify, posted_s=perf_counter())
            transfer = Transfer(peer, operation, pieces, handle=job)
            self._flying.add(transfer)
            source, target = (there, here) if operation == "READ" else (here, there)
            self._jobs.put((job, self.name, self._peer(peer), source, target, pieces.nbytes))
            return transfer


# The threads' functions know no agent, so that one which nobody uses any more can go.

def _move(jobs: SimpleQueue[Any]) -> None:
    """Copy, then tell the peer, then say that it is done."""
    while (given := jobs.get()) is not None:
        job, name, peer, source, target, nbytes = given
        try:
            for start, to, count in zip(source.tolist(), target.tolist(), nbytes.tolist()):
                job.dst[to: to + count] = job.src[start: start + count]
            job.ended_s = perf_counter()
            _check_alive(peer)
            if job.notify:
                _send(name, peer, job.notify)
        except TransferError as error:
            job.error = error
        except Exception as error:
            job.error = TransferError(f"copying to or from worker '{peer.name}' failed: {error!r}")
        job.done = True


def _receive(messages: socket.socket, arrived: deque[tuple[str, bytes]]) -> None:
    while True:
        try:
            data = messages.recv(LARGEST_MESSAGE + 4096)
        except OSError:
            return
        if not data:  # shut down; a message has at least its sender's name
            messages.close()
            return
        name, _, message = data.partition(b"\n")
        arrived.append((name.decode(), message))


def _check_alive(peer: Peer) -> None:
    """A socket of a process that has ended refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(peer.blob.decode())
        except OSError as error:
            raise PeerGone(f"worker '{peer.name}' is gone") from error


def _send(name: str, peer: Peer, message: bytes) -> None:
    if len(message) > LARGEST_MESSAGE:
        raise TransferError(f"a message of {len(message)} bytes is too long: {LARGEST_MESSAGE} at most")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SEND_LIMIT_S)
        try:
            sender.sendto(name.encode() + b"\n" + message, peer.blob.decode())
        except TimeoutError as error:
            raise TransferError(f"worker '{peer.name}' takes no messages: it has stood still for {SEND_LIMIT_S:g} s") from error
        except OSError as error:
            raise PeerGone(f"worker '{peer.name}' is gone: could not send a message") from error


def _new_folder(base: Path) -> tuple[Path, IO[str]]:
    """A folder of mode 0700 and its lock, held."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = open(folder / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "lock").exists():  # else another agent's sweep came between making and locking
            return folder, lock
        lock.close()


def _base() -> Path:
    """Where the folders of agents lie."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def sweep() -> None:
    """Remove the folders of agents that were killed: nobody holds their lock."""
    for folder in _base().glob(PREFIX + "*"):
        try:
            with open(folder / "lock", "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, somebody else's, or only just being made
            continue
