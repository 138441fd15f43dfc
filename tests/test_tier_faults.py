"""Tiers under what goes wrong: processes killed at any call, files damaged at any byte, several processes at once. Never a wrong answer, never too many bytes."""
import os
import random
import signal
import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minengine.kv import tier_files
from minengine.kv.tier import HEADER_BYTES, Tier
from minengine.kv.tier_blocks import Geometry

GEOMETRY = Geometry(num_layers=2, num_heads=1, block_size=16, row_bytes=256, num_indexer_layers=0, indexer_bytes=0, kv_cache_dtype="bfloat16", fingerprint="m")
FILE = HEADER_BYTES + GEOMETRY.nbytes  # three pages
HEADER_USED = 84  # magic 8, hash 32, tag 32, length 8, checksum 4


def h(i):
    return struct.pack(">Q", i) * 4


def data(i):
    return np.random.default_rng(i).integers(0, 256, GEOMETRY.nbytes, dtype=np.uint8)


def tier(path, blocks=10):
    return Tier(path, GEOMETRY, blocks * FILE, io="plain")


def right(one, i):
    """Whether block i is here; never wrong."""
    out = np.zeros(GEOMETRY.nbytes, dtype=np.uint8)
    if not one.load_into(h(i), out):
        return False
    assert np.array_equal(out, data(i)), f"block {i} came back wrong"
    return True


def bytes_there(one):
    """What the folder holds, counted while nobody changes it."""
    with one.folder._locked():
        return sum(entry.stat().st_size for entry in os.scandir(one.path) if entry.name != ".lock")


