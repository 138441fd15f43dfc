"""The scheduler with a connector: loads that land, land short, fail, come too late; holds; copies on their way out; all at any moment of a step.

The pool has content here: each row remembers which tokens it was computed from. So a block that is handed out while somebody still writes to
it, or found before it is right, shows as a row that does not belong to the request that reads it.
"""
import pytest
from hypothesis import assume, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minengine.kv.blocks import BlockPool
from minengine.request import Request, Resume, SamplingParams, Status
from minengine.schedule import Scheduler

SIZE = 4
GARBAGE = "garbage"
ROWS_ELSEWHERE, ROWS_TO_COME = "another engine has its rows", "another engine will write its rows"


def next_token(token_ids):
    """What this model answers: a number that depends on all that came before."""
    return hash(tuple(token_ids)) % 40


def row(token_ids, i):
    """What token i's row holds: it depends on all tokens up to it."""
    return tuple(token_ids[: i + 1])


class Load:
    def __init__(self, request, block_ids, first, hashes):
        self.request, self.block_ids, self.first, self.source = request, list(block_ids), first, request.source
        rows = len(hashes) * SIZE if self.source is None else request.num_tokens - (self.source == ROWS_ELSEWHERE) - first * SIZE
        self.asked = -(-rows // SIZE)
        self.written = self.block_ids[first: first + self.asked]


class Connector:
    """A tier (hashes alone), another engine, and a memory of what was asked. `quiet`: what cancel() answers."""

    def __init__(self, rows):
        self.rows, self.quiet = rows, True
        self.tier, self.loads, self.cancelled, self.stores = set(), {}, {}, []

    def find(self, hashes):
        return next((i for i, h in enumerate(hashes) if h not in self.tier), len(hashes))

    def load(self, request, block_ids, num_cached_blocks, hashes):
        assert request.may_load and request not in self.loads and request not in self.cancelled
        assert not (hashes and request.source)
        load = self.loads[request] = Load(request, block_ids, num_cached_blocks, hashes)
        self.spoil(load)

    def spoil(self, load):
        for block in load.written:
            self.rows[block] = [GARBAGE] * SIZE

    def cancel(self, request):
        load = self.loads.pop(request)
        if not self.quiet:
            self.cancelled[request] = load
        return self.quiet

    def store(self, hashes, block_ids):
        self.stores.append((list(hashes), list(block_ids), [list(self.rows[block]) for block in block_ids]))


class Machine(RuleBasedStateMachine):
    """Rules come in any order; what a step computes lies between `begin` and `end`, and other rules may come between them."""

    @initialize(blocks=st.integers(6, 20), seqs=st.integers(1, 4), extra=st.integers(0, 20), admission=st.sampled_from(["poll", "event"]),
                policy=st.sampled_from(["recompute", "fail"]), caching=st.sampled_from([True, True, False]))
    def build(self, blocks, seqs, extra, admission, policy, caching):
        self.rows = [[GARBAGE] * SIZE for _ in range(blocks)]
        self.connector = Connector(self.rows)
        self.s = Scheduler(BlockPool(blocks, SIZE, caching), max_num_batched_tokens=seqs + extra, max_num_seqs=seqs, connector=self.connector,
                           load_admission=admission, kv_load_failure_policy=policy)
        self.requests, self.step, self.policy = [], None, policy

    # --- requests come and go

    @rule(prompt=st.integers(1, 30), family=st.integers(0, 1), max_tokens=st.integers(1, 14),
          kind=st.sampled_from(["plain", "plain", "hold", "pulled", "pulled", "pushed", "resumed"]))
    def add(self, prompt, family, max_tokens, kind):
        ids = [family * 100 + i for i in range(prompt)]
        assume(self.s.pool.blocks_for(prompt + 2) <= self.s.pool.num_blocks)
        given = [next_token(ids)] if kind in ("pulled", "resumed") and max_tokens > 1 else []
        source = ROWS_ELSEWHERE if given and kind == "pulled" else ROWS_TO_COME if kind == "pushed" and max_tokens > 1 else None
        request = Request(f"{len(self.requests)} {kind}", ids, SamplingParams(max_tokens=max_tokens), max_model_len=1000, hold=kind == "hold",
                          resume=Resume(output_token_ids=tuple(given)) if given else None, source=source)
        self.requests.append(request)
        self.s.add(request)

    @rule(i=st.integers(0, 50), quiet=st.booleans())
    def abort(self, i, quiet):
        there = [r for r in self.requests if not r.finished and not self.computed(r)]
        assume(there)
        self.connector.quiet = quiet
        request = there[i % len(there)]
        for _ in range(2):
            self.s.abort(request)
        assert request.finish_reason == "abort"

    @rule(i=st.integers(0, 50))
    @precondition(lambda self: self.s.held)
    def release(self, i):
        request = list(self.s.held.values())[i % len(self.s.held)]
        self.expect_rows(request, request.num_tokens - 1)  # whoever has read them until now has read these
        assert self.s.release(request.request_id) is request and self.s.release(request.request_id) is None
        assert request.finish_reason == "handed_over"

    # --- steps

    @rule()
    @precondition(lambda self: self.step is None)
    def begin(self):
        s = self.s
        could_decode = [r for r in s.running if r.num_tokens - r.num_computed_tokens == 1]
        oldest = s.running[0] if s.running else None
        self.step = s.schedule()
        assert self.step.num_tokens <= s.max_num_batched_tokens
        for r in could_decode:
            assert r in self.step.decodes + self.step.preempted + self.step.failed, f"{r} could decode and was left out"
        assert oldest is None or oldest not in self.step.preempted or not self.step.decodes, "the oldest gave way to a younger one"
        for r, _ in self.work():
            for block in r.block_ids[r.num_computed_tokens // SIZE:]:
                assert s.pool.ref_counts[block] == 1, f"{r} writes to a block that is shared"

    @rule()
    @precondition(lambda self: self.step is not None)
    def end(self):
        for r, n in self.work():
            self.expect_rows(r, r.num_computed_tokens)
            self.fill(r, r.num_computed_tokens, r.num_computed_tokens + n)
        sampled = self.step.sampled()
        step, self.step = self.step, None
        self.s.update(step, [next_token(r.token_ids) for r in sampled])

    def work(self):
        return [(r, 1) for r in self.step.decodes] + list(self.step.prefills)

    def computed(self, request):
        return self.step is not None and any(r is request for r, _ in self.work())

    def fill(self, request, start, stop, block_ids=None):
        for i in range(start, stop):
            (block_ids or request.block_ids)[i // SIZE]  # it has one
            self.rows[(block_ids or request.block_ids)[i // SIZE]][i % SIZE] = row(request.token_ids, i)

    def expect_rows(self, request, n):
        for i in range(n):
            assert self.rows[request.block_ids[i // SIZE]][i % SIZE] == row(request.token_ids, i), f"row {i} of {request} is not its own"

    # --- loads

    @rule(i=st.integers(0, 50), missing=st.sampled_from([0, 0, 0, 1, 2, 99]))
    @precondition(lambda self: self.connector.loads)
    def land(self, i, missing):
        request = list(self.connector.loads)[i % len(self.connector.loads)]
        load = self.connector.loads.pop(request)
        if load.source is not None:
            missing = 0
        if load.source == ROWS_TO_COME:
            request.resume(Resume(output_token_ids=(next_token(request.token_ids),)))
        num_blocks = max(0, load.asked - missing)
        last = min((load.first + num_blocks) * SIZE, request.num_tokens - 1)
        self.fill(request, load.first * SIZE, last, load.block_ids)
        self.s.landed(request, num_blocks)
        assert request.status is Status.READY and request.num_computed_tokens == max(last, load.first * SIZE) and request.source is None
        self.expect_rows(request, request.num_computed_tokens)
        self.s.landed(request, 0)  # twice is harmless

    @rule(i=st.integers(0, 50), settled=st.booleans())
    @precondition(lambda self: self.connector.loads)
    def fail(self, i, settled):
        request = list(self.connector.loads)[i % len(self.connector.loads)]
        load = self.connector.loads.pop(request)
        if not settled:
            self.connector.cancelled[request] = load
        self.s.load_failed(request, error="the wire broke", settled=settled)
        if self.policy == "fail":
            assert request.finish_reason == "error" and "the wire broke" in request.error
        else:
            assert request.status is Status.WAITING and not request.may_load and request.source is None

    @rule(i=st.integers(0, 50), how=st.sampled_from(["settled", "landed", "failed"]))
    @precondition(lambda self: self.connector.cancelled)
    def settle(self, i, how):
        """Late, and perhaps as if it were still wanted; until then it has written."""
        request = list(self.connector.cancelled)[i % len(self.connector.cancelled)]
        self.connector.spoil(self.connector.cancelled.pop(request))
        status = request.status
        report = {"settled": lambda: self.s.settled(request), "landed": lambda: self.s.landed(request, 1), "failed": lambda: self.s.load_failed(request)}
        for _ in range(2):
            report[how]()
        assert request.status is status or status is Status.WAITING

    @rule(i=st.integers(0, 50))
    @precondition(lambda self: self.connector.stores)
    def stored(self, i):
        hashes, blocks, rows = self.connector.stores.pop(i % len(self.connector.stores))
        assert [self.rows[block] for block in blocks] == rows and GARBAGE not in sum(rows, []), "what is copied has changed"
        self.s.stored(blocks)
        with pytest.raises(ValueError, match="nobody stores"):
            self.s.stored(blocks * 99)
        self.connector.tier.update(hashes)

    @rule(keep=st.integers(0, 3))
    def tier_forgets(self, keep):
        self.connector.tier = set(sorted(self.connector.tier)[:keep])

    @rule()
    def pool_forgets(self):
        self.s.pool.reset_prefix_cache()

    # --- what always holds

    @invariant()
    def whole(self):
        if not hasattr(self, "s"):
            return
        self.s.check()
        connector = self.connector
        tables = {r: r.block_ids for r in self.requests if r.block_ids}
        for load in [*connector.loads.values(), *connector.cancelled.values()]:
            for block in load.written:
                assert self.s.pool.ref_counts[block] == 1, "a block that is written to has another holder, or none"
                assert all(block not in blocks for r, blocks in tables.items() if r is not load.request or load.request in connector.cancelled)
        assert set(self.s.loading.values()) == set(connector.loads)
        for r in self.requests:
            expected = list(r.prompt_token_ids)
            while len(expected) < r.num_tokens:
                expected.append(next_token(expected))
            assert r.token_ids == expected, "a token is lost or comes twice"

    def teardown(self):
        """Whatever is on its way arrives, and then everybody ends and every block returns."""
        if not hasattr(self, "s"):
            return
        for turn in range(3000):
            for name, ready in (("land", self.connector.loads), ("stored", self.connector.stores), ("release", self.s.held)):
                if ready and turn % 3:
                    getattr(self, name)(turn, 0) if name == "land" else getattr(self, name)(turn)
            if self.connector.cancelled:
                self.settle(turn, "settled")
            if self.step is not None:
                self.end()
            elif self.s.has_unfinished:
                self.begin()
                if not self.step.num_tokens:
                    self.end()
            elif not (self.s.held or self.connector.stores or self.connector.cancelled):
                break
            self.whole()
        assert all(r.finished for r in self.requests), [r for r in self.requests if not r.finished]
        for r in self.requests:
            if r.finish_reason == "length":
                assert r.num_tokens == r.num_prompt_tokens + r.params.max_tokens
            elif r.finish_reason == "error":
                assert self.policy == "fail" or self.s.pool.blocks_for(r.num_tokens) > self.s.pool.num_blocks, r.error
        self.s.pool.check([])
        assert self.s.pool.num_free_blocks == self.s.pool.num_blocks and not self.s.loads.quarantine and not self.s.loads.storing


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


# --- what the machine does not look at -----------------------------------------------------------------------


def scheduler(blocks=32, seqs=4, budget=64, **options):
    connector = Connector([[GARBAGE] * SIZE for _ in range(blocks)])
    return Scheduler(BlockPool(blocks, SIZE), max_num_batched_tokens=budget, max_num_seqs=seqs, connector=connector, **options), connector


def request(name, prompt, max_tokens=4, **options):
    return Request(name, list(range(prompt)) if isinstance(prompt, int) else prompt, SamplingParams(max_tokens=max_tokens), max_model_len=1000, **options)


def pulled(name, prompt, **options):
    return request(name, prompt, source=ROWS_ELSEWHERE, resume=Resume(output_token_ids=(7,)), **options)


def step(s, now_s=0.0):
    decision = s.schedule(now_s)
    s.update(decision, [7] * len(decision.sampled()), now_s)
    s.check()
    return decision


def test_a_load_starts_when_the_queue_is_walked_or_at_once():
    for admission in ("poll", "event"):
        s, connector = scheduler(seqs=1, load_admission=admission)
        s.add(request("runs", 4, 50))
        step(s)
        s.add(pulled("comes", 20))
        step(s)
        assert bool(connector.loads) == (admission == "event"), "with one place, and that taken, nobody walks the queue"


def test_a_loading_request_blocks_nobody_and_is_admitted_before_those_who_wait():
    s, connector = scheduler(budget=8, seqs=3)
    loads, behind, last = pulled("loads", 20), request("behind", 20), request("last", 20)
    for r in (loads, behind, last):
        s.add(r)
    first = step(s, 1.0)
    assert list(connector.loads) == [loads] and [c.request for c in first.prefills] == [behind]
    step(s, 2.0)
    s.landed(loads, 5, 2.5)
    third = step(s, 3.0)
    assert third.decodes == [loads] and third.prefills == [(behind, 4), (last, 3)]
    t = loads.timeline
    assert t.landed_s == 2.5 and t.decode_admitted_s == t.admitted_s == 3.0 and t.prefill_start_s is None
    assert (behind.timeline.prefill_start_s, behind.timeline.decode_admitted_s) == (1.0, None) and behind.timeline.prefill_end_s == behind.timeline.token_s[0]


def test_what_waits_to_be_computed_keeps_its_claim_to_blocks():
    s, connector = scheduler(blocks=8, load_admission="event")
    s.add(request("runs", 12, 20))
    step(s)
    cold, late = request("cold", 20), pulled("late", 8)
    s.add(cold)
    s.add(late)
    assert s.pool.num_free_blocks == 5 and not connector.loads, "its three blocks are there, and the one before it needs five"
    s.abort(cold)
    assert list(connector.loads) == [late]


def test_a_load_leaves_a_block_for_each_that_runs():
    s, connector = scheduler(blocks=8)
    s.add(request("runs", 14, 20))
    step(s)
    s.add(pulled("tight", list(range(100, 114))))
    step(s)
    assert not connector.loads and s.pool.num_free_blocks == 4, "its four blocks are there, and the one that runs will need one"
    s.abort(s.waiting[0])
    s.add(pulled("fits", list(range(100, 110))))
    step(s)
    assert len(connector.loads) == 1


def test_what_is_ready_and_does_not_run_gives_way_first():
    s, _ = scheduler(blocks=8, seqs=2)
    old, young, new = request("old", 8, 20), request("young", 4, 20), pulled("new", 4)
    s.add(old)
    s.add(new)
    step(s)
    s.add(young)
    step(s)
    assert s.running == [old, young]  # both places are taken
    s.landed(new, 1)
    while not any(r.timeline.num_preemptions for r in (old, young, new)):
        step(s)
    assert new.timeline.num_preemptions == 1 and s.waiting[0] is new


def test_a_tiers_blocks_are_not_stored_again_and_count_as_cached():
    s, connector = scheduler()
    first = request("first", 20, 1)
    s.add(first)
    step(s)
    (hashes, blocks, _), = connector.stores
    assert len(hashes) == 5 and s.pool.num_free_blocks == 32 - 5
    s.stored(blocks)
    connector.stores.clear()
    connector.tier.update(hashes[:4])
    s.pool.reset_prefix_cache()
    again, short = request("again", 20, 1), request("short", 20, 1)
    s.add(again)
    step(s)
    assert connector.loads[again].asked == 4
    s.landed(again, 4)
    step(s)
    assert again.num_cached_tokens == 16 and [len(stored[1]) for stored in connector.stores] == [1], "only the block that was computed goes out"
    s.pool.reset_prefix_cache()
    s.add(short)
    step(s)
    s.landed(short, 1)
    assert short.num_computed_tokens == 4
    step(s)
    assert short.num_cached_tokens == 4 and short.finished


def test_the_four_parts_of_a_wait():
    t = request("r", 4).timeline
    assert t.wait_parts() is None
    t.retrieve_start_s, t.retrieve_end_s, t.polled_s, t.handed_off_s = 1.0, 1.5, 1.75, 2.0
    assert t.wait_parts() is None
    t.admitted_s = 4.0
    parts = t.wait_parts()
    assert parts == (0.5, 0.25, 0.25, 2.0) and parts.admit_s == 2.0


def test_a_request_that_failed_to_load_is_told_and_stops_nobody():
    s, connector = scheduler(kv_load_failure_policy="fail")
    lost, other = pulled("lost", 20), request("other", 8)
    s.add(lost)
    s.add(other)
    step(s)
    s.load_failed(lost, error="prefill is gone")
    assert s.has_unfinished
    assert step(s).failed == [lost] and "prefill is gone" in lost.error and other.num_tokens == 10
    while s.has_unfinished:
        step(s)
    assert other.finish_reason == "length"


def test_what_is_held_leaves_the_steps_and_keeps_its_blocks():
    s, _ = scheduler()
    kept, ends = request("kept", 10, 4, hold=True), request("ends", 6, 1, hold=True)
    s.add(kept)
    s.add(ends)
    step(s)
    assert s.held == {"kept": kept} and kept.status is Status.HELD and not s.running and len(kept.block_ids) == 3
    assert ends.finish_reason == "length", "its first token was its last: nobody goes on with it"
    assert not step(s).num_tokens and not s.has_unfinished
    s.release("kept")
    assert kept.finish_reason == "handed_over" and not kept.block_ids


def test_the_last_that_runs_waits_for_blocks_that_are_elsewhere_and_does_not_fail():
    s, connector = scheduler(blocks=6)
    kept, grows = request("kept", 12, 4, hold=True), request("grows", list(range(100, 107)), 8)
    s.add(kept)
    step(s)
    s.add(grows)
    while not grows.timeline.num_preemptions:
        assert not grows.finished, grows.error
        step(s)
    assert grows.status is Status.WAITING and grows.error is None
    s.release("kept")
    for _, blocks, _ in connector.stores:
        s.stored(blocks)
    connector.stores.clear()
    while s.has_unfinished:
        step(s)
    assert grows.finish_reason == "length" and grows.num_tokens == 15


def test_what_failed_to_load_is_computed_though_the_tier_still_has_it():
    s, connector = scheduler()
    again = request("again", 20, 1)
    connector.tier.update(again.hashes(4, SIZE))
    s.add(again)
    step(s)
    del connector.loads[again]
    s.load_failed(again)
    assert step(s).prefills == [(again, 20)] and not connector.loads and again.finished
