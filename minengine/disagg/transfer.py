"""Moving rows with NIXL: one agent a worker, UCX underneath, main memory and GPU memory alike.

What NIXL 1.5 does that its callers must know: a transfer over shared memory is done by the call that starts it, which may take
seconds (other Python threads run meanwhile); releasing one under way frees its handle and stops nothing, so it is not done here;
`initialize_xfer` takes descriptors as they are, so neighbours are merged before (disagg/pieces.py); a notification may arrive
a little after "DONE".
"""
from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minengine.disagg.agents import Agent, Memory, Peer, PeerGone, Region, Report, Transfer, TransferError, pack, unpack
from minengine.disagg.pieces import Pieces
from minengine.load_nixl import NixlMissing, load_nixl

__all__ = ["TransferAgent", "open_agent"]

SETTLE_S = 0.1  # a dead peer's last bytes may lie in a socket of ours: until they are read or dropped its transfers count as under way


def open_agent(name: str, kind: str = "auto") -> Agent:
    """An agent of that kind: "nixl", "shm" (memory that the processes of one machine share), or "auto", NIXL where it works.

    Raises:
        TransferError: neither works, or not the one asked for; says why.
    """
    if kind not in ("auto", "nixl", "shm"):
        raise TransferError(f"agent kind '{kind}': use auto, nixl or shm")
    reason = "asked for"
    if kind != "shm":
        try:
            return TransferAgent(name)
        except TransferError as error:
            if kind == "nixl":
                raise
            reason = str(error)
    from minengine.disagg.shm import ShmAgent

    return ShmAgent(name, reason)