def in_child(work):
    """Run `work` in a process of its own, which the test's own end does not run in."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


# --- processes that end ---------------------------------------------------------------------------------------

CHANGES = ("open", "ftruncate", "pwrite", "pwritev", "rename", "unlink", "utime", "close")


def store_until_killed(path, call, before):
    """Store blocks 0 to 2 where two fit; the process kills itself right before or after its call number `call` that changes anything."""
    calls = 0

    def counted(real):
        def run(*args, **options):
            nonlocal calls
            calls += 1
            last = calls == call
            if last and before:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **options)
            finally:
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return run

    def work():
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        one = tier(path, 2)
        for i in range(3):
            assert one.store_from(h(i), data(i), stamp_ns=i)

    return in_child(work)


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_at_any_call_leaves_what_is_whole(tmp_path, before):
    killed = 0
    for call in range(1, 1000):
        path = tmp_path / str(call)
        _, status = os.waitpid(store_until_killed(path, call, before), 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        killed += 1
        if not path.is_dir():
            continue
        used = (path / ".lock").read_bytes() if (path / ".lock").exists() else b""
        there = sum(entry.stat().st_size for entry in os.scandir(path) if entry.name != ".lock")
        assert there <= 2 * FILE
        assert len(used) < 8 or struct.unpack("<Q", used)[0] >= there, "the number of bytes may be too high, not too low"
        one = tier(path, 2)
        assert not [name for name in os.listdir(path) if name.startswith("tmp-")], "what the dead process was writing is swept"
        assert one.folder.used_bytes == bytes_there(one)
        found = [i for i in range(3) if right(one, i)]
        assert found == list(range(min(found, default=0), min(found, default=0) + len(found))), "blocks come whole and in order, and go from the oldest"
        assert one.counts.corrupt == 0, "a block has its name only when it is whole"
        for i in range(10, 13):
            assert one.store_from(h(i), data(i)) and right(one, i)
        assert bytes_there(one) <= 2 * FILE
        one.close()
    else:
        raise AssertionError("the child never came to its end")
    assert killed > 25


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_from_outside_at_a_random_moment(tmp_path, seed):
    rng = random.Random(seed)
    reader, writer = os.pipe()

    def work():
        one = tier(tmp_path / "t")
        for i in range(10**6):
            one.store_from(h(i), data(i))
            os.write(writer, b".")

    pid = in_child(work)
    os.close(writer)
    for _ in range(rng.randrange(1, 40)):
        assert os.read(reader, 1) == b"."
    for _ in range(rng.randrange(20000)):  # somewhere in the next block
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    one = tier(tmp_path / "t")
    stored = sorted(int.from_bytes(found[:8], "big") for found in one.folder.hashes())
    assert stored and all(right(one, i) for i in stored) and one.counts.corrupt == 0
    assert one.folder.used_bytes == bytes_there(one) <= 10 * FILE


def test_a_stopped_process_with_the_lock_costs_the_others_stores_and_no_load(tmp_path, monkeypatch):
    one = tier(tmp_path / "t")
    assert one.store_from(h(0), data(0))
    ready, go = os.pipe()

    def work():
        other = tier(tmp_path / "t")
        with other.folder._locked():
            os.write(go, b".")
            os.kill(os.getpid(), signal.SIGSTOP)

    pid = in_child(work)
    try:
        assert os.read(ready, 1) == b"."
        os.waitpid(pid, os.WUNTRACED)
        monkeypatch.setattr(tier_files, "LOCK_WAIT_S", 0.01)
        waits = []
        monkeypatch.setattr(tier_files.time, "sleep", lambda s: waits.append(s))
        assert not one.store_from(h(1), data(1)) and one.counts.refused == 1 and waits
        waits.clear()
        assert not one.store_from(h(1), data(1)) and one.counts.refused == 2 and not waits, "the second one does not wait again"
        assert right(one, 0)
        second = tier(tmp_path / "t")  # a worker that starts meanwhile
        assert right(second, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (ready, go):
            os.close(fd)
    assert one.store_from(h(1), data(1)) and right(second, 1)


def test_processes_that_store_and_evict_at_once_never_exceed_the_room(tmp_path):
    def worker(seed):
        def work():
            rng, one = random.Random(seed), tier(tmp_path / "t", 7)
            for _ in range(150):
                i = rng.randrange(30)
                if rng.random() < 0.6:
                    one.store_from(h(i), data(i))
                else:
                    right(one, i)
            assert one.counts.corrupt == 0 and one.counts.evicted and one.counts.loaded

        return work

    watch = tier(tmp_path / "t", 7)
    pids = {in_child(worker(seed)) for seed in range(3)}
    codes, samples = [], 0
    try:
        while pids:
            assert bytes_there(watch) <= 7 * FILE
            samples += 1
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    pids.remove(pid)
                    codes.append(os.waitstatus_to_exitcode(status))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert codes == [0, 0, 0] and samples > 3
    assert watch.folder.used_bytes == bytes_there(watch) <= 7 * FILE
    assert not [name for name in os.listdir(tmp_path / "t") if name.startswith("tmp-")]
    assert len(watch.folder.hashes()) == 7


def test_a_full_file_system_is_a_block_that_is_not_stored(tmp_path):
    one = tier(tmp_path / "t")

    class Full:
        name, batch = "full", 1

        def write(self, pieces):
            raise OSError(28, "No space left on device")

    one.io, io = Full(), one.io
    assert not one.store_from(h(0), data(0)) and one.counts.refused == 1 and "No space left" in one.last_refusal
    assert bytes_there(one) == one.folder.used_bytes == 0
    one.io = io
    assert one.store_from(h(0), data(0)) and right(one, 0)


def test_where_others_took_its_room_a_tier_gives_up_old_blocks_for_new_ones(tmp_path, monkeypatch):
    one = tier(tmp_path / "t")
    monkeypatch.setattr(type(one.folder), "is_full", property(lambda folder: len(folder.hashes()) >= 3))

    class Small:  # a file system with room for three
        name, batch = "small", 1

        def write(self, pieces):
            if one.folder.is_full:
                raise OSError(28, "No space left on device")
            io.write(pieces)

    one.io, io = Small(), one.io
    for i in range(8):
        assert one.store_from(h(i), data(i), stamp_ns=1000 + i)
    one.io = io
    assert [i for i in range(8) if right(one, i)] == [5, 6, 7] and (one.counts.evicted, one.counts.refused) == (5, 0)
    assert one.folder.used_bytes == bytes_there(one) == 3 * FILE


def test_a_folder_that_somebody_cleaned_away_is_made_again(tmp_path):
    one = tier(tmp_path / "t")
    one.store_from(h(0), data(0))
    for entry in os.scandir(one.path):
        os.unlink(entry.path)
    one.path.rmdir()
    assert not right(one, 0) and one.contains([h(0)]) == 0
    assert one.store_from(h(1), data(1)) and right(one, 1) and one.folder.used_bytes == bytes_there(one) == FILE
    other = tier(tmp_path / "t", 1)
    os.unlink(tmp_path / "t" / ".lock")  # and a lock that is gone does not make two
    assert other.store_from(h(2), data(2)) and one.store_from(h(3), data(3)) and os.path.samestat(os.fstat(one.folder._lock_fd), os.fstat(other.folder._lock_fd))
    for entry in os.scandir(one.path):
        os.unlink(entry.path)
    one.path.rmdir()
    one.path.touch()
    assert not one.store_from(h(1), data(1)) and "cannot be used" in one.last_refusal


@pytest.mark.parametrize("content", [b"", b"\0" * 3, struct.pack("<Q", 9 * FILE), None])
def test_the_number_of_bytes_mends_itself(tmp_path, content):
    one = tier(tmp_path / "t", 4)
    for i in range(3):
        one.store_from(h(i), data(i), stamp_ns=i)
    one.close()
    if content is None:
        os.unlink(tmp_path / "t" / ".lock")
    else:
        (tmp_path / "t" / ".lock").write_bytes(content)
    again = tier(tmp_path / "t", 4)
    assert again.folder.used_bytes == 3 * FILE
    (tmp_path / "t" / ".lock").write_bytes(content or b"")  # and while it is open
    assert again.store_from(h(3), data(3)) and again.folder.used_bytes == 4 * FILE and len(again.folder.hashes()) == 4
    assert again.store_from(h(4), data(4)) and sorted(again.folder.hashes()) == [h(i) for i in (1, 2, 3, 4)]


# --- damaged files --------------------------------------------------------------------------------------------


def damaged(path, change, io="plain"):
    """Store block 1, change its file's bytes, and ask for it: (found, still there)."""
    one = Tier(path, GEOMETRY, 10 * FILE, io=io)
    one.store_from(h(1), data(1))
    name = one.folder.name(h(1))
    with open(name, "rb") as file:
        content = bytearray(file.read())
    assert len(content) == FILE
    with open(name, "wb") as file:
        file.write(change(content))
    found = right(one, 1)
    return found, os.path.exists(name), one


