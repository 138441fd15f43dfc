"""The block pool against a model of it: nothing leaks, nothing is freed twice, content is found exactly."""
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minengine.kv.blocks import BlockPool, OutOfBlocks, block_hash, root_hash
from minengine.request import Request, SamplingParams
from minengine.schedule import Scheduler

SIZE = 16


def chain(tokens, salt=None):
    hashes, parent = [], root_hash(salt)
    for i in range(0, len(tokens) // SIZE * SIZE, SIZE):
        parent = block_hash(parent, tokens[i: i + SIZE])
        hashes.append(parent)
    return hashes


def test_hash_depends_on_every_token_before_and_on_the_salt():
    tokens = list(range(3 * SIZE))
    base = chain(tokens)
    changed = [999] + tokens[1:]
    assert chain(changed)[2] != base[2], "the last block's hash must know the first token"
    assert chain(tokens, "tenant-a")[0] not in (base[0], chain(tokens, "tenant-b")[0])
    assert chain(tokens, "")[0] != base[0], "an empty salt is a salt, not the lack of one"
    assert chain(tokens) == base
    # the framing is unambiguous: no other split of the same numbers gives the same hash
    assert block_hash(root_hash(), [1, 2]) != block_hash(block_hash(root_hash(), [1]), [2])


def test_salts_that_are_not_valid_unicode_still_hash():
    assert root_hash("\ud800") != root_hash("?")


def test_refusing_changes_nothing():
    pool = BlockPool(4, SIZE)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4"):
        pool.allocate(2)
    pool.check([held])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release([held[0], 3])
    pool.check([held])
    pool.release(held)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release(held[:1])
    pool.check([])


def test_least_recently_used_goes_first_and_a_prefix_outlives_its_tail():
    pool = BlockPool(4, SIZE)
    old, new = chain(list(range(2 * SIZE))), chain(list(range(100, 100 + 2 * SIZE)))
    a, b = pool.allocate(2), pool.allocate(2)
    for block, h in zip(a + b, old + new):
        pool.register(block, h)
    pool.release(a)
    pool.release(b)
    assert pool.find(old) == a and pool.find(new) == b
    assert pool.allocate(1) == [a[1]]  # oldest request, tail first
    assert pool.find(old) == a[:1] and pool.find(new) == b
    pool.share(pool.find(old))  # touched: now the newer request's tail goes first
    assert pool.allocate(1) == [b[1]]
    assert pool.num_evictions == 2


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(2, SIZE, enable_prefix_caching=False)
    block = pool.allocate(1)
    pool.register(block[0], chain(list(range(SIZE)))[0])
    assert pool.num_cached_blocks == 0
    pool.release(block)
    pool.check([])


def test_a_free_block_has_nothing_to_share():
    pool = BlockPool(2, SIZE)
    with pytest.raises(KeyError):
        pool.share([0])
    pool.check([])


# --- neighbours ------------------------------------------------------------------------------------------------


def filled(pool, n, first=0):
    """`n` blocks with content of their own, held."""
    table = pool.allocate(n)
    for i, block in enumerate(table):
        pool.register(block, block_hash(root_hash(), [first + i]))
    return table


def test_a_request_gets_the_smallest_hole_that_holds_it():
    pool = BlockPool(12, SIZE)
    tables = [pool.allocate(n) for n in (4, 1, 2, 1, 3, 1)]
    assert tables[0] == [0, 1, 2, 3] and tables[4] == [8, 9, 10]
    for i in (0, 2, 4):  # holes of 4, 2 and 3
        pool.release(tables[i])
    assert pool.allocate(3) == [8, 9, 10]
    assert pool.allocate(5) == [0, 1, 2, 3, 5], "no hole holds it: the largest one first"


def test_a_table_goes_on_where_it_ends():
    pool = BlockPool(12, SIZE)
    a, b = pool.allocate(3), pool.allocate(2)
    pool.release(a)
    assert pool.allocate(1, after=b[-1]) == [5]
    assert pool.allocate(1) == [0], "without a hint the smaller hole is taken"
    assert pool.allocate(7, after=5) == [6, 7, 8, 9, 10, 11, 1]
    assert pool.allocate(1, after=11) == [2], "the last block has no neighbour"


def test_free_blocks_go_before_cached_ones_until_a_pool_has_to_evict():
    pool = BlockPool(256, SIZE)  # a reserve of four
    tables = [filled(pool, 4, 10 * i) for i in range(63)]
    ends = pool.allocate(4)  # 252 to 255
    for table in tables:
        pool.release(table)
    pool.release([ends[0], ends[2]])  # two holes of one, and old cached blocks side by side: they would be the better fit
    assert sorted(pool.allocate(2)) == [ends[0], ends[2]] and pool.num_evictions == 0
    pool.allocate(1)
    pool.release([ends[1]])
    assert pool.allocate(2) == [0, 1], "now that contents go anyway, of the oldest ones those that fit"


def test_what_is_evicted_is_old_and_lies_side_by_side():
    pool = BlockPool(256, SIZE)  # a reserve of four
    tables = [filled(pool, 2, 10 * i) for i in range(128)]
    order = [table for i in range(32) for table in (tables[i], tables[127 - i])]  # neighbours are never let go one after the other
    for table in order:
        pool.release(table)
    taken = pool.allocate(4)
    assert sorted(taken) == list(range(taken[0], taken[0] + 4)), "of the eight oldest, four side by side"
    assert set(taken) <= {block for table in order[:4] for block in table}
    assert pool.num_evictions == 4 and pool.num_cached_blocks == 252
    left = next(table for table in order[:4] if not set(table) & set(taken))
    pool.share(left)  # due to be evicted, and found again all the same
    pool.check([taken, left, *[table for table in tables if table not in order]])
    pool.release(left)  # now the youngest
    assert not set(pool.allocate(20)) & set(left)


def test_a_request_goes_on_beside_its_prefix_and_beside_its_last_block():
    pool = BlockPool(32, 4)
    scheduler = Scheduler(pool, max_num_batched_tokens=64, max_num_seqs=4)

    def run(name, tokens, max_tokens):
        request = Request(name, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), max_model_len=64)
        scheduler.add(request)
        table = []
        while not request.finished:
            step = scheduler.schedule()
            table = list(request.block_ids)
            scheduler.update(step, [7] * len(step.sampled()))
        return table

    hole, _ = pool.allocate(1), pool.allocate(1)
    pool.release(hole)  # the best fit for one block, block 0, is not where either goes on
    prompt = list(range(100, 109))
    assert run("decode", prompt, 8) == [2, 3, 4, 5]
    assert run("prefix", prompt + [7] * 7 + [8, 9, 10], 1) == [2, 3, 4, 5, 6]


