"""The bytes that the kernels' generated code touches, against the book's formulas."""
import numpy as np
import pytest

from minengine.arithmetic import head_row_bytes, row_bytes, staged_bytes
from minkernels.addresses import touched
from minkernels.aot import all_cases, compile_case
from minkernels.traffic import row_traffic

PACKED, FP8 = row_bytes("nvfp4_fp8_ds_mla").total, row_bytes("fp8").total


@pytest.mark.parametrize("path, wanted", [
    ("native", {"sparse_mla_kernel loads": PACKED}),
    ("fp8", {"sparse_mla_kernel loads": FP8}),
    ("staged", {"gather_to_fp8_kernel loads": PACKED, "gather_to_fp8_kernel stores": FP8, "sparse_mla_kernel loads": FP8}),
])
def test_a_row_moves_the_bytes_of_the_formula(path, wanted):
    assert row_traffic(path) == wanted


def test_the_paths_are_the_books():
    assert [sum(row_traffic(path).values()) for path in ("native", "staged", "fp8")] == [PACKED, staged_bytes(PACKED, FP8), FP8] == [352, 1504, 576]


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8", "nvfp4"])
def test_a_position_of_grouped_heads_is_read_once(kv_format):
    """Of all four query heads of a group together: K and V, and their scales."""
    case = all_cases()[f"paged_decode {kv_format}"]
    tile, size, row = case.constants["BLOCK_N"], 16, 512
    numbers = {"num_positions": 64 * size, "num_heads": 8, "num_blocks": 1000, "block_size": size, "q_stride": 4096, "q_head_stride": 128,
               "page_stride": size * 8 * row, "row_stride": 8 * row, "head_stride": row, "table_stride": 64}
    lists = {"block_tables": np.arange(7, 7 + 2 * 64, 2), "seq_lens": np.array([8 * tile])}  # a tile for each of eight splits
    code = compile_case(case, "sm_90a").asm["ttir"]
    found = touched(code, [name for name, kind in case.signature.items() if kind != "constexpr"], lists, numbers, program=(0, 3, 0))
    assert found.loaded["pages"] == found.asked["pages"] == tile * head_row_bytes(kv_format, 128).total
    lists["seq_lens"] = np.array([5])
    found = touched(code, [name for name, kind in case.signature.items() if kind != "constexpr"], lists, numbers, program=(0, 3, 0))
    assert found.loaded["pages"] == 5 * head_row_bytes(kv_format, 128).total


KERNEL = """
  tt.func public @copy(%rows: !tt.ptr<i16>, %slots: !tt.ptr<i32>, %out: !tt.ptr<f32>, %width: i32) attributes {noinline = false} {
    %c8 = arith.constant 8 : i32
    %c0 = arith.constant 0 : i32
    %two = arith.constant dense<2> : tensor<16xi32, #blocked>
    %i = tt.get_program_id y : i32
    %at = tt.addptr %slots, %i : !tt.ptr<i32>, i32
    %slot = tt.load %at : !tt.ptr<i32>
    %lane = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32, #blocked>
    %end = tt.splat %width : i32 -> tensor<16xi32, #blocked>
    %mask = arith.cmpi slt, %lane, %end : tensor<16xi32, #blocked>
    %pair = arith.divsi %lane, %two : tensor<16xi32, #blocked>
    scf.for %step = %c0 to %c8 step %c8  : i32 {
      %x = arith.muli %slot, %c8 : i32
      %y = tt.addptr %rows, %x : !tt.ptr<i16>, i32
      %z = tt.splat %y : !tt.ptr<i16> -> tensor<16x!tt.ptr<i16>, #blocked>
      %p = tt.addptr %z, %pair : tensor<16x!tt.ptr<i16>, #blocked>, tensor<16xi32, #blocked>
      %v = tt.load %p, %mask : tensor<16x!tt.ptr<i16>, #blocked>
    }
    %z = tt.splat %out : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>, #blocked>
    %p = tt.addptr %z, %lane : tensor<16x!tt.ptr<f32>, #blocked>, tensor<16xi32, #blocked>
    tt.store %p, %v, %mask : tensor<16x!tt.ptr<f32>, #blocked>
    tt.return
"""
NAMES = ["rows", "slots", "out", "width"]


def test_addresses_by_hand():
    """Two lanes share each 16-bit element; a name is used again after the loop, for another address."""
    found = touched(KERNEL, NAMES, {"slots": np.array([0, 5])}, {"width": 10}, program=(9, 1, 9))
    assert (found.loaded, found.asked, found.stored) == ({"rows": 5 * 2}, {"rows": 10 * 2}, {"out": 10 * 4})
    unmasked = touched(KERNEL, NAMES, {"slots": np.array([0, 5])}, {})  # a mask that is not known hides nothing
    assert (unmasked.loaded, unmasked.stored) == ({"rows": 8 * 2}, {"out": 16 * 4})


def test_an_address_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="address of this access is not known: %v = tt.load %p, %mask"):
        touched(KERNEL, NAMES, {}, {"width": 10})


def test_an_unknown_path_is_named():
    with pytest.raises(ValueError, match="path='direct': use one of native, staged, fp8"):
        row_traffic("direct")