class TransferAgent(Memory):
    """A NIXL agent. Its lock is held while a transfer is started, so a long one delays other threads' calls.

    Args:
        name: unique among the agents that meet; one that is used again must be another process's end.

    Raises:
        TransferError: NIXL is not there, or it cannot start.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "nixl")
        try:
            nixl = load_nixl()
        except NixlMissing as error:
            raise TransferError(str(error)) from error
        self._born = secrets.token_hex(8)
        self._flying: set[Transfer] = set()
        try:
            self._nixl = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"], capture_telemetry=True))
        except Exception as error:  # pybind11 classes of many kinds, and RuntimeError
            raise TransferError(f"NIXL does not start here ({_said(error)})") from error
        if "UCX" not in self._nixl.backends:
            raise TransferError("NIXL does not start here (it has no UCX plugin)")

    def describe(self) -> str:
        return f"{self.name}: NIXL over UCX, {sum(r.nbytes for r, _ in self._storages.values()):,} bytes registered"

    # --- memory and peers ---

    def allocate(self, nbytes: int, device: str = "cpu") -> Tensor:
        """nbytes zeros, uint8, registered."""
        storage = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.register(storage)
        return storage

    def register(self, storage: Tensor) -> int:
        """Let peers read and write this memory, main or GPU. The first one registered is what `read` and `write` mean by default.

        Returns:
            the address of its first byte, which peers count from.
        """
        if not storage.is_contiguous() or not storage.nbytes:
            raise TransferError("only contiguous memory that is not empty can be registered")
        region = Region(storage.data_ptr(), storage.nbytes, str(storage.device))
        with self._lock:
            if region.address not in self._storages:
                with _sentences(f"register {region.nbytes} bytes on {region.device}"):
                    self._nixl.register_memory([(region.address, region.nbytes, _device_id(region), "")], _memory_type(region), backends=["UCX"])
                self._storages[region.address] = (region, storage)
        return region.address

    def metadata(self) -> bytes:
        with self._lock:
            with _sentences("describe this agent"):
                blob = self._nixl.get_agent_metadata()
            return pack(Peer(self.name, self.kind, self._born, tuple(region for region, _ in self._storages.values()), blob))

    def connect(self, metadata: bytes) -> str:
        """
        Returns:
            the peer's name.

        Raises:
            TransferError: bytes that are no metadata; a process of this name is connected already, with transfers under way.
        """
        peer = unpack(metadata, self.kind)
        with self._lock:
            known = self._peers.get(peer.name)
            if known == peer:
                return peer.name
            if known is not None and known.born != peer.born:
                self.disconnect(peer.name)
            with _sentences(f"connect to worker '{peer.name}'", peer.name):
                self._nixl.add_remote_agent(peer.blob)
            self._peers[peer.name] = peer
            return peer.name

    def disconnect(self, peer: str, dead: bool = False) -> None:
        """Forget a peer; one that is not known is no error.

        Args:
            dead: its process is known to have ended, so transfers under way fail (after a moment, see `poll`).

        Raises:
            TransferError: it may be alive, and transfers with it are under way: forgetting it would not stop it from writing.
        """
        with self._lock:
            if peer not in self._peers:
                return
            under_way = [transfer for transfer in self._flying if transfer.peer == peer and self.poll(transfer) == "PROC"]
            if under_way and not dead:
                raise TransferError(f"worker '{peer}' cannot be disconnected while {len(under_way)} transfers with it are under way")
            for transfer in under_way:
                self._fail(transfer, PeerGone(f"worker '{peer}' is gone"))
            del self._peers[peer]
            try:
                self._nixl.remove_remote_agent(peer)
            except Exception as error:
                logging.getLogger(__name__).debug("forgetting worker '%s': %s", peer, _said(error))

    # --- transfers ---

    def read(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"", merging: bool = False) -> Transfer:
        """Start to copy pieces of a peer's memory into ours: `pieces.src` counts from `address` there, `pieces.dst` from `local`'s start.

        Args:
            address: of registered memory of the peer's, which `register` returned there.
            local: a registered tensor, the first registered one by default.
            notify: reaches the peer after the data.
            merging: let NIXL merge neighbouring descriptors as well, in the order listed; for pieces made with merge=False.

        Raises:
            PeerGone: its process has ended.
            TransferError: memory that is not registered, pieces beyond it, an unknown peer.
        """
        return self._start("READ", peer, address, pieces, local, notify, merging)

    def write(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"", merging: bool = False) -> Transfer:
        """As `read`, the other way: `pieces.src` counts from `local`'s start, `pieces.dst` from `address` there."""
        return self._start("WRITE", peer, address, pieces, local, notify, merging)

    def poll(self, transfer: Transfer) -> str:
        """ "PROC", "DONE" or "ERR" with `transfer.error`. With "DONE" and "ERR" nobody touches its memory any more, so a failure is
        told only a moment after it was seen."""
        with self._lock:
            if transfer.state != "PROC":
                return transfer.state
            if transfer.error is None:
                try:
                    state = self._nixl.check_xfer_state(transfer.handle.xfer)
                except Exception as error:
                    self._fail(transfer, _sentence(error, f"{transfer.operation.lower()} {transfer.pieces.total_bytes} bytes", transfer.peer))
                else:
                    if state == "DONE":
                        self._done(transfer)
                    elif state == "ERR":
                        self._fail(transfer, TransferError(f"the transfer with worker '{transfer.peer}' failed, and NIXL does not say why"))
            elif monotonic() >= transfer.handle.settled_s:
                transfer.state = "ERR"
            return transfer.state

    def release(self, transfer: Transfer) -> bool:
        """Forget a transfer that has ended. False while it is under way: then its memory may still be written to."""
        with self._lock:
            if self.poll(transfer) == "PROC":
                return False
            self._flying.discard(transfer)
            handle, transfer.handle = transfer.handle, None
            if handle is not None:
                handle.free()
            return True

    def telemetry(self, transfer: Transfer) -> Report:
        """Counts and times; without descriptors and times until it is "DONE"."""
        return transfer.report or Report(transfer.pieces.asked, transfer.pieces.merged, None, transfer.pieces.total_bytes, None, None)

    def notify(self, peer: str, message: bytes) -> None:
        """
        Raises:
            PeerGone: its process has ended.
        """
        with self._lock:
            self._peer(peer)
            with _sentences("send a message", peer):
                self._nixl.send_notif(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) of all that have arrived since the last call; each peer's in its order. Peers need not be connected to."""
        with self._lock:
            with _sentences("receive messages"):
                arrived = self._nixl.get_new_notifs()
        return [(peer, message) for peer, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Transfers under way are left to the end of the process."""
        with self._lock:
            for transfer in list(self._flying):
                self.release(transfer)
            for peer in [] if self._flying else list(self._peers):
                self.disconnect(peer)

    def _start(self, operation: str, peer: str, address: int, pieces: Pieces, local: Tensor | None, notify: bytes, merging: bool) -> Transfer:
        with self._lock:
            transfer = Transfer(peer, operation, pieces)
            ours, theirs, here, there = self._sides(operation, peer, address, pieces, local)
            if not pieces.merged:
                if notify:
                    self.notify(peer, notify)
                transfer.state, transfer.report = "DONE", Report(pieces.asked, 0, 0, 0, 0.0, 0.0)
                return transfer
            handle = _Handle(self._nixl)
            sides = [(_descriptors(region, at, pieces), _memory_type(region)) for region, at in ((ours, here), (theirs, there))]
            try:
                with _sentences(f"{operation.lower()} {pieces.total_bytes} bytes", peer):
                    handle.make(operation, sides, peer, notify, merging)
                    state = self._nixl.transfer(handle.xfer)
            except TransferError:
                handle.free()
                raise
            transfer.handle = handle
            self._flying.add(transfer)
            if state == "DONE":
                self._done(transfer)
            elif state == "ERR":
                self._fail(transfer, TransferError(f"the transfer with worker '{peer}' failed, and NIXL does not say why"))
            return transfer

    def _done(self, transfer: Transfer) -> None:
        transfer.state = "DONE"
        told = self._nixl.get_xfer_telemetry(transfer.handle.xfer)
        transfer.report = Report(transfer.pieces.asked, transfer.pieces.merged, told.descCount, told.totalBytes, told.postDuration / 1e6, told.xferDuration / 1e6)

    def _fail(self, transfer: Transfer, error: TransferError) -> None:
        transfer.error = error
        transfer.handle.settled_s = monotonic() + SETTLE_S


class _Handle:
    """NIXL's handles of one transfer."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self.xfer: Any = None
        self.settled_s = 0.0
        self._lists: list[Any] = []

    def make(self, operation: str, sides: list[tuple[np.ndarray, str]], peer: str, notify: bytes, merging: bool) -> None:
        """sides: ours, theirs."""
        if not merging:
            ours, theirs = (self._nixl.get_xfer_descs(*side) for side in sides)
            self.xfer = self._nixl.initialize_xfer(operation, ours, theirs, peer, notify)
            return
        for agent, side in zip(("NIXL_INIT_AGENT", peer), sides):
            self._lists.append(self._nixl.prep_xfer_dlist(agent, *side))
        every = np.arange(len(sides[0][0]), dtype=np.int32)
        self.xfer = self._nixl.make_prepped_xfer(operation, self._lists[0], every, self._lists[1], every, notify)

    def free(self) -> None:
        for handle in (self.xfer, *self._lists):
            if handle is not None:
                try:
                    handle.release()
                except Exception as error:  # NIXL keeps what it cannot free until the agent ends
                    logging.getLogger(__name__).debug("a NIXL handle stays: %s", _said(error))
        self.xfer, self._lists = None, []


def _descriptors(region: Region, offsets: np.ndarray, pieces: Pieces) -> np.ndarray:
    """(n, 3) uint64: address, bytes, device."""
    table = np.empty((pieces.merged, 3), np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = offsets + region.address, pieces.nbytes, _device_id(region)
    return table


def _memory_type(region: Region) -> str:
    return "VRAM" if region.device.startswith("cuda") else "DRAM"


def _device_id(region: Region) -> int:
    return torch.device(region.device).index or 0


# --- NIXL's errors ---

@contextmanager
def _sentences(what: str, peer: str | None = None) -> Iterator[None]:
    """Turn what NIXL raises into a TransferError."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise _sentence(error, what, peer) from error


def _sentence(error: Exception, what: str, peer: str | None) -> TransferError:
    whom = f" (worker '{peer}')" if peer else ""
    match type(error).__name__:
        case "nixlRemoteDisconnectError":
            return PeerGone(f"worker '{peer}' is gone: could not {what}")
        case "nixlNotFoundError":
            return TransferError(f"could not {what}{whom}: NIXL does not know this memory or this worker; register it and exchange metadata again")
        case _:
            return TransferError(f"could not {what}{whom}: NIXL says {_said(error)}")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
