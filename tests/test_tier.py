"""Tiers: what is stored comes back byte for byte in any order of the pool, and nothing else ever does."""
import gc
import os
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minengine.kv import tier_stack
from minengine.kv.blocks import block_hash, root_hash
from minengine.kv.events import EventLog
from minengine.kv.fingerprint import model_fingerprint
from minengine.kv.layout import KVLayout
from minengine.kv.tier import HEADER_BYTES, Tier
from minengine.kv.tier_blocks import BlockBytes, Geometry
from minengine.kv.tier_io import NixlIO
from minengine.kv.tier_open import open_stack, tier_folders
from minengine.kv.tier_stack import TierStack
from tests.tiny_models import tiny_model

WAIT_S = 30.0  # a test that waits this long fails


def layout(order="BLHNC", blocks=12, block_size=16):
    return KVLayout(order, num_layers=3, num_blocks=blocks, num_heads=2, block_size=block_size, row_bytes=20, num_indexer_layers=2, indexer_bytes=12)


GEOMETRY = Geometry.of(layout(), "float32", "model a")
FILE = HEADER_BYTES + GEOMETRY.nbytes


def pool(order="BLHNC", seed=0, blocks=12):
    lay = layout(order, blocks)
    storage = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, lay.nbytes, dtype=np.uint8))
    return BlockBytes(storage, lay)


def canonical(blocks, block_id):
    """The block's bytes from the layout's own strides, one row at a time."""
    lay, flat = blocks.layout, blocks.storage.numpy()
    parts = []
    for (layers, _, heads, tokens, width), strides, offset in ((lay.shape, lay.strides, lay.offset), (lay.indexer_shape, lay.indexer_strides, lay.indexer_offset)):
        for layer in range(layers):
            for head in range(heads):
                for token in range(tokens):
                    start = offset + layer * strides[0] + block_id * strides[1] + head * strides[2] + token * strides[3]
                    parts.append(flat[start : start + width])
    return np.concatenate(parts)


def chain(n, salt=None, start=0):
    hashes, parent = [], root_hash(salt)
    for i in range(n):
        parent = block_hash(parent, [start + i])
        hashes.append(parent)
    return hashes


def data(seed=0, geometry=GEOMETRY):
    return np.random.default_rng(seed).integers(0, 256, geometry.nbytes, dtype=np.uint8)


def tier(path, blocks=100, geometry=GEOMETRY, **options):
    return Tier(path / "tier", geometry, blocks * (HEADER_BYTES + geometry.nbytes), **options)


def got(a_tier, h):
    out = np.zeros(a_tier.nbytes, dtype=np.uint8)
    return out if a_tier.load_into(h, out) else None


class Waiting:
    """`done` of a job, to be waited for."""

    def __init__(self):
        self.event, self.jobs = threading.Event(), []

    def __call__(self, job):
        self.jobs.append(job)
        self.event.set()

    def job(self):
        assert self.event.wait(WAIT_S), "the job did not end"
        assert len(self.jobs) == 1
        return self.jobs[0]


# --- bytes of a block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", KV_CACHE_LAYOUTS)
def test_bytes_are_the_same_whatever_the_pools_order(order):
    blocks = pool(order)
    out = np.zeros(blocks.nbytes, dtype=np.uint8)
    for block_id in (0, 5, 11):
        blocks.read(block_id, out)
        assert np.array_equal(out, canonical(blocks, block_id))
    before = blocks.storage.clone()
    new = data(1)
    blocks.write(5, new)
    assert np.array_equal(canonical(blocks, 5), new)
    blocks.write(5, out * 0)
    others = [i for i in range(12) if i != 5]
    assert all(np.array_equal(canonical(blocks, i), canonical(BlockBytes(before, blocks.layout), i)) for i in others), "a neighbour was touched"
    assert blocks.direct == (order == "BLHNC")
    if blocks.direct:
        assert np.array_equal(blocks.place(3), canonical(blocks, 3))
    with pytest.raises(IndexError, match="block id 12"):
        blocks.write(12, new)


