"""The router's knowledge of caches: equal to what the workers' logs say whenever no event is missing, and again after every gap."""
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import pytest

from minengine.disagg.kv_index import KVIndex, Overlap
from minengine.kv.events import MEDIA, EventLog, KVEvent, Snapshot

HASHES = [bytes([i]) * 32 for i in range(6)]
WORKERS = ("a", "b", "c")


def index_of(**device):
    index = KVIndex()
    for worker, hashes in device.items():
        index.add(worker)
        if hashes:
            assert index.apply(worker, [KVEvent(1, "stored", tuple(HASHES[i] for i in hashes))])
    return index


def test_an_overlap_is_the_run_of_known_blocks_at_the_start():
    index = index_of(a=[0, 1, 3], b=[1, 2], c=[])
    # a has 0 and 1, then lacks 2: its 3 is of no use. b lacks the first block: nothing. c has none.
    assert index.overlaps(HASHES[:4], WORKERS) == {"a": Overlap(2), "b": Overlap(0), "c": Overlap(0)}
    assert index.overlaps(HASHES[:4], ["b"]) == {"b": Overlap(0)}
    assert index.overlaps([], WORKERS) == dict.fromkeys(WORKERS, Overlap())


def test_tiers_go_on_where_the_device_ends_and_are_shared_by_the_workers_of_a_machine():
    index = KVIndex()
    index.add("a", "m"), index.add("b", "m"), index.add("c", "elsewhere")
    index.apply("a", [KVEvent(1, "stored", (HASHES[0], HASHES[5])), KVEvent(2, "stored", (HASHES[1],), "host"),
                      KVEvent(3, "stored", (HASHES[2], HASHES[1]), "disk")])
    index.apply("b", [KVEvent(1, "stored", (HASHES[0],), "host"), KVEvent(2, "stored", (HASHES[3],))])
    # a: block 0 on its device, 1 in host memory (nearer than the disk, which has it too), 2 on disk, then 3, which only b's device has.
    # b: block 0 in host memory, although a has it on its device; then as a.
    assert index.overlaps(HASHES, WORKERS) == {"a": Overlap(1, 1, 1), "b": Overlap(0, 2, 1), "c": Overlap()}
    assert index.overlaps(HASHES, ["a"])["a"].total == 3
    index.apply("b", [KVEvent(3, "removed", (HASHES[1],), "host")])  # whoever stored it: the file is gone for all
    assert index.overlaps(HASHES, ["a"])["a"] == Overlap(1, 0, 2)


def test_what_a_restarted_worker_had_on_its_device_is_gone_and_the_tiers_stay():
    index = index_of(a=[0, 1], b=[0])
    index.apply("a", [KVEvent(2, "stored", (HASHES[2],), "host")])
    index.restart("a")
    assert index.known("a") == {"device": 0, "host": 1, "disk": 0} and index.known("b")["device"] == 1
    assert index.apply("a", [KVEvent(1, "stored", (HASHES[0],))]), "its numbers begin at 1 again"
    index.remove("a")
    index.add("d")
    assert index.overlaps(HASHES, ["d"]) == {"d": Overlap(0)}, "a new worker must not inherit a bit's contents"


def test_a_missing_number_stops_everything_until_a_snapshot():
    index = index_of(a=[0])
    assert not index.apply("a", [KVEvent(2, "stored", (HASHES[1],)), KVEvent(4, "stored", (HASHES[3],)), KVEvent(5, "stored", (HASHES[4],))])
    assert index.needs_resync("a")
    assert not index.apply("a", [KVEvent(6, "cleared", ())]) and not index.apply("a", [])
    assert index.overlaps(HASHES[:2], ["a"])["a"] == Overlap(2), "what was known before the gap is still the best guess"
    index.resync("a", Snapshot(6, {"device": frozenset(HASHES[:1]), "host": frozenset(), "disk": frozenset()}))
    assert not index.needs_resync("a") and index.overlaps(HASHES[:2], ["a"])["a"] == Overlap(1)
    assert index.apply("a", [KVEvent(5, "stored", (HASHES[4],)), KVEvent(6, "cleared", ()), KVEvent(7, "stored", (HASHES[1],))]), "5 and 6 are in the snapshot"
    assert index.known("a")["device"] == 2


def test_a_snapshot_older_than_what_is_known_changes_nothing():
    index = index_of(a=[0])
    index.apply("a", [KVEvent(2, "stored", (HASHES[1],))])
    index.resync("a", Snapshot(1, {"device": frozenset()}))
    assert index.known("a")["device"] == 2 and index.apply("a", [KVEvent(3, "stored", (HASHES[2],))])


