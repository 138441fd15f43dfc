"""Leases against a model of them: a word is the id exactly while it is held, expiry goes by time whatever the order, notices may come at any time."""
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import minengine.disagg.leases as leases
from minengine.disagg.leases import LeaseTable, OutOfLeases

SLOTS = 3


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def table(slots=SLOTS, **options):
    clock, words = Clock(), [0] * slots
    return clock, words, LeaseTable(clock, words, **options)


def test_a_word_holds_the_id_from_hold_to_end():
    _, words, held = table()
    a, b = held.hold("a", 5), held.hold("b", 5)
    assert (words[a.slot], words[b.slot], sorted(words)[0]) == (a.id, b.id, 0) and a.id != b.id and a.slot != b.slot
    assert held.end(a.id) == a and words[a.slot] == 0 and a.id not in held and b.id in held
    assert held.end(a.id) is None, "twice is harmless"
    c = held.hold("a", 5)
    assert c.slot == a.slot and c.id != a.id and words[c.slot] == c.id, "the slot comes again, the id does not"
    assert held.end(a.id) is None and c.id in held, "a notice after the end does not end what has its slot now"
    assert held.of("a") == [c] and len(held) == 2


def test_they_run_out_in_order_of_expiry_and_not_of_making():
    clock, words, held = table()
    late, soon, middle = held.hold("late", 30), held.hold("soon", 10), held.hold("middle", 20)
    assert held.next_expiry_s == 110 and held.expired(109.9) == []
    assert held.expired(110) == [soon] and words[soon.slot] == 0
    assert held.renew(middle.id, 50) and held.next_expiry_s == 130
    assert [lease.id for lease in held.expired(1000)] == [late.id, middle.id] and words == [0, 0, 0]
    assert held.next_expiry_s is None and not held.renew(late.id, 5) and held.expired(2000) == []
    clock.now = 3000
    assert held.hold("again", 1).expires_s == 3001


def test_renewing_for_less_brings_the_end_forward():
    _, _, held = table()
    a, b = held.hold("a", 30), held.hold("b", 20)
    assert held.renew(a.id, 10)
    assert [lease.id for lease in held.expired(115)] == [a.id] and b.id in held


def test_a_full_table_refuses_and_changes_nothing():
    _, words, held = table(1)
    a = held.hold("a", 5)
    with pytest.raises(OutOfLeases, match="all 1 leases"):
        held.hold("b", 5)
    assert words == [a.id] and held.of("b") == []


def test_an_end_told_before_the_lease_is_made_is_kept_for_it():
    _, words, held = table(first_id=1000)
    held.end(77)
    held.end(77)
    early = held.hold("a", 5, id=77)
    assert early.ended and words == [0] * SLOTS and len(held) == 0 and held.end(77) is None
    given = held.hold("b", 5, id=78)
    assert not given.ended and words[given.slot] == 78 and held.end(78).request_id == "b"
    for id in (0, 1 << 64, -1):
        with pytest.raises(ValueError, match="not a new one"):
            held.hold("c", 5, id=id)
    own = held.hold("own", 5)
    for id in (own.id, own.id):
        with pytest.raises(ValueError, match="not a new one"):
            held.hold("c", 5, id=id)
        held.end(own.id)


def test_early_notices_are_few(monkeypatch):
    monkeypatch.setattr(leases, "EARLY_NOTICES", 3)
    _, _, held = table(first_id=1000)
    for id in (1, 2, 3, 1, 4):
        held.end(id)
    assert [held.hold("x", 5, id=id).ended for id in (1, 3, 4)] == [True] * 3 and not held.hold("x", 5, id=2).ended
    for _ in range(10):
        held.end(held.hold("own", 5).id)
        held.end(1000)
    assert not held._early, "what ended long ago is not kept"


def test_ids_of_two_starts_differ():
    assert len({table()[2].hold("a", 1).id for _ in range(50)}) == 50


class Leases(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock, self.words, self.table = table(first_id=10_000)
        self.model, self.ever, self.early = {}, [], set()

    @rule(seconds=st.integers(0, 20), name=st.sampled_from("ab"), id=st.none() | st.integers(1, 6))
    def hold(self, seconds, name, id):
        try:
            lease = self.table.hold(name, seconds, id)
        except OutOfLeases:
            assert len(self.model) == SLOTS and id not in self.early
        except ValueError:
            assert id in self.model
        else:
            assert lease.ended == (id in self.early)
            self.early.discard(id)
            if not lease.ended:
                self.model[lease.id] = lease
                self.ever.append(lease.id)

    @rule(data=st.data())
    def end(self, data):
        id = data.draw(st.sampled_from([*range(1, 7), *self.ever]))
        lease = self.model.pop(id, None)
        assert (self.table.end(id) is None) == (lease is None)
        if lease is None and id < 10_000:
            self.early.add(id)

    @rule(data=st.data(), seconds=st.integers(0, 20))
    def renew(self, data, seconds):
        id = data.draw(st.sampled_from([1, *self.ever]))
        assert self.table.renew(id, seconds) == (id in self.model)
        if id in self.model:
            self.model[id] = leases.Lease(id, self.model[id].slot, self.model[id].request_id, self.clock.now + seconds)

    @rule(seconds=st.integers(0, 15))
    def time_passes(self, seconds):
        self.clock.now += seconds
        out = self.table.expired(self.clock.now)
        assert [lease.expires_s for lease in out] == sorted(lease.expires_s for lease in out)
        assert {lease.id for lease in out} == {id for id, lease in self.model.items() if lease.expires_s <= self.clock.now}
        for lease in out:
            del self.model[lease.id]

    @invariant()
    def words_say_what_is_held(self):
        wanted = [0] * SLOTS
        for lease in self.model.values():
            assert wanted[lease.slot] == 0
            wanted[lease.slot] = lease.id
        assert self.words == wanted and len(self.table) == len(self.model)
        assert self.table.next_expiry_s == min((lease.expires_s for lease in self.model.values()), default=None)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
