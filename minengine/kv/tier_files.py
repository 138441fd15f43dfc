"""A folder of blocks that all processes of a machine share: one file a block, found by its name, and nothing else to keep consistent.

    <64 hex digits: the block's hash>-<16: geometry and model>.kv      a finished block; its modification time is its last use
    tmp-<random>                                                       a block being written; the writer holds a lock on it
    .lock                                                              held while room is made; holds the number of bytes in use

The file system is the index, so a process may be killed at any byte: a file gets its name only when it is whole, and a temporary file whose writer
is gone has lost its lock, by which the next process that makes room knows that it can go. Room is taken before a byte is written, by giving the
temporary file its final size under `.lock`: the folder never holds more than its capacity. The number in `.lock` may be too high after a kill, never
too low; before anything is evicted the files are counted again.

An open file keeps its data when its name is taken away: a reader has what it has opened, whatever is evicted meanwhile.
"""
from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, NamedTuple

from minengine.config import ConfigError
from minengine.kv.tier_blocks import Geometry

__all__ = ["Busy", "Slot", "TierFolder"]

FINISHED = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})\.kv")
TEMPORARY = re.compile(r"tmp-[0-9a-f]{32}")
LOCK_WAIT_S = 0.5  # a stopped process may hold the lock for ever; whoever waits longer goes without,
BUSY_FOR_S = 5.0  # and does not wait at all for this long: the next block would wait in vain, and a load behind it
SLACK = 32  # what is evicted at once, as a part of the capacity: counting 100,000 files takes as long as writing some hundred


class Busy(RuntimeError):
    """Another process has held the folder's lock for too long."""


class Slot(NamedTuple):
    """Room taken for one block: a temporary file, open and locked."""

    fd: int
    path: str
    nbytes: int


