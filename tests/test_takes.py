"""Rows from a group of one topology to a group of another, without an engine: who reads what from whom, where it lies, and in how many pieces."""
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from minengine.arithmetic import kv_copies, rank_share, taken, takes, topology
from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minengine.disagg.pieces import Side, shared_pieces
from minengine.kv.layout import KVLayout
from test_pieces import copied, rows_of

LATENTS = ["TP1", "TP2", "TP4", "TEP4", "DEP2", "TP2+DCP2", "TP4+DCP2", "TP4+DCP4"]
HEADS = ["TP1", "TP2", "TP4"]
LAYERS, PLANES, ROW, KEY, KV_HEADS = 3, 2, 12, 8, 4


class Member:
    """One rank's pool; its rows are told apart by what they say: (layer, token, head)."""

    def __init__(self, name, rank, order, block_size, kv_heads, num_blocks, block_ids):
        shape = topology(name)
        self.rank, self.context, self.kv_heads = rank, shape.context, kv_heads
        self.heads = rank_share(kv_heads, shape.tensor, rank) if kv_heads > 1 else range(1)
        indexer = dict(num_indexer_layers=PLANES, indexer_bytes=KEY) if kv_heads == 1 else {}
        self.layout = KVLayout(order, LAYERS, num_blocks, len(self.heads), block_size // shape.context, ROW, **indexer)
        self.block_ids, self.block_size = block_ids, block_size
        self.storage = np.full(self.layout.nbytes, 255, np.uint8)

    def places(self, tokens):
        """(layer, block, head, row) of every row that this rank keeps of a request of so many tokens, and what it says."""
        for plane, view in enumerate(rows_of(self.layout, self.storage)):
            for layer, head, token in product(range(len(view)), self.heads if plane == 0 else range(1), range(tokens)):
                if token % self.context == self.rank % self.context:
                    at = token // self.context
                    own_head = head - self.heads.start if plane == 0 else 0
                    yield view[layer, self.block_ids[at // self.layout.block_size], own_head, at % self.layout.block_size], (plane, layer, head, token)

    def fill(self, tokens):
        for row, said in self.places(tokens):
            row[:4] = said
        return self

    @property
    def side(self):
        return Side(self.layout, self.block_ids, self.context, self.heads)


@st.composite
def pairs(draw):
    kv_heads = draw(st.sampled_from([1, KV_HEADS]))
    names = [draw(st.sampled_from(LATENTS if kv_heads == 1 else HEADS)) for _ in range(2)]
    orders = [draw(st.sampled_from(KV_CACHE_LAYOUTS)) for _ in range(2)]
    sizes = [draw(st.sampled_from([4, 8])) for _ in range(2)]
    return kv_heads, names, orders, sizes, draw(st.integers(1, 30)), [draw(st.permutations(range(8))) for _ in range(2)], draw(st.integers(0, 30))


@given(pairs())
def test_every_rank_gets_what_it_keeps_and_nothing_else(pair):
    kv_heads, (held, kept), orders, sizes, tokens, tables, start = pair
    start = min(start, tokens)
    have = [Member(held, rank, orders[0], sizes[0], kv_heads, 8, tables[0]).fill(tokens) for rank in range(topology(held).tensor)]
    for rank in range(topology(kept).tensor):
        member = Member(kept, rank, orders[1], sizes[1], kv_heads, 8, tables[1])
        for take in takes(held, kept, rank, kv_heads):
            found = shared_pieces(have[take.source].side, member.side, take, start=start, stop=tokens)
            member.storage[:] = copied(found, have[take.source].storage, member.storage)
            assert found.asked >= found.merged
        for row, said in member.places(tokens):
            if said[3] >= start:
                assert tuple(row[:4]) == said
            elif start % sizes[1]:  # else a whole block may have moved, and nothing before it
                assert set(row) == {255}
        wanted = sum(1 for _, said in member.places(tokens) if said[3] >= start)
        written = sum(int((view != 255).any(-1).sum()) for view in rows_of(member.layout, member.storage))
        whole = held == kept or (topology(held).context == topology(kept).context and kv_heads == 1) or topology(held).tensor == topology(kept).tensor
        assert written == wanted or whole and written > wanted  # the unused end of a last block moves with it


@pytest.mark.parametrize("order", KV_CACHE_LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, KV_HEADS])
def test_the_formula_counts_the_pieces(order, kv_heads):
    for held, kept in product(LATENTS if kv_heads == 1 else HEADS, repeat=2):
        for rank, tokens, start in product(range(topology(kept).tensor), (1, 3, 8, 9, 29), (0, 8)):
            members = [Member(held, source, order, 8, kv_heads, 8, range(8)) for source in range(topology(held).tensor)]
            member = Member(kept, rank, order, 8, kv_heads, 8, range(8))
            counted = []
            for take in takes(held, kept, rank, kv_heads):
                found = shared_pieces(members[take.source].side, member.side, take, start=start, stop=max(start, tokens))
                counted.append((take.source, found.asked, found.total_bytes))
            planes = dict(indexer_planes=PLANES, indexer=KEY) if kv_heads == 1 else {}
            assert counted == taken(held, kept, rank, order, tokens, 8, LAYERS, ROW, kv_heads=kv_heads, start=start, **planes), (held, kept, rank, tokens, start)


def test_copies_moved_are_copies_kept():
    """Of a length that fills blocks, what the ranks of a decoder take is what the topology keeps."""
    for kv_heads in (1, KV_HEADS):
        one = 32 * LAYERS * ROW * kv_heads
        for held, kept in product(LATENTS if kv_heads == 1 else HEADS, repeat=2):
            shape = topology(kept)
            moved = sum(part.nbytes for rank in range(shape.tensor) for part in taken(held, kept, rank, "BLHNC", 32, 8, LAYERS, ROW, kv_heads=kv_heads))
            assert moved == one * kv_copies(kept, kv_heads)


def test_readers_are_spread_over_those_that_have_the_same():
    assert [[take.source for take in takes("TP2", "TP4", rank)] for rank in range(4)] == [[0], [1], [0], [1]]
    assert [[take.source for take in takes("TP4", "TP2", rank)] for rank in range(2)] == [[0], [1]]
    assert [[take.source for take in takes("DEP4", "TP2", rank)] for rank in range(2)] == [[0], [0]]  # the one that has the request
    assert [[take.source for take in takes("TP4+DCP2", "TP4+DCP2", rank)] for rank in range(4)] == [[0], [1], [2], [3]]
    assert takes("TP2+DCP2", "TP2", 1) == [(0, 0, 2, range(1)), (1, 1, 2, range(1))]
    assert takes("TP1", "TP4+DCP4", 3) == [(0, 3, 4, range(1))]
    assert takes("TP2", "TP4", 1, kv_heads=8) == [(0, 0, 1, range(2, 4))] and takes("TP4", "TP2", 1, kv_heads=8) == [(2, 0, 1, range(4, 6)), (3, 0, 1, range(6, 8))]


@pytest.mark.parametrize("held, kept, kv_heads, words", [("TP2", "TP3", 4, "topology='TP3': 4 heads are not split so"),
                                                         ("TP2+DCP2", "TP2", 4, "topology='TP2.DCP2': 4 heads"), ("XP2", "TP2", 1, "topology='XP2': use TP<n>")])
def test_what_cannot_be_taken_is_a_sentence(held, kept, kv_heads, words):
    with pytest.raises(ConfigError, match=words):
        takes(held, kept, 0, kv_heads)
