"""What can go wrong between two workers that pull: the other requests finish right, every block returns on both sides, no token is wrong."""
import pytest

from minengine.disagg.leases import OutOfLeases
from minengine.disagg.source import Notice
from minengine.request import Status
from gated import Gated
from test_engine import alone, assert_same, prompt
from workers import prefilled, so_far, workers

IDS = prompt(199, 60, 1)  # of most requests here


class Hand:
    """A clock that stands still until it is set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def gated(**more):
    """A pair whose agents have a gate, with the agent that every machine has."""
    return workers(**{"agent": "shm", "wrap": Gated, **more})


def check_answer(p, d, name="r", ids=60, family=1, max_tokens=8):
    assert_same(p.tokens(name) + d.tokens(name), *alone("llama", "float32", ids, family, max_tokens))


def hand_over(p, d, name="r", ids=IDS, **more):
    source, resume = prefilled(p, name, ids, **more)
    return source, d.add(name, ids, resume=resume, source=source, **more)


def tell(sender, receiver, notice):
    sender.agent.connect(receiver.connector.facts.metadata)
    sender.agent.notify(receiver.agent.name, notice.encode())


def heard(worker, notice_of, teller):
    """A notice of somebody else that comes after those before it: once it is here, they are."""
    before = worker.connector.totals.strange_notices
    teller.agent.notify(worker.agent.name, b"nobody understands this")
    worker.until(lambda: worker.connector.totals.strange_notices > before, turn=False)


# --- notices ---------------------------------------------------------------------------------------------------------

def test_a_notice_that_comes_before_its_lease_is_kept_for_it_and_touches_no_other():
    with gated() as (p, d):
        other, _ = prefilled(p, "other", prompt(199, 40, 2))
        tell(d, p, Notice("fetch", 12345))
        heard(p, None, d)
        assert p.engine.held("other") is not None and int(p.connector.io.words[other.lease_slot]) == other.lease_id
        with p.engine.lock:
            assert p.connector.holds.table.hold("early", 1.0, id=12345).ended
        p.connector.release("other")
        p.clean()


def test_a_notice_that_comes_twice_or_long_after_ends_nothing_else():
    with gated() as (p, d):
        source, _ = hand_over(p, d)
        d.until(lambda: d.finished("r"))
        p.until(lambda: p.connector.idle)
        again, _ = prefilled(p, "again", prompt(199, 50, 4))
        assert again.lease_slot == source.lease_slot and again.lease_id != source.lease_id
        for _ in range(2):
            tell(d, p, Notice("fetch", source.lease_id))
        heard(p, None, d)
        assert p.engine.held("again") is not None
        d.add("again", prompt(199, 50, 4), resume=so_far(p, "again"), source=again)
        d.until(lambda: d.finished("again"))
        check_answer(p, d, "again", 50, 4)
        p.clean(), d.clean()


def test_a_lost_notice_costs_blocks_only_until_the_lease_ends():
    with gated(prefill=dict(clock=Hand()), decode=dict()) as (p, d):
        d.agent.lost = True
        hand_over(p, d)
        d.until(lambda: d.finished("r"))
        d.clean()
        assert p.engine.held("r") is not None and not p.connector.idle
        p.engine.clock.now += 31
        p.clean()
        assert p.connector.totals.leases_expired == 1
        check_answer(p, d)


# --- leases ----------------------------------------------------------------------------------------------------------

def refill(p):
    """Overwrite every block of a prefill worker with rows of others."""
    p.engine.reset_prefix_cache()
    for i in range(4):
        p.add(f"refill{i}", prompt(199, 90, 10 + i), 2)
    p.until(lambda: all(p.finished(f"refill{i}") for i in range(4)))


@pytest.mark.parametrize("when", ["before the read", "between the rows and the word"])
def test_rows_of_a_lease_that_has_ended_are_thrown_away(when):
    with gated(prefill=dict(clock=Hand(), num_gpu_blocks_override=12)) as (p, d):
        source, resume = prefilled(p, "r", IDS)
        d.agent.shut = {"READ"}
        if when != "before the read":
            d.agent.only = lambda pieces: pieces.total_bytes == 8  # the word
        d.add("r", IDS, resume=resume, source=source)
        d.until(lambda: d.agent.put_off)
        p.engine.clock.now += 31
        p.clean()
        refill(p)
        d.agent.shut = set()
        d.until(lambda: d.finished("r"))
        assert d.connector.take_facts()[0].outcome == "expired"
        check_answer(p, d)
        d.clean()


def test_leases_may_run_out_in_another_order_than_they_were_made():
    with gated(prefill=dict(clock=Hand())) as (p, d):
        leases = {}
        for name, seconds in (("long", 60), ("short", 10), ("middle", 30)):
            p.connector.holds.lease_s = seconds
            leases[name], _ = prefilled(p, name, prompt(199, 40, len(leases)))
        for seconds, left in ((11, {"long", "middle"}), (20, {"long"}), (30, set())):
            p.engine.clock.now += seconds
            p.until(lambda: set(p.scheduler.held) == left, turn=False)
            words = {name for name, source in leases.items() if int(p.connector.io.words[source.lease_slot]) == source.lease_id}
            assert words == left
        p.clean()


def test_an_aborted_request_keeps_its_blocks_while_its_lease_says_so():
    """The front gives a held request up while a decoder reads: the word is 0 before a block can be anybody else's."""
    with gated(prefill=dict(num_gpu_blocks_override=12)) as (p, d):
        d.agent.shut = {"READ"}
        source, _ = hand_over(p, d)
        d.until(lambda: d.agent.put_off)
        with p.engine.lock:  # the I/O thread cannot have looked yet
            p.engine.abort_request("r")
            assert p.engine.num_free_blocks == p.engine.pool.num_blocks - len(source.block_ids)
            assert int(p.connector.io.words[source.lease_slot]) == source.lease_id
        p.clean()
        assert int(p.connector.io.words[source.lease_slot]) == 0
        refill(p)
        d.agent.shut = set()
        d.until(lambda: d.finished("r"))
        assert d.connector.take_facts()[0].outcome == "expired"
        check_answer(p, d)
        d.clean()