@pytest.mark.parametrize("row_bytes", [18, 34, 352, 7])  # halves of q4_0 and q8_0 rows, the four-bit latent row, and one that no word divides
def test_rows_of_odd_widths(row_bytes):
    lay = KVLayout("LBNHC", num_layers=2, num_blocks=3, num_heads=1, block_size=16, row_bytes=row_bytes)
    blocks = BlockBytes(torch.arange(lay.nbytes).to(torch.uint8), lay)
    out = np.zeros(lay.block_bytes, dtype=np.uint8)
    blocks.read(2, out)
    assert np.array_equal(out, canonical(blocks, 2))


def test_geometry_tells_everything_apart_that_must_be():
    tags = {GEOMETRY.tag}
    changed = [replace(GEOMETRY, **{name: value}) for name, value in (
        ("num_layers", 4), ("num_heads", 3), ("block_size", 32), ("row_bytes", 24), ("num_indexer_layers", 1), ("indexer_bytes", 16),
        ("kv_cache_dtype", "fp8"), ("fingerprint", "model b"))]
    tags |= {g.tag for g in changed}
    assert len(tags) == 9
    assert len({Geometry.of(layout(order), "float32", "model a").tag for order in KV_CACHE_LAYOUTS}) == 1, "the pool's order and size must not matter"
    assert Geometry.of(layout(blocks=99), "float32", "model a") == GEOMETRY
    assert GEOMETRY.nbytes == layout().block_bytes


def test_a_fingerprint_knows_every_weight_the_config_and_the_dtype():
    llama, glm = tiny_model("llama"), tiny_model("glm")
    base = model_fingerprint(llama)
    assert base == model_fingerprint(llama) and len(base) == 32
    assert base not in (model_fingerprint(glm), model_fingerprint(tiny_model("llama", torch.bfloat16)))
    for tensor in (llama.layers[2].input_norm, llama.embedding, llama.layers[0].attention.qkv.weight, glm.layers[3].attention.indexer.head_proj):
        model = glm if tensor is glm.layers[3].attention.indexer.head_proj else llama
        before, kept = model_fingerprint(model), tensor.clone()
        tensor.view(-1)[-1] += 1e-3
        changed = model_fingerprint(model)
        tensor.copy_(kept)
        assert changed != before == model_fingerprint(model)
    config = llama.config
    llama.config = replace(config, rope_theta=5001.0)
    try:
        assert model_fingerprint(llama) != base
    finally:
        llama.config = config


# --- one tier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["plain", "nixl"])
def test_what_is_stored_comes_back_to_any_process(tmp_path, io):
    if io == "nixl":
        pytest.importorskip("nixl", reason="pip install 'minengine[nixl]'")
    hashes = chain(5)
    one = tier(tmp_path, io=io)
    assert all(one.store_from(h, data(i)) for i, h in enumerate(hashes[:3]))
    assert one.contains(hashes) == 3 and one.contains(hashes[1:]) == 2 and one.contains(hashes[3:]) == 0
    other = tier(tmp_path, io="plain")  # as a second worker, or after a restart
    for i, h in enumerate(hashes[:3]):
        assert np.array_equal(got(one, h), data(i)) and np.array_equal(got(other, h), data(i))
    assert got(one, hashes[3]) is None
    assert one.store_from(hashes[0], data(9)) and np.array_equal(got(one, hashes[0]), data(0)), "what is there stays"
    assert sorted(other.folder.hashes()) == sorted(hashes[:3])
    assert one.folder.used_bytes == other.folder.used_bytes == 3 * FILE
    assert (one.counts.stored, one.counts.loaded, one.counts.missing, one.counts.corrupt) == (3, 4, 1, 0)


def test_nobody_else_may_look(tmp_path):
    old = os.umask(0)
    try:
        one = tier(tmp_path)
        one.store_from(chain(1)[0], data())
    finally:
        os.umask(old)
    assert one.path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in one.path.iterdir())
    one.path.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        tier(tmp_path)
    one.path.chmod(0o700)
    (tmp_path / "link").symlink_to(one.path)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        Tier(tmp_path / "link", GEOMETRY, FILE)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Tier(tmp_path / "file", GEOMETRY, FILE)
    with pytest.raises(ConfigError, match="holds no block"):
        Tier(tmp_path / "small", GEOMETRY, FILE - 1)
    with pytest.raises(ConfigError, match="more than its file system"):
        Tier(tmp_path / "huge", GEOMETRY, 1 << 60)


