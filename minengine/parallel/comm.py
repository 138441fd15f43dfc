"""Collectives between the ranks of a group, each counted under the name of its purpose: calls, bytes that this rank sends, seconds.

Process groups are made here and not by `torch.distributed.init_process_group`, whose one group a process would belong to whoever made it first:
several engines live in a notebook. gloo on CPUs, NCCL on CUDA.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arithmetic.sharding import sent_bytes
from ..config import ConfigError
from .ranks import Ranks

__all__ = ["Communicator", "Parallel", "PeerLost", "Traffic"]

LOOPBACK = "127.0.0.1"


class PeerLost(RuntimeError):
    """A rank of the group has ended or does not answer; which one, this rank cannot tell."""


@dataclass(slots=True)
class Traffic:
    """What this rank did for one purpose."""

    calls: int = 0
    nbytes: int = 0  # that this rank must send: `arithmetic.sent_bytes`
    seconds: float = 0.0  # waiting for the slowest rank, then moving; on CUDA only until the device was told


class Communicator:
    """One set of ranks. A set of one does nothing and counts nothing.

    Args:
        backend: a `ProcessGroupGloo` or `ProcessGroupNCCL`; None: this rank is alone.
        traffic: counted into, by purpose; shared by all sets of a rank.
    """

    def __init__(self, backend: Any, rank: int, size: int, traffic: dict[str, Traffic]) -> None:
        self._backend = backend
        self.rank, self.size = rank, size
        self._traffic = traffic

    def all_reduce(self, x: Tensor, name: str) -> Tensor:
        """The sum over the ranks, in place where `x` is contiguous. All ranks get the same bits."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._run(name, sent_bytes("all_reduce", x.nbytes, self.size), lambda: self._backend.allreduce([x]))
        return x

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """x (...) of the same shape on all ranks -> (size, ...), in the order of ranks."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        self._run(name, sent_bytes("all_gather", x.nbytes, self.size), lambda: self._backend.allgather([list(out.unbind())], [x]))
        return out

    def all_to_all(self, x: Tensor, name: str, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows for rank 0, then for rank 1, ... -> rows from rank 0, then from rank 1, ...

        Args:
            x: (sum(sends), ...); sends[r] rows are for rank r.
            receives: what the others' `sends` say about this rank.
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(sum(receives), *x.shape[1:])
        row = x.nbytes // x.shape[0] if x.shape[0] else 0
        nbytes = sent_bytes("all_to_all", row * (x.shape[0] - sends[self.rank]), self.size)
        self._run(name, nbytes, lambda: self._backend.alltoall_base(out, x, list(receives), list(sends), dist.AllToAllOptions()))
        return out

    def _run(self, name: str, nbytes: int, start: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            start().wait()
        except RuntimeError as error:  # gloo's and NCCL's word for a closed connection and for a time that has run out
            raise PeerLost(f"'{name}' came to nothing after {time.perf_counter() - began:.1f} s ({_first_line(error)})") from error
        traffic = self._traffic.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.nbytes += nbytes
        traffic.seconds += time.perf_counter() - began


class Parallel:
    """A rank's place and its ways to the others.

    Attributes:
        everyone: all ranks: those that split tensors, or those that exchange tokens.
        dcp: the ranks that split a sequence with this one.
        traffic: by purpose, since the group was made.
    """

    def __init__(self, ranks: Ranks, folder: str | Path, device: torch.device, timeout_s: float) -> None:
        """Meets the others; all ranks must do so at once.

        Args:
            folder: empty, the same one for all ranks; they find each other there.
            timeout_s: how long a rank waits for a silent one.

        Raises:
            PeerLost: not all came in time.
        """
        self.ranks, self.device = ranks, device
        self.traffic: dict[str, Traffic] = {}
        store = dist.FileStore(str(Path(folder) / "ranks"), ranks.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        self.everyone = self._meet(store, "everyone", ranks.rank, ranks.size, timeout_s)
        self.dcp = self._meet(store, f"context {ranks.rank // ranks.dcp_size}", ranks.dcp_rank, ranks.dcp_size, timeout_s)

    def _meet(self, store: dist.Store, name: str, rank: int, size: int, timeout_s: float) -> Communicator:
        backend = None
        if size > 1:
            try:
                backend = _backend(self.device, dist.PrefixStore(name, store), rank, size, timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise PeerLost(f"the ranks did not find each other ({_first_line(error)})") from error
        return Communicator(backend, rank, size, self.traffic)


def _backend(device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError("topology: this torch has no NCCL, by which ranks on GPUs talk; use device='cpu', or a CUDA build of torch")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # One machine's ranks talk by loopback, whatever its name resolves to; and nobody else can reach them.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
