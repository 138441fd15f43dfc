"""Places for blocks outside the device: host memory and disk, shared by all processes of a machine, checked on every read.

A tier holds what `TierFolder` keeps: in a folder of shared memory it is the host tier, in any other the disk tier. A file is

    0     magic, the block's hash, the tag of its geometry and model, the number of bytes, CRC-32 of all these and the bytes
    4096  the block's canonical bytes (`kv/tier_blocks.py`)

All but the checksum is known to whoever asks for the block, so a file that was cut short, mixed up, flipped a bit or belongs to another model
differs from what it must be: a miss, and the file goes. `Tier` is synchronous; `TierStack` (tier_stack.py) works beside the step loop.
"""
from __future__ import annotations

import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Sequence

import numpy as np

from minengine.kv.events import EventLog
from minengine.kv.tier_blocks import Geometry
from minengine.kv.tier_files import Busy, TierFolder
from minengine.kv.tier_io import FileIO, PlainIO, open_io

__all__ = ["HEADER_BYTES", "Found", "Tier", "TierCounts", "stamp_now"]

HEADER_BYTES = 4096  # a page: the bytes behind it are aligned as direct reads want them, and a file takes no more pages than without
MAGIC = b"minekv\x00\x01"
_KNOWN = struct.Struct("<8s32s32sQ")  # magic, hash, tag, bytes
_CHECK = struct.Struct("<I")


# CRC-32 as zlib has it: the one checksum of Python's own library that is faster than shared memory is copied with its checks (3.3 GB/s on the machine
# where SHA-256 makes 1.4, BLAKE2b 0.7), and it lets the other threads run meanwhile. It finds every flipped bit, every pair of them and
# every run of up to 32, for certain; pages that are swapped, stale or zero it misses once in 4 billion. It is no seal against
# whoever may write the folder: that is this user alone.
def checksum(known: bytes, data: np.ndarray) -> int:
    return zlib.crc32(data, zlib.crc32(known))


def stamp_now() -> int:
    """Nanoseconds of the wall clock: the only one that means the same after a restart."""
    return time.time_ns()


@dataclass
class TierCounts:
    """What has happened in this process since it began, in blocks."""

    stored: int = 0
    loaded: int = 0
    missing: int = 0  # asked for and not there (any more)
    corrupt: int = 0  # there, and not what it must be
    evicted: int = 0  # by this process
    refused: int = 0  # not stored: no room, the lock busy, the file system full
    stored_bytes: int = 0
    loaded_bytes: int = 0


@dataclass(eq=False)
class Found:
    """A block's file, open: its data stays whatever happens to its name."""

    h: bytes
    fd: int
    tier: Tier

    def prefetch(self) -> None:
        """Have the kernel read the file ahead, as far as it is not in memory."""
        if self.tier.medium == "disk" and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(eq=False)
