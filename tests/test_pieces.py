"""Pieces against a copy made row by row through the pools' own strides: every pair of orders, two block sizes, any span of tokens."""
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minengine.disagg.pieces import Pieces, check_pair, pieces
from minengine.kv.layout import KVLayout

LATENT = dict(num_layers=3, num_heads=1, row_bytes=12, num_indexer_layers=2, indexer_bytes=8)
GROUPED = dict(num_layers=2, num_heads=3, row_bytes=8)


def pool(order, block_size, kind, num_blocks=11):
    return KVLayout(order, num_blocks=num_blocks, block_size=block_size, **kind)


def rows_of(layout, storage):
    """The pool as [L, B, H, N, C], and its indexer keys likewise: writable views."""
    def view(shape, strides, offset):
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, strides)
    yield view(layout.shape, layout.strides, layout.offset)
    if layout.num_indexer_layers:
        yield view(layout.indexer_shape, layout.indexer_strides, layout.indexer_offset)


def copied(found, src_storage, dst_storage):
    out = dst_storage.copy()
    for s, d, n in zip(found.src, found.dst, found.nbytes):
        out[d: d + n] = src_storage[s: s + n]
    return out


def expected(src, src_blocks, src_storage, dst, dst_blocks, dst_storage, start, stop, layers=None, keys=()):
    out = dst_storage.copy()
    for which, (here, there) in enumerate(zip(rows_of(src, src_storage), rows_of(dst, out))):
        planes = range(here.shape[0]) if layers is None else (layers, keys)[which]
        for layer, t in product(planes, range(start, stop)):
            there[layer, dst_blocks[t // dst.block_size], :, t % dst.block_size] = here[layer, src_blocks[t // src.block_size], :, t % src.block_size]
    return out


def storages(*layouts):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, layout.nbytes, np.uint8) for layout in layouts]


@st.composite
def cases(draw):
    kind = draw(st.sampled_from([LATENT, GROUPED]))
    src, dst = (pool(draw(st.sampled_from(KV_CACHE_LAYOUTS)), draw(st.sampled_from([4, 8, 12])), kind, draw(st.integers(11, 13))) for _ in range(2))
    stop = draw(st.integers(0, 40))
    return src, dst, draw(st.permutations(range(11))), draw(st.permutations(range(11))), draw(st.integers(0, stop)), stop


