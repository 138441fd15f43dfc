"""What a transfer between two processes takes: one holds a pool that the other reads. For the bench and the pages.

    with Pair(nbytes=1 << 30) as pair:
        pair.read(pieces(...)).seconds
"""
from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import numpy as np

from minengine.disagg.agents import TransferError, wait
from minengine.disagg.pieces import Pieces
from minengine.disagg.transfer import open_agent
from minengine.kv.layout import KVLayout
from minengine.workload.fitting import relative_fit

__all__ = ["Costs", "Pair", "Timed", "block_ids", "even_pieces", "fit"]

LIMIT_S = 300.0


@dataclass(frozen=True)
class Timed:
    """One transfer. `seconds` runs from the call that starts it until it is seen to be done, descriptors made and checked within."""

    seconds: float
    asked: int  # pieces before neighbours were merged
    descriptors: int  # as the transfer engine counts them
    nbytes: int


@dataclass(frozen=True)
class Costs:
    """seconds = start_s + nbytes * byte_s + descriptors * descriptor_s"""

    start_s: float
    byte_s: float
    descriptor_s: float

    def seconds(self, nbytes: float, descriptors: float) -> float:
        return self.start_s + nbytes * self.byte_s + descriptors * self.descriptor_s

    def bytes_where_saving(self, share: float, many: int, few: int) -> float:
        """How many bytes make `few` descriptors take (1 - share) of the time of `many`. Negative: the saving is smaller at every size."""
        return (self.descriptor_s * ((many - few) / share - many) - self.start_s) / self.byte_s


class Pair:
    """`nbytes` here and as many in another process, touched page by page; close it, or use it in `with`.

    Raises:
        TransferError: no agent of that kind works, or there is not enough memory there.
    """

    def __init__(self, nbytes: int, kind: str = "auto") -> None:
        self.agent = open_agent(f"reader-{os.getpid()}", kind)
        self.storage = self.agent.allocate(nbytes).fill_(1)
        ours, theirs = socket.socketpair()
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(str(part) for part in (root, root / "kernels", os.environ.get("PYTHONPATH", "")) if str(part))
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-m", "minengine.disagg.measure", str(theirs.fileno()), str(nbytes), self.agent.kind],
                                             pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path})
        self._pipe = Connection(ours.detach())
        try:
            metadata, self.address = self._pipe.recv()
        except EOFError as error:
            self.close()
            raise TransferError(f"the process that should hold {nbytes} bytes ended") from error
        self.peer = self.agent.connect(metadata)
        self.read(Pieces.one(1))  # the connection itself

    def read(self, parts: Pieces, merging: bool = False) -> Timed:
        """Copy these pieces from there to here.

        Args:
            merging: NIXL merges neighbours too, in the order listed (`TransferAgent.read`).
        """
        start_s = perf_counter()
        transfer = self.agent.read(self.peer, self.address, parts, **({"merging": True} if merging else {}))
        state = wait(self.agent, transfer, LIMIT_S)
        seconds = perf_counter() - start_s
        if state != "DONE":
            raise transfer.error or TransferError(f"{parts.total_bytes} bytes were not read in {LIMIT_S:g} s")
        self.agent.release(transfer)
        return Timed(seconds, parts.asked, self.agent.telemetry(transfer).descriptors, parts.total_bytes)

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()
        self.agent.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def block_ids(layout: KVLayout, count: int, seed: int | None) -> list[int]:
    """`count` neighbouring blocks of a pool, or with a seed as many from everywhere in it, in no order."""
    return list(range(count)) if seed is None else random.Random(seed).sample(range(layout.num_blocks), count)


def even_pieces(nbytes: int, count: int, seed: int = 0) -> Pieces:
    """About `nbytes` in `count` pieces of one size, in another order there than here: none touch on both sides but by chance, none are merged."""
    size = nbytes // count
    src, dst = (np.random.default_rng([seed, side]).permutation(count).astype(np.int64) * size for side in (0, 1))
    return Pieces(src, dst, np.full(count, size, np.int64), asked=count)


def fit(timed: Sequence[Timed]) -> Costs:
    """Least squares of the relative errors, so that short transfers count as much as long ones."""
    return Costs(*relative_fit([[1.0, one.nbytes, one.descriptors] for one in timed], [one.seconds for one in timed]))


def _hold(fd: str, nbytes: str, kind: str) -> None:
    pipe = Connection(int(fd))
    agent = open_agent(f"holder-{os.getpid()}", kind)
    storage = agent.allocate(int(nbytes)).fill_(2)
    pipe.send((agent.metadata(), storage.data_ptr()))
    try:
        pipe.recv()
    except EOFError:
        agent.close()


if __name__ == "__main__":
    _hold(*sys.argv[1:])