class Tier:
    """Blocks of one geometry in one folder. Any thread may call it; every call may wait for the file system.

    Raises:
        ConfigError: the folder cannot be used.
        RuntimeError: `io="nixl"` and NIXL is not here.
    """

    path: str | os.PathLike[str]
    geometry: Geometry
    capacity_bytes: int
    medium: str = "host"  # or "disk"
    io: str | FileIO = "auto"  # auto: NIXL's POSIX backend for the disk where it is there; host memory needs no transfer engine
    events: EventLog | None = None
    counts: TierCounts = field(default_factory=TierCounts)
    last_refusal: str = ""  # why a block was last not stored

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self.nbytes, self._tag = self.geometry.nbytes, self.geometry.tag
        if isinstance(self.io, str):
            self.io = PlainIO() if self.medium == "host" and self.io == "auto" else open_io(self.io)
        self.folder = TierFolder(self.path, self.capacity_bytes, self.geometry, HEADER_BYTES + self.nbytes)

    # --- finding ---------------------------------------------------------------------------------------------

    def has(self, h: bytes) -> bool:
        return self.folder.has(h)

    def contains(self, hashes: Iterable[bytes]) -> int:
        """How many leading blocks are here; a look at names, so reading one may still fail."""
        n = 0
        for h in hashes:
            if not self.folder.has(h):
                break
            n += 1
        return n

    def touch(self, h: bytes, stamp_ns: int) -> bool:
        return self.folder.touch(h, stamp_ns)

    def open(self, h: bytes) -> Found | None:
        fd = self.folder.open(h)
        return None if fd is None else Found(h, fd, self)

    # --- loading ---------------------------------------------------------------------------------------------

    def load_into(self, h: bytes, dst: np.ndarray) -> bool:
        """Fill `dst` (nbytes,) uint8 with a block; False: a miss, and `dst` holds anything."""
        found = self.open(h)
        if found is None:
            self.counts.missing += 1
            return False
        try:
            return self.read([found], [dst]) == 1
        finally:
            found.close()

    def read(self, found: Sequence[Found], dst: Sequence[np.ndarray]) -> int:
        """Fill arrays from open files in one transfer: how many leading ones are right."""
        whole = 0
        while whole < len(found) and os.fstat(found[whole].fd).st_size == HEADER_BYTES + self.nbytes:
            whole += 1
        pieces = [(one.fd, HEADER_BYTES, data) for one, data in zip(found[:whole], dst)]
        try:
            self.io.read(pieces)
            together = True
        except OSError:
            together = False  # one of them; each by itself says which
        for i, (one, piece) in enumerate(zip(found, [*pieces, None])):
            if piece is None or not self._right(one, piece, together):
                self.counts.corrupt += 1
                if self.folder.discard(one.h, one.fd) and self.events is not None:
                    self.events.removed(one.h, self.medium)
                return i
            self.counts.loaded += 1
            self.counts.loaded_bytes += self.nbytes
        return len(pieces)

    def _right(self, one: Found, piece: tuple[int, int, np.ndarray], is_read: bool) -> bool:
        try:
            if not is_read:
                PlainIO().read([piece])
            head = os.pread(one.fd, _KNOWN.size + _CHECK.size, 0)
        except OSError:
            return False
        known = self._known(one.h)
        return head == known + _CHECK.pack(checksum(known, piece[2]))

    # --- storing ---------------------------------------------------------------------------------------------

    def store_from(self, h: bytes, src: np.ndarray, parent: bytes | None = None, stamp_ns: int | None = None) -> bool:
        """Keep a block, `src` (nbytes,) uint8: True if it is here afterwards."""
        known = self._known(h)
        head = np.zeros(HEADER_BYTES, dtype=np.uint8)
        head[: _KNOWN.size + _CHECK.size] = np.frombuffer(known + _CHECK.pack(checksum(known, src)), dtype=np.uint8)
        return self._store(h, lambda fd: self.io.write([(fd, 0, head), (fd, HEADER_BYTES, src)]), parent, stamp_ns)

    def copy_from(self, found: Found, parent: bytes | None = None, stamp_ns: int | None = None) -> bool:
        """Keep a block that another tier holds: its file as it is, to be checked when it is read."""
        data = np.empty(HEADER_BYTES + self.nbytes, dtype=np.uint8)
        try:
            PlainIO().read([(found.fd, 0, data)])
        except OSError:
            return False
        return self._store(found.h, lambda fd: self.io.write([(fd, 0, data)]), parent, stamp_ns)

    def _store(self, h: bytes, fill: Callable[[int], None], parent: bytes | None, stamp_ns: int | None) -> bool:
        stamp_ns = stamp_now() if stamp_ns is None else stamp_ns
        return self.touch(h, stamp_ns) or self._write(h, fill, parent, stamp_ns, may_shed=True)

    def _write(self, h: bytes, fill: Callable[[int], None], parent: bytes | None, stamp_ns: int, may_shed: bool) -> bool:
        slot = None
        try:
            slot, evicted = self.folder.reserve()
            self._went(evicted)
            if slot is None:
                self.counts.refused += 1
                self.last_refusal = f"{self.path}: all of its {self.capacity_bytes} bytes are being written"
                return False
            fill(slot.fd)
            written, slot = slot, None
            self.folder.commit(written, h, stamp_ns)
        except (OSError, Busy) as error:  # a full disk, a folder that cannot be made again: a cache can do without
            if slot is not None:
                self.folder.abort(slot)
            if may_shed and self._shed():
                return self._write(h, fill, parent, stamp_ns, may_shed=False)
            self.counts.refused += 1
            self.last_refusal = f"{self.path}: {error}"
            return False
        self.counts.stored += 1
        self.counts.stored_bytes += self.nbytes
        if self.events is not None:
            self.events.stored(h, parent, self.medium)
        return True

    def _shed(self) -> bool:
        """Where others have taken the room that this tier may use, what it has gives way to what is new; False: that is not the trouble."""
        try:
            gone = self.folder.shed() if self.folder.is_full else []
        except (OSError, Busy):
            return False
        self._went(gone)
        return bool(gone)

    def _went(self, evicted: Sequence[bytes]) -> None:
        self.counts.evicted += len(evicted)
        if self.events is not None:
            for h in evicted:
                self.events.removed(h, self.medium)

    def close(self) -> None:
        self.folder.close()

    def _known(self, h: bytes) -> bytes:
        return _KNOWN.pack(MAGIC, h, self._tag, self.nbytes)
