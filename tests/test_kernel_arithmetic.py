"""What sparse decode attention moves and computes, worked out by hand, and how the two bounds combine."""
import dataclasses
import re

import pytest

from minengine.arithmetic import CARDS, DECODE_ROWS, Card, decode_floor, decode_launches, staged_bytes
from minengine.config import ConfigError

SLOW = Card("one byte and one operation a second", 1.0, 1.0, "made up")
ASKED = {"query_tokens": 15, "heads": 16, "top_k": 2048}  # the source's launch
ROWS = 15 * 2048


def test_the_sources_launch_by_hand():
    native, = decode_launches("native", **ASKED)
    assert native.parts == {"rows": ROWS * 352, "queries": 15 * 16 * 576 * 2, "outputs": 15 * 16 * 512 * 2, "slots": ROWS * 4}
    assert (native.nbytes, native.flops) == (11_458_560, 2 * 15 * 2048 * 16 * (576 + 512))
    fp8, plain = (decode_launches(path, **ASKED)[0] for path in ("fp8", "bfloat16"))
    assert (fp8.parts["rows"], plain.parts["rows"]) == (ROWS * 576, ROWS * 1152)
    for other in (fp8, plain):
        assert other.flops == native.flops and {**other.parts, "rows": 0} == {**native.parts, "rows": 0}


def test_staged_moves_1504_bytes_a_row_in_two_launches():
    unpack, attention = decode_launches("staged", **ASKED)
    assert unpack.parts["rows"] + unpack.parts["copy_written"] + attention.parts["copy_read"] == ROWS * staged_bytes() == ROWS * 1504
    assert unpack.flops == 0 and attention.flops == decode_launches("fp8", **ASKED)[0].flops
    assert attention.nbytes == decode_launches("fp8", **ASKED)[0].nbytes  # over the copy it is the 8-bit kernel
    assert unpack.parts["slots"] == attention.parts["slots"] == 4 * ROWS  # each launch reads the list


def test_empty_slots_cost_their_place_in_the_list_only():
    half, = decode_launches("native", 3, 8, 101, fill=0.5)
    assert half.parts["rows"] == 152 * 352 and half.flops == 2 * 152 * 8 * 1088  # 151.5 rows: half a row is a row
    assert half.parts["slots"] == 4 * 3 * 101
    none, = decode_launches("native", 3, 8, 101, fill=0.0)
    assert (none.flops, none.parts["rows"], none.parts["outputs"]) == (0, 0, 2 * 3 * 8 * 512)


def test_other_widths():
    launch, = decode_launches("native", 2, 4, 8, rank=64, rope=16)
    assert launch.parts == {"rows": 16 * (32 + 16 + 4), "queries": 2 * 4 * 80 * 2, "outputs": 2 * 4 * 64 * 2, "slots": 64}
    assert launch.flops == 2 * 16 * 4 * (80 + 64)


def test_the_longer_bound_decides_and_staged_adds_its_launches():
    for path in DECODE_ROWS:
        floor = decode_floor(path, SLOW, **ASKED)
        assert floor.time_s == sum(max(one.flops, one.nbytes) for one in floor.launches)
        assert (floor.nbytes, floor.flops) == (sum(one.nbytes for one in floor.launches), sum(one.flops for one in floor.launches))
    staged = decode_floor("staged", SLOW, **ASKED)
    assert staged.bounds == ("memory", "compute")
    assert staged.time_s == staged.launches[0].nbytes + staged.launches[1].flops


def test_sixteen_heads_wait_for_memory_and_sixty_four_do_not():
    for card in (CARDS["GB200"], CARDS["B200"], CARDS["H200"]):
        for heads, bound in ((16, "memory"), (64, "compute")):
            floor = decode_floor("native", card, **{**ASKED, "heads": heads})
            assert floor.bounds == (bound,)
            assert (floor.launches[0].flops_per_byte < card.flops_per_byte) == (bound == "memory")
    assert decode_floor("bfloat16", CARDS["GB200"], **{**ASKED, "heads": 64}).bounds == ("memory",)


def test_the_reported_times_are_far_above_their_floors():
    for path, reported_us in (("native", 12.0), ("staged", 17.7), ("fp8", 13.7)):
        assert 0.05 < 1e6 * decode_floor(path, CARDS["GB200"], **ASKED).time_s / reported_us < 0.5


def test_a_card_names_its_source():
    for card in CARDS.values():
        assert re.search("data sheet|architecture paper", card.source) and 1e12 <= card.memory_bytes_s < 1e13 < card.matrix_flops_s < 3e15
    with pytest.raises(dataclasses.FrozenInstanceError):
        SLOW.name = "another"


@pytest.mark.parametrize("change, message", [
    ({"path": "fp4"}, "path='fp4': use one of native, staged, fp8, bfloat16"),
    ({"query_tokens": 0}, "query_tokens=0: use at least 1"),
    ({"heads": 0}, "heads=0: use at least 1"),
    ({"top_k": -1}, "top_k=-1: use at least 1"),
    ({"fill": 1.01}, "fill=1.01: use a share from 0 to 1"),
    ({"fill": float("nan")}, "fill=nan: use a share from 0 to 1"),
    ({"rank": 500}, "kv_lora_rank=500: latent rows need a positive multiple of 16"),
])
def test_what_cannot_be_launched_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        decode_floor(**{"path": "native", "card": SLOW, **ASKED, **change})
