"""What bounds a wait, and what bounds how long the thread that moves rows is away."""
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.disagg import kv_io
from minengine.disagg.pieces import Pieces
from minengine.disagg.source import Reserve
from minengine.disagg.worker import WorkerLoop
from minengine.request import Status
from gated import Gated
from test_connector_faults import IDS, Hand, check_answer, gated, hand_over
from test_engine import alone, assert_same, prompt
from workers import prefilled, so_far, workers


# --- leases ----------------------------------------------------------------------------------------------------------

def test_a_renewed_lease_outlives_those_made_with_it_and_an_ended_one_is_not_revived():
    with gated(prefill=dict(clock=Hand())) as (p, d):
        source, resume = prefilled(p, "r", IDS)
        prefilled(p, "other", prompt(199, 40, 2))
        p.engine.clock.now += 20
        p.connector.renew("r")
        p.connector.renew("nobody")
        p.engine.clock.now += 20
        p.until(lambda: set(p.scheduler.held) == {"r"}, turn=False)
        p.connector.renew("other")
        assert (p.connector.totals.renewals, p.connector.totals.leases_expired) == (1, 1)
        d.add("r", IDS, resume=resume, source=source)
        d.until(lambda: d.finished("r"))
        assert d.connector.take_facts()[0].outcome == "landed"
        check_answer(p, d)
        p.clean(), d.clean()


class Wire:
    """What a worker says to the front."""

    def __init__(self):
        self.said = []

    def send_bytes(self, data):
        self.said.append(pickle.loads(data))


def test_a_worker_whose_leases_are_all_taken_lets_the_request_go_to_be_computed_elsewhere(monkeypatch):
    monkeypatch.setattr(kv_io, "NUM_WORDS", 2)
    with gated() as (p, d):
        loop = WorkerLoop(Wire())
        loop.engine, loop.connector = p.engine, p.connector
        for i in range(4):
            p.add(f"{i}", prompt(199, 40, i), hold=True)
        while len(p.outputs) < 4:
            loop._report(p.turn())
        held = {each.key: each.source for report in loop._connection.said for each in report.held}
        assert set(held) == set("0123") and sum(source is None for source in held.values()) == 2
        for name, source in held.items():
            assert (p.engine.held(name) is None) == (source is None)
            d.add(name, prompt(199, 40, int(name)), resume=so_far(p, name), source=source)
        d.until(lambda: all(map(d.finished, held)))
        for name in held:
            check_answer(p, d, name, 40, int(name))
        assert d.connector.totals.landed == p.connector.totals.holds == 2
        p.clean(), d.clean()


# --- a decoder that nobody writes to ---------------------------------------------------------------------------------

@pytest.mark.parametrize("admission", ["poll", "event"])
def test_a_reservation_of_which_nothing_is_said_ends_with_the_time_of_a_lease(admission):
    with workers(agent="shm", wrap=Gated, kv_transfer="push_layers", decode=dict(clock=Hand(), load_admission=admission)) as (p, d):
        request = d.add("r", IDS, source=Reserve(p.connector.facts))
        d.until(lambda: d.reserved)
        d.until(lambda: d.connector._moving[0].word_by_s, turn=False)
        d.engine.clock.now += 29
        d.turn()
        assert request.status is Status.LOADING and not d.outputs
        d.engine.clock.now += 2
        d.until(lambda: d.finished("r"))
        assert_same(d.tokens("r"), *alone("llama", "float32", 60, 1, 8))
        assert d.connector.resume("r", so_far(d, "r")) is False
        facts, = d.connector.take_facts()
        assert facts.outcome == "timeout" and "nobody has said within 30 s" in facts.error
        p.until(lambda: p.connector.pushes._stopped, turn=False)  # the word takes its time
        assert p.connector.push_to("r", d.reserved.pop()[1]) is False  # it has been called off meanwhile
        p.clean(), d.clean()


# --- parts -----------------------------------------------------------------------------------------------------------

@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 120))
def test_parts_are_the_same_bytes_in_the_same_order(lengths, most):
    import numpy as np

    nbytes = np.array(lengths, np.int64)
    src, dst = np.arange(len(lengths)) * 1000, np.arange(len(lengths))[::-1] * 1000
    whole = Pieces(src, dst, nbytes, asked=99)
    parts = whole.split(most)

    def every(pieces):
        return [(at + i, to + i) for at, to, n in zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.nbytes.tolist()) for i in range(n)]

    assert [byte for part in parts for byte in every(part)] == every(whole)
    assert sum(part.asked for part in parts) == 99 and len(parts) == max(1, -(-sum(lengths) // most))
    assert all(0 < part.total_bytes <= most and part.nbytes.min() > 0 for part in parts) or not lengths


@pytest.mark.parametrize("agent", ["nixl", "shm"])
def test_a_large_read_goes_in_parts_with_a_look_at_everything_else_in_between(monkeypatch, agent):
    monkeypatch.setattr(kv_io, "PART_BYTES", 4000)
    with gated(agent=agent, decode=dict(clock=Hand())) as (p, d):
        sizes, read = [], d.agent.read
        d.agent.read = lambda peer, address, pieces, **more: (sizes.append(pieces.total_bytes), read(peer, address, pieces, **more))[1]
        hand_over(p, d)
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        total = 4 * d.engine.kv.kv_layout.block_bytes
        assert sizes == [4000] * (total // 4000) + [total % 4000] * (total % 4000 > 0) + [8]
        facts, = d.connector.take_facts()
        assert facts.nbytes == total and facts.asked == 4 * 3 and facts.nixl_descriptors == facts.merged >= len(sizes) - 1
        # one that takes too long, or is given up, is not gone on with
        for name, family in (("late", 2), ("aborted", 3)):
            sizes.clear()
            d.agent.shut, d.agent.only = {"READ"}, lambda pieces: len(sizes) == 3
            hand_over(p, d, name, prompt(199, 60, family))
            d.until(lambda: len(sizes) == 3)
            if name == "late":
                d.engine.clock.now += 61
                d.until(lambda: d.finished("late"))
                check_answer(p, d, "late", 60, 2)
            else:
                d.engine.abort_request(name)
            d.agent.shut = set()
            d.until(lambda: d.connector.idle)
            assert len(sizes) == 3
        # an agent that copies while it is asked to begin is never found under way: the time is looked at between two parts
        sizes.clear()
        d.agent.only = lambda pieces: False
        asked = d.agent.read
        d.agent.read = lambda *given, **more: (setattr(d.engine.clock, "now", d.engine.clock.now + 20), asked(*given, **more))[1]
        hand_over(p, d, "slow", prompt(199, 60, 4))
        d.until(lambda: d.finished("slow"))
        check_answer(p, d, "slow", 60, 4)
        assert d.connector.take_facts()[-1].outcome == "timeout" and len(sizes) < 5
        p.clean(), d.clean()
