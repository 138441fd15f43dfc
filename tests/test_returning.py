"""Bringing a history back against computing it again: the two times meet where the formulas say, and the edges are what they must be."""
import math

import pytest

from minengine.arithmetic import break_even_bytes_per_s, break_even_tokens, bytes_per_token, recompute_time_s, return_time_s, row_bytes, wire_time_s


def test_times_by_hand():
    assert recompute_time_s(2048, 1024) == 2.0
    # 2,048 tokens of 1,000 bytes at 1 MB/s are 2.048 s; 32 blocks of 64 at 10 ms are 0.32 s; half a second before anything comes
    assert return_time_s(2048, 1000, 1e6) == pytest.approx(2.048)
    assert return_time_s(2048, 1000, 1e6, block_size=64, block_s=0.01, start_s=0.5) == pytest.approx(2.868)


def test_without_costs_of_its_own_it_is_the_wire_alone():
    token = bytes_per_token(row_bytes("nvfp4_fp8_ds_mla").total, 78)
    assert return_time_s(200_000, token, 9e11) == pytest.approx(wire_time_s(200_000 * token, 9e11))


@pytest.mark.parametrize("tok_s, token_bytes, bytes_per_s, block_size, block_s, start_s", [
    (1_000, 46_080, 2e9, 64, 2e-4, 0.02), (9_000, 27_456, 2e10, 16, 1e-5, 0.005), (300, 46_080, 1e8, 128, 0.0, 1.0)])
def test_both_ways_take_as_long_at_the_break_even(tok_s, token_bytes, bytes_per_s, block_size, block_s, start_s):
    costs = {"block_size": block_size, "block_s": block_s, "start_s": start_s}
    n = break_even_tokens(tok_s, token_bytes, bytes_per_s, **costs)
    assert return_time_s(n, token_bytes, bytes_per_s, **costs) == pytest.approx(recompute_time_s(n, tok_s))
    assert return_time_s(n + 1, token_bytes, bytes_per_s, **costs) < recompute_time_s(n + 1, tok_s)


def test_a_tier_slower_than_prefill_never_pays_and_one_without_a_start_always_does():
    assert break_even_tokens(10_000, 46_080, 1e8, start_s=0.01) == math.inf
    assert break_even_tokens(1_000, 46_080, 2e9) == 0.0
    assert break_even_tokens(1_000, 46_080, 2e9, block_size=1, block_s=0.001, start_s=0.01) == math.inf  # as long a block as a token of prefill


def test_the_bandwidth_of_the_break_even():
    speed = break_even_bytes_per_s(27_456, 9_400)
    assert speed == pytest.approx(258.1e6, rel=1e-3)
    assert return_time_s(5_000, 27_456, speed) == pytest.approx(recompute_time_s(5_000, 9_400))
