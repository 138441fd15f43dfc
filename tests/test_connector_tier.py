"""A tier behind a worker's connector: what it brings lands, short or late or never, and what it takes stays in the pool until it is copied."""
from types import SimpleNamespace

import pytest

from minengine.kv.tier_open import open_stack
from minengine.request import Status
from test_engine import alone, assert_same, prompt
from workers import Worker

IDS = prompt(199, 70, 1)


class HandJob:
    def __init__(self, kind, hashes, block_ids, done):
        self.kind, self.hashes, self.block_ids, self.done = kind, list(hashes), list(block_ids), done
        self.num_blocks, self.num_bytes, self.media, self.cancelled = 0, 0, {"host": 0}, False
        self.begun = self.ended = False
        self.queued_s = self.start_s = self.end_s = 1.0

    def cancel(self):
        if self.ended:
            return True
        self.cancelled = True
        self.ended = not self.begun
        return self.ended

    def end(self, num_blocks=0):
        self.num_blocks, self.ended = num_blocks, True
        self.done(self)


class HandTier:
    """Says that it has everything, and does what the test tells it."""

    tiers = ()

    def __init__(self, engine):
        self.jobs, self.has = [], True

    def find(self, hashes):
        return len(hashes) if self.has else 0

    def load(self, hashes, block_ids, done):
        self.jobs.append(HandJob("load", hashes, block_ids, done))
        return self.jobs[-1]

    def store(self, hashes, block_ids, done):
        self.jobs.append(HandJob("store", hashes, block_ids, done))
        return self.jobs[-1]

    def of(self, kind):
        return [job for job in self.jobs if job.kind == kind and not job.ended]

    def close(self):
        self.has = False


@pytest.fixture
def make():
    made = []

    def make(tier=HandTier, **options):
        made.append(Worker("llama", "t", agent="shm", tier=tier, **options))
        return made[-1], made[-1].connector.tier

    yield make
    for worker in made:
        worker.close()


def finish(w, tier, name="r", family=1):
    """To its end, with all stores done at once."""
    def done():
        for job in tier.of("store"):
            job.end()
        return w.finished(name)
    w.until(done)
    assert_same(w.tokens(name), *alone("llama", "float32", 70, family, 8))
    for job in tier.of("store"):
        job.end()
    w.clean()


@pytest.mark.parametrize("admission", ["poll", "event"])
@pytest.mark.parametrize("num_blocks", [0, 2])
def test_a_load_that_lands_short_is_computed_from_there(make, admission, num_blocks):
    """What did land must be right: here it is copied from a run before."""
    w, tier = make(load_admission=admission)
    tier.has = False
    w.add("before", IDS)
    finish(w, tier, "before")
    rows = {}
    for i, h in enumerate(w.engine.pool.find(w.add("hashes", IDS).hashes(4, 16))):
        rows[i] = h
    w.engine.abort_request("hashes")
    saved = {i: w.engine.kv.storage.clone() for i in rows}
    w.engine.reset_prefix_cache()
    tier.has = True
    request = w.add("r", IDS)
    w.until(lambda: tier.of("load"))
    job, = tier.of("load")
    assert request.status is Status.LOADING and len(job.hashes) == 4
    copy_blocks(w, saved[0], [rows[i] for i in range(num_blocks)], job.block_ids[:num_blocks]) if num_blocks else None
    job.end(num_blocks)
    finish(w, tier)
    assert request.num_cached_tokens == 16 * num_blocks and w.connector.totals.tier_loaded_blocks == num_blocks


def copy_blocks(w, storage, sources, targets):
    for source, target in zip(sources, targets):
        for (start, length), (to, _) in zip(w.engine.kv.kv_layout.regions([source]), w.engine.kv.kv_layout.regions([target])):
            w.engine.kv.storage[to: to + length] = storage[start: start + length]


@pytest.mark.parametrize("admission", ["poll", "event"])
def test_an_abort_while_a_block_is_being_written_waits_for_it_and_before_that_does_not(make, admission):
    w, tier = make(load_admission=admission)
    for name in ("waits", "moves"):
        w.add(name, IDS)
        w.until(lambda: tier.of("load"))
        job, = tier.of("load")
        job.begun = name == "moves"
        w.engine.abort_request(name)
        assert bool(w.scheduler.loads.quarantine) == (name == "moves")
        if name == "moves":
            assert w.engine.num_free_blocks == w.engine.pool.num_blocks - 5
            job.end()
        w.clean()
    tier.has = False
    w.add("r", IDS)
    finish(w, tier)


def test_a_load_that_ended_and_was_given_up_before_poll_saw_it_is_nothing(make):
    w, tier = make()
    w.add("r", IDS)
    w.until(lambda: tier.of("load"))
    tier.of("load")[0].end(4)
    w.engine.abort_request("r")
    assert w.connector.poll() == 0
    w.clean()


def test_blocks_stay_while_they_are_copied_and_are_free_afterwards(make):
    w, tier = make()
    tier.has = False
    w.add("r", IDS)
    w.until(lambda: w.finished("r"))
    stored = [block for job in tier.of("store") for block in job.block_ids]
    assert len(stored) == 4 and not w.connector.idle and w.engine.num_free_blocks == w.engine.pool.num_blocks - 4
    for job in tier.of("store"):
        job.end(len(job.block_ids))
    w.clean()
    assert w.connector.totals.tier_stored_blocks == 4


def test_blocks_that_no_tier_keeps_are_counted_and_logged_once(make, caplog):
    w, tier = make()
    tier.has, tier.tiers = False, [SimpleNamespace(last_refusal="disk: No space left on device")]
    for name in ("a", "b"):
        w.add(name, prompt(199, 70, ord(name)))
        w.until(lambda: w.finished(name))
    for job in tier.of("store"):
        job.end(1)
    w.clean()
    totals = w.connector.totals
    assert totals.tier_stored_blocks == len(tier.jobs) and totals.tier_stored_blocks + totals.tier_refused_blocks == 8
    assert [record.getMessage() for record in caplog.records] == ["a tier does not keep what it is given: disk: No space left on device"]


@pytest.mark.parametrize("admission", ["poll", "event"])
def test_the_four_parts_of_a_wait_are_stamped_in_order_with_a_real_tier(make, admission, tmp_path):
    def stack(engine):
        return open_stack(host_tier_bytes=0, disk_tier_bytes=1 << 24, tier_path=str(tmp_path), model=engine.model, kv_layout=engine.kv.kv_layout,
                          kv_cache_dtype=engine.kv.kv_cache_dtype, storage=engine.kv.storage)

    w, tier = make(tier=stack, load_admission=admission)
    w.add("before", IDS)
    w.until(lambda: w.finished("before"))
    assert tier.wait_idle(30)
    w.engine.reset_prefix_cache()
    request = w.add("r", IDS)
    w.until(lambda: w.finished("r"))
    assert request.num_cached_tokens == 64 and all(part >= 0 for part in request.timeline.wait_parts())
    facts = [facts for facts in w.connector.take_facts() if facts.kind == "tier"]
    assert [(one.request_id, one.num_blocks, one.peer, one.outcome) for one in facts] == [("r", 4, "disk", "landed")]
    assert_same(w.tokens("r"), *alone("llama", "float32", 70, 1, 8))
    w.clean()