def test_another_model_or_geometry_finds_nothing_and_shares_the_room(tmp_path):
    h = chain(1)[0]
    ours, theirs = tier(tmp_path, blocks=2), tier(tmp_path, blocks=2, geometry=replace(GEOMETRY, fingerprint="model b"))
    assert ours.store_from(h, data(0), stamp_ns=1)
    assert not theirs.has(h) and got(theirs, h) is None and theirs.folder.hashes() == []
    assert theirs.store_from(h, data(1), stamp_ns=2)
    assert np.array_equal(got(ours, h), data(0)) and np.array_equal(got(theirs, h), data(1))
    assert ours.store_from(chain(2)[1], data(2), stamp_ns=3)
    assert not ours.has(h) and theirs.has(h), "the least recently used goes, whoever's it is"


def test_tenants_never_meet(tmp_path):
    one = tier(tmp_path)
    for salt in (None, "", "a", "b"):
        assert one.contains(chain(2, salt)) == 0
        for i, h in enumerate(chain(2, salt)):
            one.store_from(h, data(hash((salt, i)) % 1000))
    assert len(one.folder.hashes()) == 8


def test_the_least_recently_used_goes_and_a_chain_goes_from_its_end(tmp_path):
    lay = pool()
    stack = TierStack([tier(tmp_path, blocks=4)], lay)
    old, new = chain(2), chain(2, start=50)
    for hashes, block_ids in ((old, [0, 1]), (new, [2, 3])):
        done = Waiting()
        stack.store(hashes, block_ids, done)
        assert done.job().num_blocks == 2
    done = Waiting()
    stack.store(chain(1, start=90), [4], done)
    done.job()
    assert stack.find(old) == 1 and stack.find(new) == 2, "the older chain's end is gone"
    done = Waiting()
    stack.load(old[:1], [5], done)  # a use: now the newer chain is the one used least recently
    done.job()
    done = Waiting()
    stack.store(chain(1, start=91), [4], done)
    done.job()
    assert stack.find(old) == 1 and stack.find(new) == 1
    rest = [h for a_chain in (chain(1, start=90), chain(1, start=91)) for h in a_chain]
    done = Waiting()
    stack.store(old, [0, 1], done)  # all of it is used again, by being stored again; one of it was gone and takes the other chain's place
    done.job()
    stack.store(old, [0, 1], done := Waiting())
    done.job()
    stack.store(chain(3, start=200), [5, 6, 7], done := Waiting())
    done.job()
    assert stack.find(old) == 1 and not any(stack.find([h]) for h in [*new, *rest]), "and its end goes first once more"
    stack.close()


def test_no_room_means_not_stored_and_nothing_breaks(tmp_path):
    one = tier(tmp_path, blocks=2)
    slots = [one.folder.reserve()[0] for _ in range(2)]  # two blocks that other threads are writing
    assert not one.store_from(chain(1)[0], data()) and one.counts.refused == 1, "what is being written is never evicted"
    one.folder.abort(slots[0])
    assert one.store_from(chain(1)[0], data())
    one.folder.commit(slots[1], chain(2)[1], 1)
    assert one.folder.used_bytes == 2 * FILE and one.contains(chain(2)) == 2


def test_an_open_block_outlives_its_eviction(tmp_path):
    one = tier(tmp_path, blocks=1)
    first, second = chain(2)
    one.store_from(first, data(0))
    found = one.open(first)
    one.store_from(second, data(1))
    assert not one.has(first)
    out = np.zeros(one.nbytes, dtype=np.uint8)
    assert one.read([found], [out]) == 1 and np.array_equal(out, data(0))
    found.close()


def test_events_tell_what_came_and_went(tmp_path):
    log = EventLog()
    one = tier(tmp_path, blocks=2, medium="disk", io="plain", events=log)
    a, b, c = chain(3)
    one.store_from(a, data(), parent=root_hash(), stamp_ns=1)
    one.store_from(b, data(), parent=a, stamp_ns=2)
    one.store_from(c, data(), parent=b, stamp_ns=3)
    events = [(e.kind, e.hashes, e.medium, e.parent) for e in log.take()]
    assert events == [("stored", (a, b), "disk", root_hash()), ("removed", (a,), "disk", None), ("stored", (c,), "disk", b)]


