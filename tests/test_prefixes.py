"""Which rank a prompt goes to: where its beginning is, unless others have much less to do."""
from hypothesis import given, strategies as st

from minengine.kv.blocks import block_hashes
from minengine.parallel.prefixes import SLACK, Prefixes


def test_half_of_a_prompt_decides_unless_the_rank_is_busy():
    prefixes = Prefixes()
    a, b = block_hashes(range(40), 4), block_hashes(range(100, 140), 4)
    assert prefixes.choose(a, [1, 0, 0]) == 1 and prefixes.choose([], [1, 1, 0]) == 2
    prefixes.given(a, 2)
    prefixes.given(b, 0)
    assert prefixes.choose(a, [0, 0, SLACK]) == 2 and prefixes.choose(a, [1, 0, SLACK + 1]) == 1
    assert prefixes.choose(a + block_hashes(range(7, 47), 4), [0, 0, 1]) == 2, "just half"
    assert prefixes.choose(a + block_hashes(range(7, 51), 4), [0, 0, 1]) == 0, "less than half"
    assert prefixes.choose(b[1:], [1, 0, 0]) == 0 and prefixes.choose(block_hashes(range(40), 4, "salt"), [1, 0, 0]) == 1
    prefixes.given(a, 1)
    assert prefixes.choose(a, [0, 0, 0]) == 1
    prefixes.forget()
    assert prefixes.choose(a, [0, 0, 0]) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 3))), st.integers(1, 20))
def test_no_more_is_remembered_than_said_and_beginnings_longest(prompts, most):
    prefixes = Prefixes(most)
    for family, blocks, rank in prompts:
        hashes = block_hashes([family] * 4 * blocks, 4)
        prefixes.given(hashes, rank)
        assert len(prefixes._rank_of) <= most
        assert prefixes.choose(hashes[:most], [0] * 4) == rank