def test_more_leases_than_words_are_refused_and_change_nothing(monkeypatch):
    monkeypatch.setattr("minengine.disagg.kv_io.NUM_WORDS", 1)
    with gated() as (p, d):
        prefilled(p, "one", IDS)
        with pytest.raises(OutOfLeases):
            prefilled(p, "two", prompt(199, 40, 2))
        with pytest.raises(KeyError):
            p.connector.hold("nobody")
        p.engine.release_request("two")
        p.connector.release("one")
        p.clean()


# --- transfers -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("admission", ["poll", "event"])
def test_a_transfer_that_never_ends_is_given_up_and_its_blocks_stay_out_of_use_until_it_does(admission):
    with gated(decode=dict(clock=Hand(), load_admission=admission, num_gpu_blocks_override=14)) as (p, d):
        d.agent.shut = {"READ"}
        _, request = hand_over(p, d)
        d.until(lambda: d.agent.put_off)
        blocks = set(request.block_ids)
        d.engine.clock.now += 61
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        assert set(*d.scheduler.loads.quarantine.values()) == blocks and d.engine.num_free_blocks == 14 - len(blocks)
        for i in range(3):  # others use what is left, and get right answers
            d.add(f"o{i}", prompt(199, 50, i), 6)
        d.until(lambda: all(d.finished(f"o{i}") for i in range(3)))
        d.agent.shut = set()  # now the bytes come, into blocks that are nobody's
        d.clean()
        for i in range(3):
            assert_same(d.tokens(f"o{i}"), *alone("llama", "float32", 50, i, 6))
        facts = [facts.outcome for facts in d.connector.take_facts()]
        assert facts == ["timeout"]
        p.clean()


def test_a_transfer_that_fails_is_computed_or_refused_as_the_policy_says():
    for policy in ("recompute", "fail"):
        with gated(decode=dict(kv_load_failure_policy=policy)) as (p, d):
            d.agent.fail = {"READ"}
            hand_over(p, d)
            d.add("other", prompt(199, 40, 3), 8)
            d.until(lambda: d.finished("r") and d.finished("other"))
            if policy == "recompute":
                check_answer(p, d)
            else:
                last = d.outputs["r"][-1]
                assert last.outputs[0].finish_reason == "error" and "was made to fail" in last.error
            assert_same(d.tokens("other"), *alone("llama", "float32", 40, 3, 8))
            p.clean(), d.clean()