# --- the stack --------------------------------------------------------------------------------------------------


def stack_of(path, blocks, host=8, disk=100, **options):
    return TierStack([Tier(path / "host", GEOMETRY, host * FILE, "host"), Tier(path / "disk", GEOMETRY, disk * FILE, "disk", io="plain")], blocks, **options)


@pytest.mark.parametrize("order", KV_CACHE_LAYOUTS)
def test_blocks_go_out_and_come_back_into_another_pool(tmp_path, order):
    ours, theirs = pool(order, seed=1), pool("LHBNC" if order == "BLHNC" else "BLHNC", seed=2)
    hashes, saved = chain(6), Waiting()
    stack = stack_of(tmp_path, ours)
    stack.store(hashes, [3, 1, 4, 11, 5, 9], saved)
    assert saved.job().num_blocks == 6
    assert stack.wait_idle(WAIT_S) and stack.find(chain(9)) == 6
    stack.close()
    again, loaded = stack_of(tmp_path, theirs), Waiting()
    again.load(hashes, [0, 2, 4, 6, 8, 10], loaded)
    job = loaded.job()
    assert job.num_blocks == 6 and job.media == {"host": 6} and job.num_bytes == 6 * GEOMETRY.nbytes
    assert job.queued_s <= job.start_s <= job.end_s
    for from_id, to_id in zip([3, 1, 4, 11, 5, 9], [0, 2, 4, 6, 8, 10]):
        assert np.array_equal(canonical(theirs, to_id), canonical(ours, from_id))
    again.close()


def test_what_left_memory_is_found_on_disk_and_comes_up_again(tmp_path):
    blocks = pool()
    stack, hashes, done = stack_of(tmp_path, blocks, host=2), chain(6), Waiting()
    stack.store(hashes, range(6), done)
    done.job()
    assert stack.wait_idle(WAIT_S)
    assert {medium: len(found) for medium, found in stack.snapshot().items()} == {"host": 2, "disk": 6}
    done, before = Waiting(), [canonical(blocks, i) for i in range(6)]
    blocks.storage.zero_()
    stack.load(hashes, range(6, 12), done)
    job = done.job()
    assert job.num_blocks == 6 and sum(job.media.values()) == 6 and job.media["disk"] >= 4
    assert all(np.array_equal(canonical(blocks, 6 + i), before[i]) for i in range(6))
    assert stack.wait_idle(WAIT_S) and len(stack.snapshot()["host"]) == 2
    stack.close()


def test_few_blocks_wait_for_the_disk_with_their_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_stack, "OPEN_COPIES", 2)
    stack, done, waiting = stack_of(tmp_path, pool(), host=2), Waiting(), []
    copy = stack.tiers[1].copy_from
    stack.tiers[1].copy_from = lambda *args: (waiting.append(len(stack._down)), copy(*args))[1]
    stack.store(chain(9), range(9), done)
    done.job()
    assert stack.wait_idle(WAIT_S) and len(waiting) == 9 and max(waiting) == 2 and stack.tiers[1].contains(chain(9)) == 9
    stack.close()


def test_a_load_ends_before_the_first_block_that_is_not_right(tmp_path):
    stack, hashes, done = stack_of(tmp_path, pool(), disk=8), chain(6), Waiting()
    stack.store(hashes, range(6), done)
    done.job()
    assert stack.wait_idle(WAIT_S)
    for a_tier in stack.tiers:
        with open(a_tier.folder.name(hashes[3]), "r+b") as file:
            file.seek(HEADER_BYTES + 100)
            byte = file.read(1)[0]
            file.seek(HEADER_BYTES + 100)
            file.write(bytes([byte ^ 4]))
    for _ in range(2):  # the host's copy goes first, then the disk's
        done = Waiting()
        stack.load(hashes, range(6, 12), done)
        assert done.job().num_blocks == 3
    assert stack.find(hashes) == 3 and sum(t.counts.corrupt for t in stack.tiers) == 2
    done = Waiting()
    stack.load([os.urandom(32)], [0], done)
    assert done.job().num_blocks == 0
    stack.close()