class TierFolder:
    """One process's view of the folder, for blocks of one geometry. Any thread may call it."""

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int, geometry: Geometry, file_bytes: int) -> None:
        """`file_bytes`: the size of every finished file of this geometry.

        Raises:
            ConfigError: the folder cannot be made, is not this user's alone, or cannot hold a single block.
        """
        self.path = Path(path).absolute()
        self.capacity_bytes, self.file_bytes = capacity_bytes, file_bytes
        self._suffix = f"-{geometry.tag.hex()[:16]}.kv"
        if capacity_bytes < file_bytes:
            raise ConfigError(f"{self.path}: a capacity of {capacity_bytes} bytes holds no block of {file_bytes}; give more")
        self._lock_fd = -1
        self._open_folder()
        space = os.statvfs(self.path)
        if capacity_bytes > space.f_blocks * space.f_frsize:
            raise ConfigError(f"{self.path}: a capacity of {capacity_bytes} bytes is more than its file system of {space.f_blocks * space.f_frsize}; "
                              "give less, or choose another tier_path")
        self._mutex = threading.Lock()  # flock knows open files, not threads
        self._busy_until_s = 0.0
        try:
            with self._locked():
                self._count()
        except Busy:
            pass  # somebody else counts

    def _open_folder(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.path.lstat()
            # In a place where anyone may make folders (such as /tmp) another user could have made this one first.
            if not self.path.is_dir() or self.path.is_symlink() or facts.st_uid != os.geteuid():
                raise ConfigError(f"{self.path}: is not a folder of this user; choose another tier_path")
            if facts.st_mode & 0o077:
                raise ConfigError(f"{self.path}: other users may enter it (mode {facts.st_mode & 0o777:o}), and a cache holds what its users wrote; "
                                  "run chmod 700 on it, or choose another tier_path")
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be used for a tier ({error.strerror}); choose another tier_path") from error
        if self._lock_fd >= 0:
            self._close()
        self._lock_fd, self._close = fd, weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        with self._mutex:
            self._close()
            self._lock_fd = -1

    # --- finding ---------------------------------------------------------------------------------------------

    def name(self, h: bytes) -> str:
        return f"{self.path}/{h.hex()}{self._suffix}"

    def has(self, h: bytes) -> bool:
        try:
            os.stat(self.name(h))
            return True
        except OSError:
            return False

    def touch(self, h: bytes, stamp_ns: int) -> bool:
        """Set a block's last use; False if it is not here."""
        try:
            os.utime(self.name(h), ns=(stamp_ns, stamp_ns))
            return True
        except OSError:
            return False

    def open(self, h: bytes) -> int | None:
        """A finished file, or None. The caller closes it."""
        try:
            return os.open(self.name(h), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def hashes(self) -> list[bytes]:
        """All blocks of this geometry, in no order."""
        names = (FINISHED.fullmatch(name) for name in os.listdir(self.path))
        return [bytes.fromhex(found[1]) for found in names if found and found[0].endswith(self._suffix)]

    # --- storing ---------------------------------------------------------------------------------------------

    def reserve(self) -> tuple[Slot | None, list[bytes]]:
        """Make room for one block: (None if there is none: all is being written, and what was evicted for it).

        Raises:
            Busy: see there.
            OSError: the file system refuses.
        """
        with self._locked():
            evicted: list[bytes] = []
            if not self._make_room(evicted):
                return None, evicted
            # Counted before it is there: a kill between the two leaves the number too high, not too low.
            self._set_used((self._used() or 0) + self.file_bytes)
            path = f"{self.path}/tmp-{secrets.token_hex(16)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.ftruncate(fd, self.file_bytes)
            except BaseException:
                os.close(fd)
                os.unlink(path)
                raise
            return Slot(fd, path, self.file_bytes), evicted

    @property
    def is_full(self) -> bool:
        """The file system has no room for one more block, whatever the tier may still use."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize < self.file_bytes

    def shed(self) -> list[bytes]:
        """Evict as much as one block needs, whatever the tier may still use; returns what went."""
        evicted: list[bytes] = []
        with self._locked():
            used = self._count()
            self._evict(used, used - self.file_bytes, evicted)
        return evicted

    def commit(self, slot: Slot, h: bytes, stamp_ns: int) -> None:
        """The block is whole: give it its name, unless another process was faster.

        Raises:
            Busy: see there; the room is given back.
        """
        try:
            # Under the lock, as every change of a name: a count that runs beside it could see the file under neither.
            with self._locked():
                if self.touch(h, stamp_ns):
                    self._remove(slot.path, slot.nbytes)
                else:
                    os.utime(slot.fd, ns=(stamp_ns, stamp_ns))
                    os.rename(slot.path, self.name(h))
        finally:
            os.close(slot.fd)  # after a Busy the file is nobody's, and goes at the next count

    def abort(self, slot: Slot) -> None:
        """Give the room back."""
        try:
            with self._locked():
                self._remove(slot.path, slot.nbytes)
        except (OSError, Busy):
            pass
        finally:
            os.close(slot.fd)

    def discard(self, h: bytes, fd: int) -> bool:
        """Take away a file that is not what its name says, unless another has taken its place meanwhile."""
        try:
            with self._locked():
                there, ours = os.stat(self.name(h)), os.fstat(fd)
                if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                    return False
                self._remove(self.name(h), ours.st_size)
                return True
        except (OSError, Busy):
            return False

    def clear(self) -> None:
        """Take away every finished block, of every geometry."""
        with self._locked():
            for entry in self._finished():
                _unlink(entry.path)
            self._count()

    @property
    def used_bytes(self) -> int:
        """Bytes in use, those being written included; after a kill perhaps too many, until the next count."""
        return self._used() or 0

    # --- under the lock --------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        start = time.monotonic()
        deadline = start if start < self._busy_until_s else start + LOCK_WAIT_S
        if not self._mutex.acquire(timeout=LOCK_WAIT_S):
            raise Busy(f"{self.path}: another thread has held the lock for {LOCK_WAIT_S} s")
        try:
            while True:
                try:
                    fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        if deadline > start:
                            self._busy_until_s = deadline + BUSY_FOR_S
                        raise Busy(f"{self.path}: another process has held the lock for {LOCK_WAIT_S} s") from None
                    time.sleep(0.001)
                    continue
                if self._is_the_lock():
                    break
                try:
                    self._open_folder()  # somebody has cleaned up: begin anew, with the lock that all others will take
                except ConfigError as error:
                    raise OSError(str(error)) from error
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _is_the_lock(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock_fd), os.stat(self.path / ".lock"))
        except OSError:
            return False

    def _used(self) -> int | None:
        stored = os.pread(self._lock_fd, 8, 0)
        return struct.unpack("<Q", stored)[0] if len(stored) == 8 else None

    def _set_used(self, nbytes: int) -> None:
        os.pwrite(self._lock_fd, struct.pack("<Q", nbytes), 0)

    def _remove(self, path: str, nbytes: int) -> None:
        os.unlink(path)
        self._set_used(max(0, (self._used() or 0) - nbytes))

    def _finished(self) -> list[os.DirEntry[str]]:
        return [entry for entry in os.scandir(self.path) if FINISHED.fullmatch(entry.name)]

    def _count(self) -> int:
        """Count the bytes in use anew; temporary files that nobody writes any more go."""
        used = 0
        for entry in os.scandir(self.path):
            if TEMPORARY.fullmatch(entry.name) and _abandoned(entry.path):
                _unlink(entry.path)
            elif FINISHED.fullmatch(entry.name) or TEMPORARY.fullmatch(entry.name):
                used += _size(entry)
        self._set_used(used)
        return used

    def _make_room(self, evicted: list[bytes]) -> bool:
        """Evict until one more file fits."""
        need, used = self.file_bytes, self._used()
        if used is not None and used + need <= self.capacity_bytes:
            return True
        used = self._count()
        if used + need <= self.capacity_bytes:
            return True
        used = self._evict(used, self.capacity_bytes - need - self.capacity_bytes // SLACK // need * need, evicted)
        return used + need <= self.capacity_bytes

    def _evict(self, used: int, goal: int, evicted: list[bytes]) -> int:
        """What was used least recently goes, of any geometry, until no more than `goal` of `used` bytes are left; returns how many are."""
        files = []
        for entry in self._finished():
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            files.append((facts.st_mtime_ns, entry.name, facts.st_size))
        for _, name, size in sorted(files):
            if used <= goal:
                break
            if _unlink(f"{self.path}/{name}"):
                used -= size
                if name.endswith(self._suffix):
                    evicted.append(bytes.fromhex(name[:64]))
        self._set_used(used)
        return used


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # gone meanwhile
        return 0


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
        return True
    except OSError:
        return False


def _abandoned(path: str) -> bool:
    """Whether nobody holds the lock of a temporary file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