@pytest.mark.parametrize("agent", ["shm", "nixl"])
def test_a_dead_worker_is_not_waited_for(agent):
    with gated(agent=agent) as (p, d):
        d.agent.shut = {"READ"}
        hand_over(p, d)
        hand_over(p, d, "later", prompt(199, 40, 2))
        d.until(lambda: len(d.agent.put_off) == 2)
        p.connector.close()
        p.agent.close()
        d.agent.shut = set()
        d.connector.peer_gone(p.agent.name)
        d.until(lambda: d.finished("r") and d.finished("later"))
        check_answer(p, d), check_answer(p, d, "later", 40, 2)
        d.clean()
        # whoever still sends its sources is answered by computing
        d.add("again", IDS, resume=so_far(p, "r"), source=p_source(p, "r"))
        d.until(lambda: d.finished("again"))
        d.clean()


def p_source(p, name):
    """The source that a lease of a worker which is gone would have had."""
    held = next(held for held in p.connector.holds._held.values() if held.request.request_id == name)
    lease = p.connector.holds.table.of(name)[0]
    from minengine.disagg.source import KVSource

    return KVSource(p.connector.facts, held.block_ids, 60, lease.id, lease.slot)


# --- aborts ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("admission", ["poll", "event"])
@pytest.mark.parametrize("when", ["queued", "in transfer", "landed", "ready", "decoding"])
def test_an_abort_at_any_point_gives_the_blocks_of_both_sides_back(when, admission):
    with gated(decode=dict(num_gpu_blocks_override=8, load_admission=admission)) as (p, d):
        d.add("other", prompt(199, 33, 3), 24)
        d.until(lambda: "other" in d.outputs)
        if when == "queued":
            d.add("large", prompt(199, 60, 5), 2)
            d.until(lambda: "large" in d.outputs or d.engine.requests["large"].status is Status.RUNNING)
        if when == "in transfer":
            d.agent.shut = {"READ"}
        _, request = hand_over(p, d, ids=prompt(199, 40, 1))
        if when == "queued":
            assert request.status is Status.WAITING
        elif when == "in transfer":
            d.until(lambda: d.agent.put_off)
        elif when == "landed":
            d.engine.scheduler.start_load(request)
            d.until(lambda: request.status is Status.READY or d.connector._landed, turn=False)
        elif when == "ready":
            d.engine.scheduler.start_load(request)
            d.until(lambda: d.connector.poll() or request.status is Status.READY, turn=False)
        else:
            d.until(lambda: len(d.tokens("r")) > 2)
        d.engine.abort_request("r")
        assert request.finished and request.finish_reason == "abort"
        if when == "in transfer":
            assert d.scheduler.loads.quarantine
            d.agent.shut = set()
        if when == "queued":
            p.connector.release("r")  # the front's part: the decoder has not asked for the rows yet
        d.until(lambda: d.finished("other"))
        assert_same(d.tokens("other"), *alone("llama", "float32", 33, 3, 24))
        d.until(lambda: not d.engine.has_unfinished_requests())
        p.clean(), d.clean()


def test_the_same_id_may_come_again_while_its_first_load_is_still_under_way():
    with gated() as (p, d):
        d.agent.shut = {"READ"}
        hand_over(p, d)
        d.until(lambda: d.agent.put_off)
        d.engine.abort_request("r")
        first = d.agent.put_off[0]
        d.agent.shut = set()
        d.agent.poll = lambda transfer, poll=d.agent.poll: "PROC" if transfer is first else poll(transfer)
        d.agent.release = lambda transfer, release=d.agent.release: transfer is not first and release(transfer)
        p.until(lambda: True)
        d.add("r", IDS, resume=so_far(p, "r"))  # continued without a source
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        assert len(d.scheduler.loads.quarantine) == 1
        del d.agent.poll, d.agent.release
        p.clean(), d.clean()


def test_a_landed_load_that_was_given_up_is_not_taken_for_the_next_of_that_id():
    with gated() as (p, d):
        _, request = hand_over(p, d)
        d.scheduler.start_load(request)
        d.until(lambda: d.connector._landed, turn=False)
        d.engine.abort_request("r")
        p.clean()
        p.outputs.clear()
        d.agent.shut = {"READ"}
        _, again = hand_over(p, d)
        d.scheduler.start_load(again)
        assert d.connector.poll() == 0 and again.status is Status.LOADING
        d.agent.shut = set()
        d.until(lambda: d.finished("r"))
        check_answer(p, d)
        p.clean(), d.clean()
