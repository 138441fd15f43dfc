"""What every transfer agent has in common: its face, its errors, the memory it knows, and what peers tell each other to connect.

    allocate / register     memory that peers may read and write; allocate where you can, an agent may need memory of its own kind
    metadata -> connect     bytes that say who I am and which memory I have; given to a peer by whatever way there is
    read, write             start a transfer of many pieces; `poll` it until it is "DONE" or "ERR", then `release` it
    notify, notifications   small messages beside the data; one given to `read` or `write` arrives after the data, a little later than "DONE"

While a transfer is "PROC", somebody may write into its memory; after "DONE" and "ERR" nobody does. There is no way to stop one: a
peer that stands still may answer minutes later, so the memory has to wait until it does or is known to be dead (`disconnect(peer, dead=True)`).
"""
from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from minengine.disagg.pieces import Pieces

__all__ = ["Agent", "Memory", "PeerGone", "Peer", "Region", "Report", "Transfer", "TransferError", "pack", "unpack", "wait"]


class TransferError(RuntimeError):
    """A transfer, a message or an agent failed; one sentence says what and why."""


class PeerGone(TransferError):
    """The peer's process has ended or cannot be reached any more."""


@dataclass(frozen=True)
class Report:
    """What a transfer was."""

    asked: int  # pieces before neighbours were merged
    merged: int  # pieces handed to the agent
    descriptors: int | None  # pieces as the transfer engine counts them itself; None until it is done, and where it does not count
    nbytes: int
    post_s: float | None  # of `seconds`, until the call that started it came back
    seconds: float | None  # by the transfer engine's clock where it has one, else by ours


@dataclass(eq=False)
class Transfer:
    """One read or write under way; `state` is what `poll` found last."""

    peer: str
    operation: str  # "READ" or "WRITE"
    pieces: Pieces
    state: str = "PROC"
    error: TransferError | None = None  # with "ERR"
    report: Report | None = None
    handle: Any = field(default=None, repr=False)  # the agent's own


@dataclass(frozen=True)
class Region:
    """A stretch of registered memory."""

    address: int
    nbytes: int
    device: str  # "cpu" or "cuda:0"
    place: str = ""  # for an agent that reaches memory by name: a file


@dataclass(frozen=True)
class Peer:
    """What a peer's metadata says."""

    name: str
    kind: str  # "nixl" or "shm"
    born: str  # differs between two processes of one name
    regions: tuple[Region, ...]
    blob: bytes  # the transfer engine's own part


class Agent(Protocol):
    """The face. Every method may be called from any thread, and raises TransferError where something fails."""

    name: str
    kind: str

    def describe(self) -> str: ...  # one line: which agent, and why this one
    def allocate(self, nbytes: int, device: str = "cpu") -> Tensor: ...  # zeroed uint8, registered
    def register(self, storage: Tensor) -> int: ...  # -> address of its first byte
    def metadata(self) -> bytes: ...  # of all memory registered so far
    def connect(self, metadata: bytes) -> str: ...  # -> the peer's name; again with newer metadata brings its newer memory
    def disconnect(self, peer: str, dead: bool = False) -> None: ...
    def read(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"") -> Transfer: ...
    def write(self, peer: str, address: int, pieces: Pieces, *, local: Tensor | None = None, notify: bytes = b"") -> Transfer: ...
    def poll(self, transfer: Transfer) -> str: ...  # "PROC", "DONE" or "ERR"
    def release(self, transfer: Transfer) -> bool: ...  # False: its memory may still be written to, so try again later
    def telemetry(self, transfer: Transfer) -> Report: ...
    def notify(self, peer: str, message: bytes) -> None: ...
    def notifications(self) -> list[tuple[str, bytes]]: ...
    def close(self) -> None: ...


class Memory:
    """An agent's own registered memory and its peers': what both agents check before a byte moves."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self._lock = threading.RLock()
        self._storages: dict[int, tuple[Region, Tensor]] = {}  # by address, in order of registration
        self._peers: dict[str, Peer] = {}

    def _local(self, storage: Tensor | None) -> Region:
        """The region of that tensor; of the first one registered by default."""
        if storage is None:
            found = next(iter(self._storages.values()), None)
        else:
            found = self._storages.get(storage.data_ptr())
        if found is None:
            raise TransferError("this memory is not registered here: register it, or allocate it with the agent")
        return found[0]

    def _remote(self, peer: str, address: int, reach: int) -> tuple[Region, int]:
        """The peer's region that holds bytes address ... address+reach-1, and where in it they begin."""
        for region in self._peer(peer).regions:
            if region.address <= address and address + reach <= region.address + region.nbytes:
                return region, address - region.address
        raise TransferError(f"worker '{peer}' has registered no memory that holds {reach} bytes at {address:#x}: its metadata is older than "
                            "the memory, or the pieces reach beyond it")

    def _peer(self, peer: str) -> Peer:
        if peer not in self._peers:
            raise TransferError(f"worker '{peer}' is not connected: connect to it with its metadata first")
        return self._peers[peer]

    def _sides(self, operation: str, peer: str, address: int, pieces: Pieces, local: Tensor | None) -> tuple[Region, Region, Any, Any]:
        """(local region, remote region, offsets in each) of a transfer, with all pieces known to lie inside."""
        here, there = (pieces.dst, pieces.src) if operation == "READ" else (pieces.src, pieces.dst)
        reach = [int((side + pieces.nbytes).max(initial=0)) for side in (here, there)]
        if pieces.merged and min(here.min(), there.min()) < 0:
            raise TransferError("a piece begins before the memory it is counted from")
        ours = self._local(local)
        if reach[0] > ours.nbytes:
            raise TransferError(f"the pieces reach byte {reach[0]} of {ours.nbytes} that are registered here")
        theirs, start = self._remote(peer, address, reach[1])
        return ours, theirs, here, there + np.int64(start)


def pack(peer: Peer) -> bytes:
    """A line of JSON, then the transfer engine's own bytes."""
    head = {"name": peer.name, "kind": peer.kind, "born": peer.born, "regions": [[r.address, r.nbytes, r.device, r.place] for r in peer.regions]}
    return json.dumps(head).encode() + b"\n" + peer.blob


def unpack(metadata: bytes, kind: str) -> Peer:
    """
    Raises:
        TransferError: it is no metadata, or of another kind of agent.
    """
    try:
        head, blob = metadata.split(b"\n", 1)
        given = json.loads(head)
        peer = Peer(given["name"], given["kind"], given["born"], tuple(Region(*region) for region in given["regions"]), blob)
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError("these bytes are no agent's metadata") from error
    if peer.kind != kind:
        raise TransferError(f"worker '{peer.name}' moves its cache by {peer.kind} and this one by {kind}: give both the same")
    return peer


def wait(agent: Agent, transfers: Transfer | Sequence[Transfer], timeout_s: float) -> str:
    """Poll until all of them are "DONE" or one is "ERR", which is returned; "PROC" once the time is over."""
    transfers = [transfers] if isinstance(transfers, Transfer) else list(transfers)
    until, pause = monotonic() + timeout_s, 2e-5
    while True:
        states = [agent.poll(transfer) for transfer in transfers]
        if "ERR" in states:
            return "ERR"
        if "PROC" not in states or monotonic() >= until:
            return "PROC" if "PROC" in states else "DONE"
        sleep(pause)
        pause = min(2 * pause, 1e-3)
