"""How the bytes of a block get into a file and out of it: by NIXL's POSIX backend, as one transfer of many pieces, or by plain reads and writes."""
from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Protocol, Sequence

import numpy as np

from minengine.load_nixl import load_nixl

__all__ = ["FileIO", "NixlIO", "PlainIO", "open_io"]

Piece = tuple[int, int, np.ndarray]  # an open file, the byte in it, and a contiguous uint8 array


class FileIO(Protocol):
    name: str
    batch: int  # blocks that are best read at once

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill every array from its file.

        Raises:
            OSError: a piece cannot be read in full; what the arrays hold then is unknown.
        """

    def write(self, pieces: Sequence[Piece]) -> None:
        """The same into the files."""


class PlainIO:
    name = "plain"
    batch = 1  # what has just been read is checked while the processor still has it at hand

    def read(self, pieces: Sequence[Piece]) -> None:
        for fd, offset, data in pieces:
            done = 0
            while done < data.nbytes:
                n = os.preadv(fd, [memoryview(data)[done:]], offset + done)
                if not n:
                    raise OSError("the file ends too early")
                done += n

    def write(self, pieces: Sequence[Piece]) -> None:
        for fd, offset, data in pieces:
            done = 0
            while done < data.nbytes:
                done += os.pwritev(fd, [memoryview(data)[done:]], offset + done)


class NixlIO:
    """One NIXL agent with the POSIX backend alone; it moves a whole batch of pieces in one transfer. Any thread may call it."""

    name = "nixl"
    batch = 8
    POLL_S = 5e-5  # the reads are in the kernel's hands by then: asking without a pause would take a core from the model

    def __init__(self) -> None:
        """
        Raises:
            NixlMissing: it is not installed, or cannot be loaded.
            RuntimeError: its POSIX backend does not start.
        """
        nixl = load_nixl()
        self._lock = threading.Lock()
        try:
            name = f"tier-{os.getpid()}-{secrets.token_hex(4)}"
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_listen_thread=False, backends=["POSIX"]))
        except Exception as error:
            raise RuntimeError(f"NIXL's POSIX backend does not start ({error}); use plain files") from error

    def read(self, pieces: Sequence[Piece]) -> None:
        self._move("READ", pieces)

    def write(self, pieces: Sequence[Piece]) -> None:
        self._move("WRITE", pieces)

    def _move(self, operation: str, pieces: Sequence[Piece]) -> None:
        if not pieces:
            return
        agent, registered, handle = self._agent, [], None
        memory = [(data.ctypes.data, data.nbytes, 0) for _, _, data in pieces]
        files = [(offset, data.nbytes, fd) for fd, offset, data in pieces]
        with self._lock:
            try:
                registered.append(agent.register_memory([(*one, "") for one in memory], "DRAM"))
                registered.append(agent.register_memory([(0, offset + nbytes, fd, "") for offset, nbytes, fd in files], "FILE"))
                handle = agent.initialize_xfer(operation, agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(files, "FILE"), agent.name)
                state = agent.transfer(handle)
                while state == "PROC":
                    time.sleep(self.POLL_S)
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    raise OSError(f"NIXL ended a {operation} of {len(pieces)} pieces with {state}")
            except OSError:
                raise
            except Exception as error:  # NIXL's own: they have no common base
                raise OSError(f"NIXL cannot {operation} {len(pieces)} pieces: {error}") from error
            finally:
                if handle is not None:
                    agent.release_xfer_handle(handle)
                for one in registered:
                    agent.deregister_memory(one)


def open_io(kind: str) -> FileIO:
    """"nixl", "plain", or "auto": NIXL where it works.

    Raises:
        RuntimeError: NIXL is asked for by name and does not work here (NixlMissing is one).
    """
    if kind == "plain":
        return PlainIO()
    try:
        return NixlIO()
    except RuntimeError:
        if kind == "nixl":
            raise
        return PlainIO()