def test_a_damaged_copy_in_memory_is_made_up_for_by_the_one_on_disk(tmp_path):
    blocks = pool()
    stack, hashes, done = stack_of(tmp_path, blocks), chain(6), Waiting()
    stack.store(hashes, range(6), done)
    done.job()
    assert stack.wait_idle(WAIT_S)
    for i in (0, 3, 5):
        os.truncate(stack.tiers[0].folder.name(hashes[i]), 5000)
    done = Waiting()
    stack.load(hashes, range(6, 12), done)
    assert done.job().num_blocks == 6 and done.job().media == {"host": 3, "disk": 3}
    assert all(np.array_equal(canonical(blocks, 6 + i), canonical(blocks, i)) for i in range(6))
    assert stack.wait_idle(WAIT_S) and stack.tiers[0].contains(hashes) == 6 and stack.tiers[0].counts.corrupt == 3
    stack.close()


def test_the_first_tier_being_full_does_not_keep_blocks_from_the_second(tmp_path):
    stack, done = stack_of(tmp_path, pool(), host=1), Waiting()
    slot, _ = stack.tiers[0].folder.reserve()
    stack.store(chain(3), range(3), done)
    assert done.job().num_blocks == 3 and len(stack.snapshot()["disk"]) == 3
    stack.tiers[0].folder.abort(slot)
    stack.close()


class Gate:
    """Plain I/O that stops before each read or write until it is let through."""

    name, batch = "gate", 1

    def __init__(self):
        self.reached, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def _pass(self):
        self.reached.release()
        assert self.open.acquire(timeout=WAIT_S)

    def read(self, pieces):
        from minengine.kv.tier_io import PlainIO

        self._pass()
        PlainIO().read(pieces)

    def write(self, pieces):
        from minengine.kv.tier_io import PlainIO

        self._pass()
        PlainIO().write(pieces)


def test_cancelling_says_whether_the_blocks_are_still_touched(tmp_path):
    gate, blocks = Gate(), pool()
    stack = TierStack([Tier(tmp_path / "host", GEOMETRY, 20 * FILE, io=gate)], blocks)
    first, second, third = Waiting(), Waiting(), Waiting()
    at_work = stack.store(chain(3), range(3), first)
    waiting = stack.store(chain(2, start=50), [4, 5], second)
    assert gate.reached.acquire(timeout=WAIT_S)
    assert waiting.cancel() and waiting.cancelled
    assert not at_work.cancel(), "its first block is being written"
    gate.open.release()
    assert first.job().num_blocks == 1 and at_work.cancelled and at_work.cancel()
    assert stack.wait_idle(WAIT_S) and not second.jobs
    begun = stack.store(chain(2, start=70), [6, 7], third)  # between two blocks nothing is touched
    assert gate.reached.acquire(timeout=WAIT_S)
    load_done = Waiting()
    load = stack.load(chain(1), [8], load_done)
    gate.open.release()
    assert gate.reached.acquire(timeout=WAIT_S)  # the load went before the rest of the store
    assert begun.cancel() and not load.ended
    gate.open.release()
    assert load_done.job().num_blocks == 1 and stack.wait_idle(WAIT_S) and not third.jobs
    stack.close()


def test_too_much_to_store_is_dropped_and_said(tmp_path):
    gate = Gate()
    stack = TierStack([Tier(tmp_path / "host", GEOMETRY, 20 * FILE, io=gate)], pool(), max_pending_blocks=4)
    first, second = Waiting(), Waiting()
    stack.store(chain(3), range(3), first)
    assert gate.reached.acquire(timeout=WAIT_S)
    dropped = stack.store(chain(2, start=50), [4, 5], second)
    for _ in range(3):
        gate.open.release()
    assert second.job() is dropped and dropped.dropped and dropped.num_blocks == 0 and stack.dropped_blocks == 2
    assert first.job().num_blocks == 3
    stack.close()


