"""The six physical orders are the same bytes in six places, and regions are exactly a block's bytes."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minengine.kv.layout import KVLayout


@st.composite
def layouts(draw, order=st.sampled_from(KV_CACHE_LAYOUTS)):
    full = draw(st.integers(0, 2))
    return KVLayout(
        draw(order), num_layers=draw(st.integers(1, 4)), num_blocks=draw(st.integers(1, 5)), num_heads=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([4, 8, 16])), row_bytes=draw(st.integers(1, 9)),
        num_indexer_layers=full, indexer_bytes=draw(st.integers(1, 5)) if full else 0,
    )


def views(layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte addresses of [L, B, H, N, C] and [Lf, B, 1, N, Ci]."""
    address = torch.arange(layout.nbytes)
    rows = address.as_strided(layout.shape, layout.strides, layout.offset)
    if not layout.num_indexer_layers:
        return rows, address[:0].view(0, layout.num_blocks, 1, layout.block_size, 0)
    return rows, address.as_strided(layout.indexer_shape, layout.indexer_strides, layout.indexer_offset)


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_the_views_together_are_every_byte_once(layout):
    rows, keys = views(layout)
    assert torch.equal(torch.cat((rows.flatten(), keys.flatten())).sort().values, torch.arange(layout.nbytes))
    assert all(stride == 1 for stride in (layout.strides[-1], layout.indexer_strides[-1]))
    assert rows[:, :, 0, 0, 0].remainder(4).max() == 0  # every plane starts where a float32 may


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_the_physical_order_is_the_order_named(layout):
    """Without indexer keys the bytes, read in the named order of axes, are simply 0, 1, 2, ..."""
    plain = KVLayout(layout.order, *layout.shape[:2], num_heads=layout.num_heads, block_size=layout.block_size, row_bytes=layout.row_bytes)
    rows, _ = views(plain)
    physical = rows.permute(["LBHNC".index(axis) for axis in layout.order])
    assert torch.equal(physical.flatten(), torch.arange(plain.nbytes))


@settings(deadline=None, max_examples=60)
@given(layouts(), st.data())
def test_regions_are_exactly_the_blocks_bytes(layout, data):
    ids = data.draw(st.permutations(range(layout.num_blocks)))[: data.draw(st.integers(0, layout.num_blocks))]
    rows, keys = views(layout)
    regions = layout.regions(ids)
    assert len(regions) == layout.regions_per_block * len(ids)
    covered = [byte for start, length in regions for byte in range(start, start + length)]
    wanted = torch.cat((rows[:, ids].flatten(), keys[:, ids].flatten()))
    assert sorted(covered) == wanted.sort().values.tolist()
    # Region by region, the blocks in the order given: piece i belongs to block ids[i % len(ids)].
    for i, (start, length) in enumerate(regions):
        block = ids[i % len(ids)]
        mine = torch.cat((rows[:, block].flatten(), keys[:, block].flatten()))
        assert start in mine and start + length - 1 in mine
    # No region could have been longer: what follows it is another block or another plane's beginning.
    merged = layout.merged(ids)
    assert [b for start, length in merged for b in range(start, start + length)] == covered
    assert all(sum(left) != right[0] for left, right in zip(merged, merged[1:]))


@settings(deadline=None, max_examples=40)
@given(layouts(order=st.sampled_from([o for o in KV_CACHE_LAYOUTS if o[0] == "B"])))
def test_block_major_is_one_region_latent_then_indexer(layout):
    rows, keys = views(layout)
    for block in range(layout.num_blocks):
        assert layout.regions([block]) == [(block * layout.block_bytes, layout.block_bytes)]
        assert rows[:, block].min() == block * layout.block_bytes
        if keys.numel():
            assert rows[:, block].max() + 1 == keys[:, block].min()
    assert layout.merged(range(layout.num_blocks)) == [(0, layout.nbytes)]


def test_pieces_of_glm_in_each_order():
    """78 layers, 21 with an indexer key: layer-major pieces a block, and what ascending ids merge into."""
    pieces = {}
    for order in KV_CACHE_LAYOUTS:
        layout = KVLayout(order, 78, 200, 1, 64, 352, num_indexer_layers=21, indexer_bytes=132)
        ascending, descending = list(range(10, 20)), list(range(19, 9, -1))
        pieces[order] = (len(layout.regions(ascending)), len(layout.merged(ascending)), len(layout.merged(descending)))
        assert layout.block_bytes == 64 * (78 * 352 + 21 * 132)
    assert pieces == {order: (10, 1, 10) if order[0] == "B" else (990, 99, 990) for order in KV_CACHE_LAYOUTS}


def test_heads_outside_blocks_are_a_piece_each():
    counts = {order: KVLayout(order, 30, 8, 3, 16, 512).regions_per_block for order in KV_CACHE_LAYOUTS}
    assert counts == {"LBHNC": 30, "LBNHC": 30, "LHBNC": 90, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def test_repeated_and_empty_ids():
    layout = KVLayout("BLHNC", 2, 4, 1, 4, 8)
    assert layout.regions([]) == layout.merged([]) == []
    assert layout.regions([3, 3]) == [(192, 64), (192, 64)] == layout.merged([3, 3])


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_the_pool_is_named(block):
    with pytest.raises(IndexError, match=f"block id {block} .* 4 blocks"):
        KVLayout("LBHNC", 2, 4, 1, 4, 8).regions([0, block])


@pytest.mark.parametrize("change, words", [
    ({"order": "NHD"}, ["kv_cache_layout='NHD'", "BLHNC"]),
    ({"num_blocks": 0}, ["num_blocks=0"]),
    ({"row_bytes": 3, "block_size": 2}, ["row_bytes=3", "multiple of 4"]),
    ({"indexer_bytes": 33, "num_indexer_layers": 1, "block_size": 2}, ["indexer_bytes=33", "multiple of 4"]),
    ({"indexer_bytes": 32}, ["num_indexer_layers=0", "both"]),
    ({"num_indexer_layers": 1}, ["indexer_bytes=0", "both"]),
])
def test_what_cannot_be_laid_out_is_named(change, words):
    good = dict(order="LBHNC", num_layers=2, num_blocks=4, num_heads=1, block_size=4, row_bytes=8)
    with pytest.raises(ConfigError) as error:
        KVLayout(**{**good, **change})
    for word in words:
        assert word in str(error.value)
