"""The simulator's pool of runs against the engine's pool of blocks: the same scheduler on both decides the same, block by block."""
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from minengine.kv.blocks import BlockPool, OutOfBlocks
from minengine.request import Request, SamplingParams
from minengine.schedule import Scheduler
from minengine.simulate.nodes import Chain, NodePool, Run, Table
from minengine.simulate.paths import ENDLESS, cut
from minengine.simulate.requests import SimRequest, timeline

SIZE = 16


def strict(num_blocks):
    """A BlockPool that evicts strictly the least recently used block, as the pool of runs does."""
    pool = BlockPool(num_blocks, SIZE)
    pool._reserve = 0
    return pool


# --- cutting -----------------------------------------------------------------------------------------------

prompts = st.lists(st.lists(st.integers(0, 2), max_size=9).map(tuple), min_size=1, max_size=12)


@given(prompts)
def test_prompts_are_cut_into_runs_that_each_has_all_of_or_none_of(ids):
    lengths, paths = cut(ids)
    spelled = {}
    for prompt, path in zip(ids, paths):
        at = 0
        for number in path:
            begun = prompt[: at + lengths[number]]
            assert spelled.setdefault(number, begun) == begun, "a run stands for two different beginnings"
            at += lengths[number]
        assert at == len(prompt)
    assert len(set(spelled.values())) == len(spelled), "two runs stand for one beginning"
    ends = {spelled[number] for path in paths for number in path}
    needed = {prompt for prompt in ids if prompt} | {a[:n] for a in ids for b in ids for n in [common(a, b)] if 0 < n}
    assert ends == needed, "there are more cuts than where prompts end or part, or fewer"


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --- the two pools under the same scheduler ------------------------------------------------------------------

class Both:
    """One workload on two schedulers: with token ids over blocks, and with paths over runs."""

    def __init__(self, ids, blocks, budget, seqs, threshold):
        options = {"max_num_batched_tokens": budget, "max_num_seqs": seqs, "long_prefill_token_threshold": threshold}
        self.blocks, self.runs = Scheduler(strict(blocks), **options), Scheduler(NodePool(blocks, SIZE), **options)
        self.ids = ids
        lengths, self.paths = cut(ids)
        self.known = [Run(n) for n in lengths]
        self.fresh = 1000  # tokens that no prompt has
        self.pairs = {}

    def add(self, prompt, tail, output):
        """A prompt of full blocks, `tail` tokens more, and an answer."""
        name = f"r{len(self.pairs)}"
        tokens = [token for i in self.ids[prompt] for token in [i + 1] * SIZE] + self.new(tail)
        if not tokens or self.blocks.pool.blocks_for(len(tokens) + output) > self.blocks.pool.num_blocks:
            return
        a = Request(name, tokens, SamplingParams(max_tokens=output), max_model_len=10 ** 6)
        path = [self.known[i] for i in self.paths[prompt]]
        ends = [sum(run.length for run in path[: i + 1]) for i in range(len(path))]
        b = SimRequest(name, len(tokens), output, (*path, Run(ENDLESS)), (*ends, ENDLESS), timeline(0))
        self.pairs[name] = a, b
        self.blocks.add(a)
        self.runs.add(b)

    def new(self, n):
        self.fresh += n
        return list(range(self.fresh - n, self.fresh))

    def step(self):
        a, b = self.blocks.schedule(), self.runs.schedule()
        for what in ("decodes", "preempted", "failed"):
            assert [r.request_id for r in getattr(a, what)] == [r.request_id for r in getattr(b, what)], what
        assert [(c.request.request_id, c.num_tokens) for c in a.prefills] == [(c.request.request_id, c.num_tokens) for c in b.prefills]
        self.same()
        n = len(a.sampled())
        ended = self.blocks.update(a, self.new(n)), self.runs.update(b, self.new(n))
        assert [r.request_id for r in ended[0]] == [r.request_id for r in ended[1]]
        self.same()

    def abort(self, number):
        for request, scheduler in zip(self.pairs[f"r{number % len(self.pairs)}"], (self.blocks, self.runs)):
            scheduler.abort(request)
        self.same()

    def same(self):
        a, b = self.blocks.pool, self.runs.pool
        self.runs.check()
        assert a.num_free_blocks == b.num_free_blocks
        assert a.num_cached_blocks == b.num_cached_blocks
        assert a.num_evictions == b.num_evictions
        for one, other in self.pairs.values():
            assert (one.num_tokens, one.num_computed_tokens, one.num_cached_tokens, one.status, len(one.block_ids)) == (
                other.num_tokens, other.num_computed_tokens, other.num_cached_tokens, other.status, len(other.block_ids))
            full = (one.num_tokens - 1) // SIZE
            assert len(a.find(one.hashes(full, SIZE))) == len(b.find(other.hashes(full, SIZE)))


