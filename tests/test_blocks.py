"""The block pool against a model of it: nothing leaks, nothing is freed twice, content is found exactly."""
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minengine.kv.blocks import BlockPool, OutOfBlocks, block_hash, root_hash

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


class Pool(RuleBasedStateMachine):
    """Tables of held blocks, and a dict from content to the block that should be found."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7, SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of blocks that were registered and not handed out since

    @rule(n=st.integers(0, 8))
    def allocate(self, n):
        free = self.pool.num_free_blocks
        if n > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        held = {b for table in self.tables for b in table}
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n and not held & set(blocks), "a held block was handed out"
        for block in blocks:
            self.content.pop(block, None)
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
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()
        self.content.clear()

    @invariant()
    def whole(self):
        self.pool.check(self.tables)
        held = {b for table in self.tables for b in table}
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(held)


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
