"""Cache events: whoever applies them, in order and with the snapshots that gaps ask for, knows exactly what can be found."""
import pickle
import threading

import pytest
from hypothesis import given, strategies as st

from minengine.kv.blocks import BlockPool, block_hash, root_hash
from minengine.kv.events import MEDIA, EventLog, KVEvent, Snapshot
from minengine.request import Request, SamplingParams
from minengine.schedule import Scheduler

A, B, C, D = (bytes([i]) * 32 for i in range(4))


class Reader:
    """What a router does with events; the shortest one that is right."""

    def __init__(self):
        self.seq, self.found = 0, {medium: set() for medium in MEDIA}

    def apply(self, events):
        """False: a number is missing, and nothing from there on was applied."""
        for event in events:
            if event.seq <= self.seq:
                continue
            if event.seq != self.seq + 1:
                return False
            self.seq, found = event.seq, self.found[event.medium]
            if event.kind == "stored":
                assert not found & set(event.hashes) and len(set(event.hashes)) == len(event.hashes)
                found |= set(event.hashes)
            elif event.kind == "removed":
                assert found >= set(event.hashes)
                found -= set(event.hashes)
            else:
                found.clear()
        return True

    def resync(self, snapshot):
        self.seq, self.found = snapshot.seq, {medium: set(hashes) for medium, hashes in snapshot.hashes.items()}


def test_numbers_begin_at_one_and_neighbours_of_a_kind_share_an_event():
    log = EventLog()
    assert log.take() == [] and log.snapshot() == Snapshot(0, dict.fromkeys(MEDIA, frozenset()))
    log.stored(A), log.stored(B)
    log.stored(C, medium="host")
    log.removed(A), log.removed(B)
    log.removed(C, "host")
    log.cleared()
    log.cleared("host")
    assert log.take() == [
        KVEvent(1, "stored", (A, B)), KVEvent(2, "stored", (C,), "host"), KVEvent(3, "removed", (A, B)), KVEvent(4, "removed", (C,), "host"),
        KVEvent(5, "cleared", ()), KVEvent(6, "cleared", (), "host")]
    assert log.take() == []
    log.stored(A)
    assert log.take() == [KVEvent(7, "stored", (A,))]


def test_an_event_with_a_parent_is_a_chain():
    log, root = EventLog(), root_hash()
    log.stored(A, root), log.stored(B, A)  # a chain
    log.stored(C, A)  # a branch of it
    log.stored(D)  # nothing is said of where it hangs: it may not join a chain ...
    log.removed(C), log.removed(D)
    log.stored(C), log.stored(D, C)  # ... and a chain may not join what is none
    assert [(e.hashes, e.parent) for e in log.take() if e.kind == "stored"] == [((A, B), root), ((C,), A), ((D,), None), ((C,), None), ((D,), C)]


def test_what_changes_nothing_is_not_told():
    log = EventLog()
    log.removed(A), log.stored(A), log.stored(A), log.removed(A, "disk")
    assert log.take() == [KVEvent(1, "stored", (A,))]


def test_a_snapshot_stands_between_two_events():
    log, reader = EventLog(), Reader()
    log.stored(A)
    reader.resync(log.snapshot())
    log.stored(B)  # of the same kind, but after the snapshot: an event of its own
    assert reader.apply(log.take()) and reader.seq == 2 and reader.found["device"] == {A, B}


def test_a_reader_that_stays_away_sees_a_gap_and_costs_no_memory():
    log, reader = EventLog(max_pending=3), Reader()
    for h in (A, B, C, D):
        log.stored(h)
    assert not reader.apply(log.take())
    reader.resync(log.snapshot())
    assert reader.found["device"] == {A, B, C, D}
    for _ in range(100):
        log.cleared(), log.stored(A)
    events = log.take()
    assert len(events) <= 3 and not reader.apply(events)
    with pytest.raises(ValueError, match="max_pending=0"):
        EventLog(0)


OPERATIONS = st.lists(st.tuples(st.sampled_from(("stored", "chained", "removed", "cleared", "take", "lose", "snapshot")),
                                st.integers(0, 7), st.sampled_from(MEDIA)), max_size=60)