actions = st.lists(st.one_of(
    st.tuples(st.just("add"), st.integers(0, 11), st.integers(0, 40), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
), max_size=60)


@settings(max_examples=300, deadline=None)
@given(ids=prompts, acts=actions, blocks=st.integers(4, 40), budget=st.integers(4, 90), seqs=st.integers(1, 4), threshold=st.sampled_from([0, 0, 24]))
def test_the_scheduler_decides_the_same_over_runs_as_over_blocks(ids, acts, blocks, budget, seqs, threshold):
    """Hits, free blocks, evictions and decisions are equal, evicting strictly by age."""
    both = Both(ids, blocks, max(budget, seqs), seqs, threshold)
    for kind, *how in acts:
        if kind == "add":
            both.add(how[0] % len(ids), *how[1:])
        elif kind == "step":
            for _ in range(how[0]):
                both.step()
        elif both.pairs:
            both.abort(how[0])
    for _ in range(2000):
        if not both.blocks.has_unfinished:
            break
        both.step()
    assert not both.runs.has_unfinished
    both.runs.pool.check([])


def test_with_its_reserve_the_engines_pool_may_keep_other_old_blocks():
    """What differs under eviction: BlockPool chooses among its oldest 1/64 by their neighbours. Nothing else, and nothing without eviction."""
    pool = BlockPool(1024, SIZE)
    assert pool._reserve == 16 and strict(1024)._reserve == 0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2 ** 32), blocks=st.integers(8, 24))
def test_the_same_in_heavy_traffic(seed, blocks):
    """Few long prompts that are asked for again and again, whole and in part, by several at once, in a pool that is too small for them."""
    rng = Random(seed)
    whole = [tuple(rng.randrange(2) for _ in range(rng.randint(3, 8))) for _ in range(3)]
    ids = whole + [whole[0][:n] for n in (2, 3)] + [whole[1] + (2, 2)]
    both = Both(ids, blocks, rng.choice([20, 50, 200]), 3, 0)
    for _ in range(120):
        if rng.random() < 0.3:
            both.add(rng.randrange(len(ids)), rng.choice([0, 0, 0, 5, 20]), rng.randint(1, 30))
        elif both.pairs and rng.random() < 0.05:
            both.abort(len(both.pairs) - 1 - rng.randrange(3))
        both.step()
    both.runs.check()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2 ** 32))
def test_ranges_of_runs_are_found_shared_and_evicted_as_blocks_are(seed):
    """Ranges that begin and end anywhere in a run, as a tier is asked for them."""
    rng = Random(seed)
    lengths = [rng.randint(1, 6) for _ in range(4)]
    runs = [Run(n) for n in lengths]
    ends = [sum(lengths[: i + 1]) for i in range(4)]
    hashes = [bytes([i]) for i in range(ends[-1])]
    a, b, tables = strict(12), NodePool(12, SIZE), []
    for _ in range(80):
        if tables and rng.random() < 0.55:
            one, other = tables.pop(rng.randrange(len(tables)))
            a.release(one)
            b.release(other)
        else:
            first = rng.randrange(ends[-1])
            chain = Chain(runs, ends, 0, ends[-1])[first: first + rng.randint(1, 8)]
            wanted = hashes[chain.first: chain.stop]
            one, other = a.find(wanted), b.find(chain)
            assert len(one) == len(other) and a.num_idle(one) == b.num_idle(other)
            need = len(wanted) - len(one)
            if need > a.num_free_blocks - a.num_idle(one):
                continue
            a.share(one)
            b.share(other)
            n, computed = len(one), rng.randint(len(one), len(wanted))
            one, other = one + a.allocate(need), other + b.allocate(need)
            a.offer(one, wanted[:computed], n, b"")
            b.offer(other, chain[:computed], n, b"")
            tables.append((one, other))
        b.check([other for _, other in tables])
        assert (a.num_free_blocks, a.num_cached_blocks, a.num_evictions) == (b.num_free_blocks, b.num_cached_blocks, b.num_evictions)
        for i in range(ends[-1]):
            assert len(a.find(hashes[i:])) == len(b.find(Chain(runs, ends, i, ends[-1])))


# --- refusals and checks ---------------------------------------------------------------------------------------

def held(pool, run, n):
    table = pool.find(Chain((run,), (n,), 0, n))
    pool.share(table)
    fresh = table + pool.allocate(n - len(table))
    if fresh.blank:
        pool.offer(fresh, Chain((run,), (n,), 0, n), len(table), b"")
    return fresh


def test_refusing_changes_nothing():
    pool = NodePool(4, SIZE)
    table = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4"):
        pool.allocate(2)
    pool.check([table])
    run = Run(2)
    with pytest.raises(KeyError):
        pool.share(Table([(run, 0, 2)], 2))
    pool.release(table)
    pool.check([])


def test_a_table_that_is_released_twice_is_refused():
    pool, run = NodePool(4, SIZE), Run(3)
    table = held(pool, run, 3)
    pool.release(table)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release(table)


def test_a_leak_is_seen():
    pool, run = NodePool(4, SIZE), Run(3)
    table = held(pool, run, 3)
    pool.check([table])
    with pytest.raises(AssertionError, match="held 1 times"):
        pool.check([])
    blank = pool.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check([table])
    pool.check([table, blank])
