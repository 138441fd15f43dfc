"""The pieces of a transfer as formulas: the engine's layouts say the same, and the source's figures follow."""
import random

import pytest

from minengine.arithmetic import GLM_5_3, Copies, bytes_per_token, copy_costs, descriptors, layer_kinds, request_copies, transfer_time_s
from minengine.config import KV_CACHE_LAYOUTS, ConfigError
from minengine.kv.layout import KVLayout

LAYERS, PLANES = GLM_5_3["num_hidden_layers"], layer_kinds()["full"]


@pytest.mark.parametrize("order", KV_CACHE_LAYOUTS)
def test_the_formulas_count_what_the_engines_layouts_list(order):
    draw = random.Random(order)
    for _ in range(20):
        layers, block_size, tokens = draw.randint(1, 12), 4 * draw.randint(1, 8), draw.randint(1, 300)
        row, planes, heads = 4 * draw.randint(1, 20), draw.randint(0, layers), draw.choice([1, 2])
        key = 4 * draw.randint(1, 8) if planes else 0
        layout = KVLayout(order, layers, 100, heads, block_size, row, planes, key)
        regions = heads if order == "LHBNC" else 1  # heads outside the blocks: a piece of its own for each
        found = request_copies(order, tokens, block_size, layers, heads * row, regions, planes, key)
        pieces = layout.regions(range(found.blocks))
        assert found.count == len(pieces) == descriptors(order, tokens, block_size, layers, regions, planes)
        assert found.regions == layout.regions_per_block == len(layout.merged(range(found.blocks)))
        assert {length for _, length in pieces} == {found.piece_bytes} | ({found.indexer_piece_bytes} - {0})
        assert found.nbytes == sum(length for _, length in pieces) == found.blocks * layout.block_bytes
        assert found.used_bytes == tokens * bytes_per_token(row, layers, heads, key, planes)


def test_the_sources_two_layouts():
    layer_major = request_copies("LBHNC", 200_000, 1024, LAYERS, 352)
    assert layer_major == Copies(blocks=196, regions=78, piece_bytes=360_448, indexer_piece_bytes=0, nbytes=196 * 1024 * 78 * 352, used_bytes=200_000 * 78 * 352)
    assert layer_major.count == 15_288
    block_major = request_copies("BLHNC", 200_000, 64, LAYERS, 352)
    assert (block_major.count, block_major.piece_bytes, block_major.nbytes) == (3_125, 1_757_184, block_major.used_bytes)


@pytest.mark.parametrize("regions_per_layer, planes, regions, drop", [(1, 0, 78, 4.9), (1, PLANES, 99, 6.2), (2, 0, 156, 9.75), (2, PLANES, 177, 11.1)])
def test_pieces_a_block_and_how_many_fewer_there_are_block_major(regions_per_layer, planes, regions, drop):
    many = request_copies("LBHNC", 2**17, 1024, LAYERS, 352, regions_per_layer, planes, 132)
    few = request_copies("BLHNC", 2**17, 64, LAYERS, 352, regions_per_layer, planes, 132)
    assert many.regions == regions and many.count / few.count == pytest.approx(drop, rel=0.01)
    assert many.nbytes == few.nbytes and few.indexer_piece_bytes == 0


def test_two_transfers_of_the_same_bytes_give_the_cost_of_a_byte_and_of_a_piece():
    byte_s, copy_s = copy_costs(4e9, (20_000, transfer_time_s(4e9, 20_000, 2e-11, 4e-6)), (2_000, transfer_time_s(4e9, 2_000, 2e-11, 4e-6)))
    assert (byte_s, copy_s) == (pytest.approx(2e-11), pytest.approx(4e-6))
    with pytest.raises(ValueError, match="pieces=7 in both transfers"):
        copy_costs(1e9, (7, 1.0), (7, 2.0))


@pytest.mark.parametrize("asked, message", [
    (dict(layout="NHD"), "kv_cache_layout='NHD': use one of LBHNC"),
    (dict(indexer_planes=79, indexer=132), "num_indexer_layers=79: use at most num_hidden_layers, 78"),
    (dict(row=351, block_size=3, regions_per_layer=2), "regions_per_layer=2: block_size x row_bytes is 1053, which they do not divide; use an even one"),
])
def test_what_cannot_be_is_a_sentence(asked, message):
    with pytest.raises(ConfigError, match=message):
        request_copies(**{**dict(layout="LBHNC", tokens=10, block_size=16, layers=78, row=352), **asked})