SIZES = sorted({0, 1, 7, 8, 9, 39, 40, 41, 71, 72, 79, 80, 81, 83, 84, 85, 4095, 4096, 4097, 8191, 8192, 8193, FILE - 1, FILE + 1, FILE + 4096})


@pytest.mark.parametrize("io", ["plain", "nixl"])
def test_a_file_of_any_other_length_is_a_miss_and_goes(tmp_path, io):
    if io == "nixl":
        pytest.importorskip("nixl", reason="pip install 'minengine[nixl]'")
    for size in SIZES:
        found, there, one = damaged(tmp_path / str(size), lambda content: (bytes(content) + b"\0" * 5000)[:size], io)
        assert not found and not there and one.counts.corrupt == 1, size
        assert one.store_from(h(1), data(1)) and right(one, 1)
        one.close()


@given(place=st.one_of(st.integers(0, HEADER_USED - 1), st.integers(HEADER_BYTES, FILE - 1)), bit=st.integers(0, 7))
@settings(max_examples=200)
def test_every_flipped_bit_is_a_miss(tmp_path_factory, place, bit):
    def flip(content):
        content[place] ^= 1 << bit
        return content

    found, there, one = damaged(tmp_path_factory.mktemp("flip"), flip)
    assert not found and not there
    one.close()