def test_a_worker_is_known_once():
    with pytest.raises(ValueError, match="in the index already"):
        index_of(a=[]).add("a")


@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.sampled_from(MEDIA), st.integers(0, 5)), max_size=40), st.lists(st.integers(0, 5), max_size=6))
def test_overlaps_against_the_definition_read_literally(stored, prompt):
    index, have, seq = KVIndex(), {}, dict.fromkeys(WORKERS, 0)
    for worker in WORKERS:
        index.add(worker, "m")
    for worker, medium, i in stored:
        seq[worker] += 1
        index.apply(worker, [KVEvent(seq[worker], "stored", (HASHES[i],), medium)])
        have.setdefault(worker if medium == "device" else medium, set()).add(i)
    for worker, overlap in index.overlaps([HASHES[i] for i in prompt], WORKERS).items():
        counts, rest = dict.fromkeys(MEDIA, 0), list(prompt)
        while rest and rest[0] in have.get(worker, ()):
            counts["device"] += 1
            rest.pop(0)
        while rest and (medium := next((m for m in ("host", "disk") if rest[0] in have.get(m, ())), None)):
            counts[medium] += 1
            rest.pop(0)
        assert overlap == Overlap(**counts)


class Events(RuleBasedStateMachine):
    """Workers' logs, an index behind a wire that loses, repeats and delays what it carries."""

    def __init__(self):
        super().__init__()
        self.index, self.logs, self.on_the_way, self.lost = KVIndex(), {}, {}, {}
        for worker in WORKERS:
            self.index.add(worker, worker)  # a machine each: what is in a tier is then what its one worker says
            self.begin(worker)

    def begin(self, worker):
        self.logs[worker], self.on_the_way[worker], self.lost[worker] = EventLog(), [], False

    @rule(worker=st.sampled_from(WORKERS), medium=st.sampled_from(MEDIA), i=st.integers(0, 5), kind=st.sampled_from(["stored", "stored", "removed", "cleared"]))
    def happens(self, worker, medium, i, kind):
        if kind == "cleared":
            self.logs[worker].cleared(medium)
        else:
            getattr(self.logs[worker], kind)(HASHES[i], medium=medium)

    @rule(worker=st.sampled_from(WORKERS), repeat=st.booleans())
    def is_sent(self, worker, repeat):
        events = self.logs[worker].take()
        self.on_the_way[worker] += events * (2 if repeat else 1) if len(events) < 2 else events

    @rule(worker=st.sampled_from(WORKERS))
    def is_lost(self, worker):
        if self.on_the_way[worker]:
            lost = self.on_the_way[worker].pop(0)
            rest = self.on_the_way[worker]
            self.lost[worker] |= lost not in rest and not self.index.needs_resync(worker) and lost.seq == self.index._next[worker]

    @rule(worker=st.sampled_from(WORKERS))
    def arrives(self, worker):
        events, self.on_the_way[worker] = self.on_the_way[worker], []
        was_broken = self.index.needs_resync(worker)
        ok = self.index.apply(worker, events)
        assert ok is not self.index.needs_resync(worker)
        assert not ok if was_broken or (self.lost[worker] and events) else ok, "a gap is seen with the next event, and never without one"

    @rule(worker=st.sampled_from(WORKERS))
    def is_resynced(self, worker):
        self.index.resync(worker, self.logs[worker].snapshot())
        self.lost[worker] = False

    @rule(worker=st.sampled_from(WORKERS))
    def starts_again(self, worker):
        for medium in ("host", "disk"):  # its tiers' folders are emptied too, so that the truth is its new log
            self.index.apply(worker, [KVEvent(self.index._next[worker] or 0, "cleared", (), medium)])
        self.index.restart(worker)
        self.begin(worker)
        self.index.resync(worker, self.logs[worker].snapshot())

    @invariant()
    def what_is_known_is_what_is_there_when_all_has_arrived(self):
        for worker in WORKERS:
            if not self.index.needs_resync(worker) and self.index._next[worker] == self.logs[worker].seq + 1:
                contents = self.logs[worker].snapshot().hashes
                assert self.index._own[worker] == contents["device"]
                for medium in ("host", "disk"):
                    assert set(self.index._tiers.get((worker, medium), ())) == contents[medium]

    @invariant()
    def masks_and_sets_agree(self):
        for worker in WORKERS:
            bit = self.index._bit[worker]
            assert {h for h, mask in self.index._device.items() if mask & bit} == self.index._own[worker]
        assert all(self.index._device.values())


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
