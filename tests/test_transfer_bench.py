"""The transfer experiment's own logic: what is counted and fitted, without a transfer."""
import pytest

from bench.transfer import CUTS, TOKENS, _layouts
from minengine.disagg.measure import Costs, Timed, block_ids, even_pieces, fit
from minengine.disagg.pieces import pieces


@pytest.mark.parametrize("regions, asked, times", [(78, 15_288, 4.9), (99, 19_404, 6.2), (156, 30_576, 9.8)])
def test_the_requests_pieces_are_those_of_the_issue(regions, asked, times):
    found = []
    for layout in _layouts(4, regions):
        ids = block_ids(layout, -(-TOKENS // layout.block_size), None)
        found.append(pieces(layout, ids, layout, ids, stop=TOKENS))
    layer_major, block_major = found
    assert (layer_major.asked, layer_major.merged, block_major.asked, block_major.merged) == (asked, regions, 3_125, 1)
    assert round(layer_major.asked / block_major.asked, 1) == times
    assert layer_major.total_bytes / block_major.total_bytes == pytest.approx(200_704 / 200_000), "the same bytes but for the last block's end"
    assert regions in CUTS


def test_shuffled_blocks_are_blocks_of_the_pool_each_once():
    layout = _layouts(4, 78)[0]
    ids = block_ids(layout, 196, 1)
    assert len(set(ids)) == 196 and max(ids) < layout.num_blocks and ids != sorted(ids) and ids != block_ids(layout, 196, 2)


def test_even_pieces_cover_their_bytes_once_on_both_sides():
    parts = even_pieces(1000, 7)
    for side in (parts.src, parts.dst):
        assert sorted(side) == [142 * i for i in range(7)]
    assert set(parts.nbytes) == {142} and list(parts.src) != list(parts.dst)


def test_the_fit_finds_the_costs_and_where_a_saving_lies():
    costs = Costs(start_s=0.01, byte_s=1e-9, descriptor_s=8e-6)
    found = fit([Timed(costs.seconds(nbytes, count), count, count, nbytes) for nbytes in (10**7, 10**8, 10**9) for count in (1, 100, 20_000)])
    assert vars(found) == pytest.approx(vars(costs))
    nbytes = costs.bytes_where_saving(0.47, 15_288, 3_125)
    assert 1 - costs.seconds(nbytes, 3_125) / costs.seconds(nbytes, 15_288) == pytest.approx(0.47)