def test_every_bit_of_the_header_counts(tmp_path):
    one = tier(tmp_path / "t")
    for bit in range(8 * HEADER_USED):
        one.store_from(h(1), data(1))
        with open(one.folder.name(h(1)), "r+b") as file:
            head = bytearray(file.read(HEADER_USED))
            head[bit // 8] ^= 1 << bit % 8
            file.seek(0)
            file.write(head)
        assert not right(one, 1) and not one.has(h(1)), bit


def test_pages_in_the_wrong_order_zeroed_or_of_another_block_are_a_miss(tmp_path):
    page = HEADER_BYTES

    def swapped(content):
        return content[:page] + content[2 * page :] + content[page : 2 * page]

    def zeroed(content):  # as after a power cut: the length is there and the data is not
        return content[: 2 * page] + bytes(len(content) - 2 * page)

    def nothing(content):
        return bytes(len(content))

    def mixed(content):
        return content[:page] + data(2).tobytes()

    for change in (swapped, zeroed, nothing, mixed):
        found, there, one = damaged(tmp_path / change.__name__, change)
        assert not found and not there
        one.close()


def test_a_whole_block_under_another_blocks_name_is_a_miss(tmp_path):
    one, other = tier(tmp_path / "t"), Tier(tmp_path / "o", Geometry(**{**vars(GEOMETRY), "fingerprint": "n"}), 10 * FILE, io="plain")
    one.store_from(h(1), data(1))
    other.store_from(h(2), data(2))
    os.rename(one.folder.name(h(1)), one.folder.name(h(3)))
    os.rename(other.folder.name(h(2)), one.folder.name(h(2)))  # another model's, under our name
    assert not right(one, 3) and not right(one, 2) and one.counts.corrupt == 2 and one.folder.hashes() == []


def test_a_block_that_is_stored_anew_meanwhile_is_not_taken_away(tmp_path):
    one = tier(tmp_path / "t")
    one.store_from(h(1), data(1))
    os.truncate(one.folder.name(h(1)), 100)
    found = one.open(h(1))
    os.unlink(one.folder.name(h(1)))
    one.store_from(h(1), data(1))
    assert one.read([found], [np.zeros(GEOMETRY.nbytes, dtype=np.uint8)]) == 0
    found.close()
    assert right(one, 1)


# --- against a model of it ------------------------------------------------------------------------------------


class Tiers(RuleBasedStateMachine):
    """Two processes' views of one folder against a dict of last uses."""

    ROOM = 4
    ids = st.integers(0, 9)
    views = st.integers(0, 1)

    def __init__(self):
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.views_ = [tier(self.folder.name + "/t", self.ROOM) for _ in range(2)]
        self.used: dict[int, int] = {}
        self.slots = []
        self.now = 0

    def teardown(self):
        for _, slot in self.slots:
            os.close(slot.fd)
        for view in self.views_:
            view.close()
        self.folder.cleanup()

    def room(self):
        """Evict in the model until one more fits; False if it cannot."""
        while len(self.used) + len(self.slots) >= self.ROOM and self.used:
            del self.used[min(self.used, key=self.used.get)]
        return len(self.used) + len(self.slots) < self.ROOM

    @rule(i=ids, v=views)
    def store(self, i, v):
        self.now += 1
        fits = i in self.used or self.room()
        assert self.views_[v].store_from(h(i), data(i), stamp_ns=self.now) == fits
        if fits:
            self.used[i] = self.now

    @rule(i=ids, v=views)
    def load(self, i, v):
        assert right(self.views_[v], i) == (i in self.used)

    @rule(i=ids, v=views)
    def use(self, i, v):
        self.now += 1
        assert self.views_[v].touch(h(i), self.now) == (i in self.used)
        if i in self.used:
            self.used[i] = self.now

    @rule(v=views)
    def begin(self, v):
        fits = self.room()
        slot, _ = self.views_[v].folder.reserve()
        assert (slot is not None) == fits
        if slot:
            self.slots.append((v, slot))

    @rule(whole=st.booleans(), i=ids)
    def finish(self, whole, i):
        if self.slots:
            v, slot = self.slots.pop()
            folder = self.views_[v].folder
            if whole:
                self.now += 1
                one = self.views_[v]
                known = one._known(h(i))
                from minengine.kv.tier import _CHECK, checksum

                os.pwrite(slot.fd, known + _CHECK.pack(checksum(known, data(i))), 0)
                os.pwrite(slot.fd, data(i), HEADER_BYTES)
                folder.commit(slot, h(i), self.now)
                self.used[i] = self.now
            else:
                folder.abort(slot)

    @rule(v=views)
    def die(self, v):
        """The process of a view ends in the middle of whatever it was writing, and starts again."""
        for _, slot in (s for s in self.slots if s[0] == v):
            os.close(slot.fd)
        self.slots = [s for s in self.slots if s[0] != v]
        self.views_[v].close()
        self.views_[v] = tier(self.folder.name + "/t", self.ROOM)

    @rule(i=ids, v=views, at=st.sampled_from([3, 60, 82, HEADER_BYTES, FILE - 1]))
    def damage(self, i, v, at):
        if i in self.used:
            with open(self.views_[v].folder.name(h(i)), "r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 16]))
            del self.used[i]
            assert not right(self.views_[v], i)

    @invariant()
    def agrees(self):
        for view in self.views_:
            assert sorted(view.folder.hashes()) == sorted(map(h, self.used))
        assert self.views_[0].folder.used_bytes == bytes_there(self.views_[1]) == (len(self.used) + len(self.slots)) * FILE


Tiers.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_two_views_of_one_folder = Tiers.TestCase