@given(cases(), st.data())
def test_pieces_move_exactly_the_rows_asked_for(case, data):
    src, dst, src_blocks, dst_blocks, start, stop = case
    a, b = storages(src, dst)
    layers = data.draw(st.none() | st.sets(st.integers(0, src.num_layers - 1)).map(sorted))
    keys = data.draw(st.sets(st.integers(0, src.num_indexer_layers - 1)).map(sorted)) if layers is not None and src.num_indexer_layers else []
    found = pieces(src, src_blocks, dst, dst_blocks, start=start, stop=stop, layers=layers, indexer_layers=keys)
    if layers is None and (src.order, src.block_size) == (dst.order, dst.block_size) and start % src.block_size == 0:
        stop = -(-stop // src.block_size) * src.block_size  # whole blocks
    assert np.array_equal(copied(found, a, b), expected(src, src_blocks, a, dst, dst_blocks, b, start, stop, layers, keys))
    assert not found.merged or found.nbytes.min() > 0
    apart = pieces(src, src_blocks, dst, dst_blocks, start=start, stop=case[-1], layers=layers, indexer_layers=keys, merge=False)
    assert apart.asked == apart.merged == found.asked >= found.merged and apart.total_bytes == found.total_bytes


@pytest.mark.parametrize("order", KV_CACHE_LAYOUTS)
def test_whole_blocks_are_listed_as_the_layout_lists_them(order):
    for kind in (LATENT, GROUPED):
        layout, ids = pool(order, 4, kind), [7, 2, 3, 9]
        listed = pieces(layout, ids, layout, ids, stop=15, merge=False)
        assert list(zip(listed.src, listed.nbytes)) == layout.regions(ids)
        assert listed.asked == 4 * layout.regions_per_block


def test_neighbours_merge_only_where_both_sides_are_dense():
    layout = pool("BLHNC", 4, LATENT)
    def merged(src_ids, dst_ids):
        return pieces(layout, src_ids, layout, dst_ids, stop=4 * len(src_ids)).merged
    assert merged([2, 3, 4], [5, 6, 7]) == 1
    assert merged([4, 3, 2], [7, 6, 5]) == 1, "the order of the table does not matter: bytes do"
    assert merged([2, 3, 4], [7, 6, 5]) == 3, "ascending here and descending there touch nowhere"
    assert merged([2, 3, 5], [5, 6, 7]) == 2 and merged([2, 3, 4], [5, 6, 8]) == 2, "a gap on either side splits"
    planes = pool("LBHNC", 4, LATENT)
    assert pieces(planes, [2, 3, 4], planes, [5, 6, 7], stop=12).merged == 3 + 2, "one a plane"


def test_a_whole_pool_is_one_piece_where_the_two_are_alike_and_order_is_no_matter_with_one_head():
    every = list(range(11))
    for order in KV_CACHE_LAYOUTS:
        assert pieces(pool(order, 4, LATENT), every, pool(order, 4, LATENT), every, stop=44).merged == 1
    for a, b in product(("BLHNC", "BLNHC", "BHLNC"), repeat=2):
        found = pieces(pool(a, 4, LATENT), [1, 5], pool(b, 4, LATENT), [2, 9], stop=8)
        assert found.merged == 2, "a latent has one head, so the block-major orders are the same bytes"


def test_mixed_block_sizes_cut_at_both_sides_blocks():
    src, dst = pool("LBHNC", 8, LATENT), pool("LBHNC", 12, LATENT)
    found = pieces(src, [3, 1, 4], dst, [0, 7], stop=24)
    assert found.asked == 5 * 4, "tokens 0 8 12 16 begin runs in each of 3 + 2 planes"


def test_one_piece():
    word = Pieces.one(8, src=16)
    assert (word.src.tolist(), word.dst.tolist(), word.nbytes.tolist(), word.asked, word.merged, word.total_bytes) == ([16], [0], [8], 1, 1, 8)


@pytest.mark.parametrize("field, value", [("num_layers", 4), ("num_heads", 2), ("row_bytes", 16), ("num_indexer_layers", 1), ("indexer_bytes", 4)])
def test_pools_that_cannot_be_paired_are_refused_in_one_sentence(field, value):
    src, dst = pool("LBHNC", 4, LATENT), pool("BLHNC", 8, {**LATENT, field: value})
    for call in (lambda: check_pair(src, dst), lambda: pieces(src, [0], dst, [0], stop=1)):
        with pytest.raises(ConfigError, match=f"^{field} is {LATENT[field]} here and {value} there: both workers need [^.]*$"):
            call()


def test_formats_of_one_width_are_told_apart():
    layout = pool("LBHNC", 4, LATENT)
    check_pair(layout, layout, "fp8", "fp8")
    check_pair(layout, layout, "fp8", None)
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' here and 'int8' there"):
        check_pair(layout, layout, "fp8", "int8")


def test_what_is_outside_is_refused():
    layout = pool("LBHNC", 4, LATENT)
    for blocks, others, stop, said in (([0], [0], 5, "1 blocks of 4 tokens at the source do not reach token 5"),
                                       ([0, 1], [0], 5, "at the destination do not reach"),
                                       ([11], [0], 4, "a block id at the source is outside the pool of 11 blocks"),
                                       ([0], [-1], 4, "a block id at the destination is outside")):
        with pytest.raises(IndexError, match=said):
            pieces(layout, blocks, layout, others, stop=stop)
    with pytest.raises(IndexError, match="0 <= start <= stop"):
        pieces(layout, [0], layout, [0], start=3, stop=2)
    with pytest.raises(IndexError, match=r"layers=\[3\]: the pools have 3"):
        pieces(layout, [0], layout, [0], stop=4, layers=[3])
    with pytest.raises(IndexError, match=r"indexer_layers=\[2\]: the pools have 2"):
        pieces(layout, [0], layout, [0], stop=4, layers=[0], indexer_layers=[2])


def test_many_blocks_take_little_time_to_describe():
    """200,000 tokens in 78 layers: counted, not timed. The counts are the chapter's."""
    glm = dict(num_layers=78, num_heads=1, row_bytes=576)
    ids = list(range(196))
    random.Random(0).shuffle(ids)
    layer_major = pool("LBHNC", 1024, glm, 196)
    assert pieces(layer_major, ids, layer_major, ids, stop=200_000).asked == 15_288
    assert pieces(layer_major, sorted(ids), layer_major, sorted(ids), stop=200_000).merged == 1
    block_major = pool("BLHNC", 64, glm, 3125)
    assert pieces(block_major, range(3125), block_major, range(3125), stop=200_000).asked == 3_125