def test_closing_tells_whoever_waits(tmp_path):
    gate = Gate()
    stack = TierStack([Tier(tmp_path / "host", GEOMETRY, 20 * FILE, io=gate)], pool())
    first, second, third = Waiting(), Waiting(), Waiting()
    stack.store(chain(2), range(2), first)
    assert gate.reached.acquire(timeout=WAIT_S)
    stack.load(chain(1), [5], second)
    closing = threading.Thread(target=stack.close)
    closing.start()
    while not stack._closed:
        pass
    gate.open.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert first.job().cancelled and second.job().cancelled and second.job().num_blocks == 0
    stack.load(chain(1), [5], third)  # too late
    assert third.job().cancelled
    stack.close()


def test_a_callback_that_raises_does_not_stop_the_others(tmp_path, caplog):
    def bad(job):
        raise RuntimeError("on purpose")

    stack, done = stack_of(tmp_path, pool()), Waiting()
    stack.store(chain(1), [0], bad)
    stack.store(chain(2), [0, 1], done)
    assert done.job().num_blocks == 2 and "on purpose" in caplog.text
    stack.close()


def test_others_work_is_found_by_looking_again(tmp_path):
    log, hashes = EventLog(), chain(4)
    before = stack_of(tmp_path, pool())
    done = Waiting()
    before.store(hashes, range(4), done)
    done.job()
    before.close()
    seen = threading.Event()

    class Seen(EventLog):
        def stored(self, h, parent=None, medium="device"):
            super().stored(h, parent, medium)
            seen.set()

    log = Seen()
    stack = stack_of(tmp_path, pool(), events=log)
    assert seen.wait(WAIT_S) and stack.wait_idle(WAIT_S)
    assert log.snapshot().hashes["host"] == set(hashes)
    stack.close()
    os.unlink(stack.tiers[0].folder.name(hashes[2]))  # as another process's eviction does
    stack = stack_of(tmp_path, pool(), events=log)
    while log.snapshot().hashes["host"] == set(hashes):
        assert stack.wait_idle(WAIT_S)
    assert log.snapshot().hashes["host"] == set(hashes) - {hashes[2]}
    stack.close()


def test_a_stack_that_nobody_has_any_more_ends_and_lets_go_of_the_pool(tmp_path):
    blocks = pool()
    stack, done = stack_of(tmp_path, blocks, events=EventLog(), rescan_s=1e6), Waiting()
    stack.store(chain(2), [0, 1], done)
    done.job()
    assert stack.wait_idle(WAIT_S)
    thread, held = stack._thread, weakref.ref(blocks)
    done.jobs.clear()
    del stack, blocks
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive() and held() is None


def test_options_become_tiers(tmp_path):
    model, lay = tiny_model("llama"), layout()
    facts = dict(model=model, kv_layout=lay, kv_cache_dtype="float32", storage=torch.zeros(lay.nbytes, dtype=torch.uint8), tier_path=str(tmp_path / "t"))
    assert open_stack(host_tier_bytes=0, disk_tier_bytes=0, **facts) is None
    stack = open_stack(host_tier_bytes=0, disk_tier_bytes=10 * FILE, **facts)
    assert [t.medium for t in stack.tiers] == ["disk"] and stack.tiers[0].path == tmp_path / "t"
    stack.close()
    folders = tier_folders(str(tmp_path / "t"))
    assert folders["host"] != tier_folders(None)["host"] and folders == tier_folders(str(tmp_path / "t"))


def test_nixl_moves_many_blocks_in_one_go_and_says_when_it_cannot(tmp_path):
    pytest.importorskip("nixl", reason="pip install 'minengine[nixl]'")
    one = tier(tmp_path, medium="disk", io="nixl")
    assert isinstance(one.io, NixlIO)
    hashes = chain(12)
    for i, h in enumerate(hashes):
        assert one.store_from(h, data(i))
    found, out = [one.open(h) for h in hashes], np.zeros((12, one.nbytes), dtype=np.uint8)
    assert one.read(found, list(out)) == 12 and all(np.array_equal(out[i], data(i)) for i in range(12))
    os.truncate(one.folder.name(hashes[7]), FILE - 1)
    assert one.read(found, list(out)) == 7
    with pytest.raises(OSError, match="NIXL"):
        one.io.read([(found[7].fd, HEADER_BYTES, out[7])])
    for f in found:
        f.close()