@given(OPERATIONS, st.integers(1, 6))
def test_a_reader_that_takes_a_snapshot_at_every_gap_knows_all(operations, max_pending):
    log, reader, truth, held_back = EventLog(max_pending), Reader(), {medium: set() for medium in MEDIA}, None
    last = None
    for what, key, medium in operations:
        h = bytes([key]) * 32
        if what in ("stored", "chained"):
            log.stored(h, last if what == "chained" else None, medium)
            truth[medium].add(h)
            last = h
        elif what == "removed":
            log.removed(h, medium)
            truth[medium].discard(h)
        elif what == "cleared":
            log.cleared(medium)
            truth[medium].clear()
        elif what == "lose":
            log.take()
        elif what == "snapshot":
            held_back = log.snapshot()  # answered late: older than what the reader may know by then
        elif not reader.apply(log.take()):
            reader.resync(log.snapshot())
        if what == "take" and held_back is not None and held_back.seq > reader.seq:
            reader.resync(held_back)
    log.stored(b"end" * 11)  # the next event, whatever it is, shows a gap
    truth["device"].add(b"end" * 11)
    if not reader.apply(log.take()):
        reader.resync(log.snapshot())
    assert reader.found == truth and reader.seq == log.seq


def test_all_of_it_can_be_sent():
    log = EventLog()
    log.stored(A, B)
    for sent in (log.take(), log.snapshot()):
        assert pickle.loads(pickle.dumps(sent)) == sent


def test_several_threads_lose_and_repeat_nothing():
    log, got = EventLog(), []

    def write(medium):
        for i in range(2000):
            log.stored(i.to_bytes(32, "big"), medium=medium)
            if i % 3 == 0:
                log.removed(i.to_bytes(32, "big"), medium)

    threads = [threading.Thread(target=write, args=(medium,)) for medium in MEDIA]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        got += log.take()
    got += log.take()
    reader = Reader()
    assert reader.apply(got) and reader.seq == log.seq
    assert reader.found == {medium: {i.to_bytes(32, "big") for i in range(2000) if i % 3} for medium in MEDIA}


# --- a pool that is listened to -----------------------------------------------------------------------------


def test_a_pool_tells_what_it_learns_evicts_and_forgets():
    pool = BlockPool(3, 16)
    first = pool.allocate(2)
    chain = [block_hash(root_hash(), [1])]
    chain.append(block_hash(chain[0], [2]))
    pool.register(first[0], chain[0])
    pool.events = EventLog()  # set late: begins with what is there
    pool.register(first[1], chain[1], chain[0])
    pool.register(first[1], A)  # has its content already: nothing to tell
    assert [(e.kind, e.hashes, e.parent) for e in pool.events.take()] == [("stored", (chain[0],), None), ("stored", (chain[1],), chain[0])]
    pool.release(first)
    assert pool.events.take() == []  # cached blocks can still be found
    pool.allocate(2)
    assert [(e.kind, e.hashes) for e in pool.events.take()] == [("removed", (chain[1],))]  # the free block, then the tail
    pool.reset_prefix_cache()
    assert [(e.seq, e.kind, e.medium) for e in pool.events.take()] == [(4, "cleared", "device")]
    assert pool.events.snapshot().hashes["device"] == frozenset()


def test_a_pool_without_prefix_caching_has_nothing_to_tell():
    pool = BlockPool(1, 16, enable_prefix_caching=False)
    pool.events = EventLog()
    pool.register(pool.allocate(1)[0], A)
    assert pool.events.take() == []


def test_a_scheduler_tells_a_chain_a_request_from_the_root_of_its_salt_on():
    pool = BlockPool(8, 4)
    pool.events = EventLog()
    scheduler = Scheduler(pool, max_num_batched_tokens=8, max_num_seqs=1)
    scheduler.add(Request("r", list(range(12)), SamplingParams(max_tokens=1), max_model_len=64, cache_salt="s"))
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        scheduler.update(step, [7] * len(step.sampled()))
    chain = [root_hash("s")]
    for start in (0, 4, 8):
        chain.append(block_hash(chain[-1], range(start, start + 4)))
    assert [(e.kind, e.parent, e.hashes) for e in pool.events.take()] == [("stored", chain[0], tuple(chain[1:]))], "one event, of one chain"
    assert pool.find(chain[1:]) == [0, 1, 2]