class Pool(RuleBasedStateMachine):
    """Tables of held blocks, a dict from content to the block that should be found, and the order in which blocks were let go."""

    @initialize(num_blocks=st.sampled_from([7, 130]))  # no reserve, so strict LRU; and one of two
    def make(self, num_blocks):
        self.pool = BlockPool(num_blocks, SIZE)
        self.reserve = num_blocks // 64
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of blocks that were registered and not handed out since
        self.idle: list[int] = []  # cached and not held, least recently used first

    @rule(n=st.integers(0, 8) | st.integers(0, 131), data=st.data())
    def allocate(self, n, data):
        if n > self.pool.num_free_blocks:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        held = {b for table in self.tables for b in table}
        after = data.draw(st.none() | st.sampled_from(sorted(held))) if held else None
        blocks = self.pool.allocate(n, after)
        assert len(set(blocks)) == n and not held & set(blocks), "a held block was handed out"
        assert set(blocks) & set(self.idle) <= set(self.idle[:n + self.reserve]), "a block was evicted and older ones were not"
        for block in blocks:
            self.content.pop(block, None)
        self.idle = [block for block in self.idle if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), key=st.integers(0, 9))
    def register(self, data, key):
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        h = block_hash(root_hash(), [key])
        self.pool.register(block, h)
        if block not in self.content and h not in self.content.values():
            self.content[block] = h

    @rule(keys=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def hit(self, keys):
        hashes = [block_hash(root_hash(), [k]) for k in keys]
        by_hash = {h: b for b, h in self.content.items()}
        want = []
        for h in hashes:
            if h not in by_hash:
                break
            want.append(by_hash[h])
        found = self.pool.find(hashes)
        assert found == want
        self.pool.share(found)
        self.idle = [block for block in self.idle if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {b for other in self.tables for b in other}
        self.idle += [block for block in reversed(table) if block in self.content and block not in held]

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()
        self.content.clear()
        self.idle.clear()

    @invariant()
    def whole(self):
        self.pool.check(self.tables)
        held = {b for table in self.tables for b in table}
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(held)


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
