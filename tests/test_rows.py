"""Row formats against `row_reference`, and their error levels, corners and refusals."""
import math
from functools import partial

import numpy as np
import pytest
import torch

from minengine.arithmetic import head_row_bytes, indexer_bytes, row_bytes
from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError
from minengine.kv.rows import head_format, indexer_format, row_format
from minkernels.fp4 import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, e4m3_round_up, nvfp4_dequantize, nvfp4_quantize
from row_reference import E2M1, E4M3, bf16_part, e4m3_byte, fp8_ds_mla_row, hard_values, int_part, int_row, nearest, nvfp4_head, nvfp4_latent_row, q4_0_head, q8_0_head, sign_bit

F32_MAX = torch.finfo(torch.float32).max

# --- numbers ----------------------------------------------------------------------------------------------

def test_e2m1_rounds_ties_to_even_and_saturates():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = torch.stack((midpoints.nextafter(torch.tensor(0.0)), midpoints, midpoints.nextafter(torch.tensor(9.0))))
    x = torch.cat((around.flatten(), torch.tensor([0.0, -0.0, 5e-324, 6.0, 7.0, 1e30, math.inf]), torch.linspace(0, 8, 4098)))
    x = torch.cat((x, -x))
    codes = torch.stack((e2m1_encode(x) & 15, e2m1_encode(x) >> 4), -1).flatten()
    assert codes.tolist() == [nearest(E2M1, v) + 8 * sign_bit(v) for v in x.tolist()]
    assert e2m1_decode(e2m1_encode(midpoints.repeat(2))).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_decodes_to_its_definition(dtype):
    every = torch.arange(256, dtype=torch.uint8)
    signed = [*E2M1, *(-v for v in E2M1)]
    assert e2m1_decode(every, dtype).tolist() == [v for b in range(256) for v in (signed[b & 15], signed[b >> 4])]
    finite = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    assert e4m3_decode(finite, dtype).tolist() == [*E4M3, *(-v for v in E4M3)]


def test_e4m3_rounds_to_nearest_even_and_the_scale_rounds_up():
    edges = torch.tensor(E4M3)
    x = torch.cat((edges, (edges[1:] + edges[:-1]) / 2, edges * 1.01, edges * 0.99, torch.tensor([448.1, 465.0, 1e30, math.inf])))
    assert e4m3_encode(torch.cat((x, -x))).tolist() == [e4m3_byte(v) for v in torch.cat((x, -x)).tolist()]
    up = x[x > 0]
    assert e4m3_round_up(up).tolist() == [next((i for i, v in enumerate(E4M3) if v >= w), 126) for w in up.tolist()]


# --- bytes ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rank, rope", [(512, 64), (64, 16), (16, 8), (144, 6)])
def test_nvfp4_latent_row_equals_its_definition(rank, rope):
    latent = torch.stack([hard_values(rank, seed) for seed in range(4)])
    rope_key = torch.stack([hard_values(64, 100 + seed)[:rope] for seed in range(4)])
    rows = row_format("nvfp4_fp8_ds_mla", rank, rope).quantize(latent, rope_key)
    assert [bytes(r) for r in rows.tolist()] == [nvfp4_latent_row(a, b) for a, b in zip(latent.tolist(), rope_key.tolist())]


@pytest.mark.parametrize("rank, rope", [(512, 64), (64, 16), (144, 6)])
def test_fp8_ds_mla_row_equals_its_definition(rank, rope):
    latent = torch.stack([hard_values(rank, seed) for seed in range(4)])
    latent[3, :16] = torch.tensor([448 * 4.0] + [0.1] * 15)  # amax/448 is a power of two already: it must not be doubled
    rope_key = torch.stack([hard_values(64, 100 + seed)[:rope] for seed in range(4)])
    rows = row_format("fp8_ds_mla", rank, rope).quantize(latent, rope_key)
    assert [bytes(r) for r in rows.tolist()] == [fp8_ds_mla_row(a, b) for a, b in zip(latent.tolist(), rope_key.tolist())]


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("rank, rope", [(512, 64), (32, 16), (144, 6)])
def test_integer_rows_equal_their_definition(bits, rank, rope):
    latent = torch.stack([hard_values(rank, seed) for seed in range(4)])
    latent[3] = latent[3].sign() * 2.0**-130  # below the smallest scale
    rope_key = torch.stack([hard_values(64, 100 + seed)[:rope] for seed in range(4)])
    rows = row_format(f"int{bits}", rank, rope).quantize(latent, rope_key)
    assert [bytes(r) for r in rows.tolist()] == [int_row(bits, a, b) for a, b in zip(latent.tolist(), rope_key.tolist())]


HEADS = {
    "float32": lambda x: np.array(x, np.float32).tobytes(), "bfloat16": bf16_part, "fp8": lambda x: bytes(map(e4m3_byte, x)), "nvfp4": nvfp4_head,
    "q8_0": q8_0_head, "q4_0": q4_0_head, **{f"int{bits}": partial(int_part, bits) for bits in (4, 3, 2)},
}


@pytest.mark.parametrize("name", [*list(HEADS)[3:], "q8_0:q4_0", "int3:bfloat16", "float32:fp8", "fp8:int4", "bfloat16:nvfp4", "nvfp4:int2"])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_head_rows_equal_their_definition(name, head_dim):
    k, v = (torch.stack([hard_values(head_dim, seed) for seed in seeds]) for seeds in (range(5), range(5, 10)))
    k[3], v[3] = 0.0, k[3] * 2.0**-60
    of_k, of_v = (HEADS[part] for part in (name.split(":") * 2)[:2])
    fmt = head_format(name, head_dim)
    rows = fmt.quantize(k, v)
    assert [bytes(r) for r in rows.tolist()] == [of_k(a) + of_v(b) for a, b in zip(k.tolist(), v.tolist())]
    assert fmt.nbytes == rows.shape[-1] == head_row_bytes(name, head_dim).total


@pytest.mark.parametrize("k_format", HEADS)
@pytest.mark.parametrize("v_format", HEADS)
def test_k_and_v_apart_give_what_each_gives_in_a_row_of_its_own(k_format, v_format):
    torch.manual_seed(6)
    k, v = torch.randn(2, 4, 3, 64)
    name = k_format if k_format == v_format else f"{k_format}:{v_format}"
    both, alone = head_format(name, 64), [head_format(part, 64) for part in (k_format, v_format)]
    for dtype in (torch.float32, torch.bfloat16):
        got = both.dequantize(both.quantize(k, v), dtype)
        wanted = [fmt.dequantize(fmt.quantize(k, v), dtype)[part] for part, fmt in enumerate(alone)]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_q8_0_rounds_halves_away_from_zero_and_nothing_below_a_half():
    x = torch.zeros(32)
    x[:5] = torch.tensor([127.0, 0.5, -2.5, 0.49999997, 126.5])  # amax 127: the scale is 1
    assert head_format("q8_0", 32).quantize(x, x)[2:7].view(torch.int8).tolist() == [127, 1, -3, 0, 127]


def test_unscaled_fp8_rows_equal_their_definition():
    a, b = hard_values(64, 1), hard_values(16, 2)
    assert row_format("fp8", 64, 16).quantize(a, b).tolist() == [e4m3_byte(v) for v in [*a.tolist(), *b.tolist()]]
    assert head_format("fp8", 64).quantize(a, a).tolist() == [e4m3_byte(v) for v in a.tolist()] * 2


def test_bytes_lie_at_their_offsets_in_the_352_byte_row():
    latent, rope = torch.zeros(512), torch.zeros(64)
    latent[2], latent[3] = 6.0, -1.0  # group 0, scale 1.0: byte 1 holds code 7 low and 10 high
    latent[16 * 13 + 15] = 12.0  # group 13, scale 2.0, the high nibble of byte 111
    rope[5] = -448.0
    row = row_format("nvfp4_fp8_ds_mla").quantize(latent, rope)
    floor, one, two = 1, E4M3.index(1.0), E4M3.index(2.0)
    assert row[1] == 7 | 10 << 4 and row[111] == 7 << 4
    assert row[256 + 5] == 126 + 128
    assert row[320 + 0] == one and row[320 + 8 * (13 & 3) + (13 >> 2)] == two
    others = [i for i in range(32) if i not in (0, 8 * (13 & 3) + (13 >> 2))]
    assert all(row[320 + i] == floor for i in others)
    assert int((row[:320] != 0).sum()) == 3


def test_each_group_keeps_its_own_magnitude():
    """Exact values at 32 different scales come back exactly, so no scale is applied to another group."""
    scales = torch.tensor(E4M3[8:120:3][:32])
    latent = (torch.tensor([*E2M1, *(-v for v in E2M1)]) * scales[:, None]).flatten()
    back, _ = row_format("nvfp4_fp8_ds_mla").dequantize(row_format("nvfp4_fp8_ds_mla").quantize(latent, torch.zeros(64)))
    assert torch.equal(back, latent)
    k = latent[:64]
    assert torch.equal(head_format("nvfp4", 64).dequantize(head_format("nvfp4", 64).quantize(k, -k))[1], -k)


# --- error levels -----------------------------------------------------------------------------------------

def relative_mse(x: torch.Tensor, back: torch.Tensor) -> float:
    x, back = x.double(), back.double()
    return float(((x - back) ** 2).sum() / (x**2).sum())


@pytest.mark.parametrize("name, sigma, expected", [
    ("nvfp4_fp8_ds_mla", 1.0, 0.0100), ("nvfp4_fp8_ds_mla", 0.01, 0.0127), ("nvfp4_fp8_ds_mla", 0.001, 0.0795), ("fp8", 1.0, 7.0e-4),
    ("int4", 1.0, 0.0181), ("int4", 1e-3, 0.0181), ("int3", 1.0, 0.0984), ("int2", 1.0, 0.705),
])
def test_error_of_the_latent(name, sigma, expected):
    torch.manual_seed(0)
    latent = torch.randn(2048, 512) * sigma
    fmt = row_format(name)
    back, _ = fmt.dequantize(fmt.quantize(latent, torch.zeros(2048, 64)))
    assert relative_mse(latent, back) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name, expected", [
    ("nvfp4", 0.0100), ("fp8", 7.0e-4), ("q8_0", 2.87e-5), ("q4_0", 0.00739), ("int4", 0.0115), ("int3", 0.0630), ("int2", 0.515),
])
def test_error_of_k_and_v(name, expected):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2048, 3, 64)
    fmt = head_format(name, 64)
    for x, back in zip((k, v), fmt.dequantize(fmt.quantize(k, v))):
        assert relative_mse(x, back) == pytest.approx(expected, rel=0.02)


def test_error_with_scales_rounded_to_nearest():
    torch.manual_seed(0)
    x = torch.randn(2048, 512)
    assert relative_mse(x, nvfp4_dequantize(*nvfp4_quantize(x, "nearest"))) == pytest.approx(0.00904, rel=0.02)


def test_power_of_two_scales_keep_the_error_at_any_magnitude():
    torch.manual_seed(0)
    fmt = row_format("fp8_ds_mla")
    for sigma in (1e-20, 1e-3, 1e20):
        latent = torch.randn(256, 512) * sigma
        assert relative_mse(latent, fmt.dequantize(fmt.quantize(latent, torch.zeros(256, 64)))[0]) < 8e-4


# --- corners ----------------------------------------------------------------------------------------------

ALL = [(row_format, name, (64, 16)) for name in LATENT_DTYPES] + [(head_format, name, (64,)) for name in (*HEAD_DTYPES, "q8_0:q4_0", "int3:bfloat16")]


@pytest.mark.parametrize("make, name, size", ALL, ids=lambda v: v if isinstance(v, str) else "")
class TestEveryFormat:
    def test_zeros_are_kept(self, make, name, size):
        fmt = make(name, *size)
        for part in fmt.dequantize(fmt.quantize(*(torch.zeros(2, w) for w in fmt.widths))):
            assert not part.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_huge_and_tiny_numbers_stay_finite(self, make, name, size, dtype):
        fmt = make(name, *size)
        rows = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1e20, 2.0**-130, 2.0**-149, -(2.0**-126), 1.0, 0.0], dtype=dtype)
        a, b = (rows[:, None].repeat(1, w) for w in fmt.widths)
        a[-1, 3], b[-1, 3] = rows[0], rows[1]  # one outlier among zeros
        for part, x in zip(fmt.dequantize(fmt.quantize(a, b)), (a, b)):
            assert part.isfinite().all()
            assert part.sign().mul(x.sign()).ge(0).all()  # nothing wraps to the other sign
            assert (part.abs() <= x.float().abs() * 1.15 + 2.0**-10).all()
            assert part[0].min() > 0 and part[1].max() < 0 and part[6].sub(1).abs().max() < 0.15

    def test_infinity_reads_as_the_largest_number(self, make, name, size):
        if name == "float32":
            return  # a plain row of the input's own dtype keeps it
        fmt = make(name, *size)
        a, b = (torch.ones(1, w) for w in fmt.widths)
        a[0, 0], b[0, -1] = math.inf, -math.inf
        a, b = fmt.dequantize(fmt.quantize(a, b))
        assert a.isfinite().all() and b.isfinite().all() and a[0, 0] > 2 and b[0, -1] < -2

    def test_leading_dims_strides_and_nothing_at_all(self, make, name, size):
        fmt = make(name, *size)
        torch.manual_seed(3)
        wide_a, wide_b = (torch.randn(5, 3, 2 * w) for w in fmt.widths)
        a, b = wide_a[..., ::2], wide_b.transpose(0, 1)[..., : fmt.widths[1]].transpose(0, 1)
        rows = fmt.quantize(a, b)
        assert rows.shape == (5, 3, fmt.storage_width) and rows.dtype == fmt.storage_dtype
        assert rows.element_size() * fmt.storage_width == fmt.nbytes
        one_by_one = torch.stack([torch.stack([fmt.quantize(a[i, j], b[i, j]) for j in range(3)]) for i in range(5)])
        assert torch.equal(rows, one_by_one)
        unaligned = torch.zeros(5, 3, fmt.storage_width + 1, dtype=fmt.storage_dtype)
        unaligned[..., 1:] = rows
        for part, again in zip(fmt.dequantize(rows), fmt.dequantize(unaligned[..., 1:])):
            assert torch.equal(part, again)
        for lead in ((0,), (4, 0), (0, 3)):
            empty = fmt.quantize(*(torch.zeros(*lead, w) for w in fmt.widths))
            assert empty.shape == (*lead, fmt.storage_width)
            assert [p.shape for p in fmt.dequantize(empty)] == [(*lead, w) for w in fmt.widths]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_dtypes_are_the_float32_result_rounded(self, make, name, size, dtype):
        fmt = make(name, *size)
        torch.manual_seed(4)
        rows = fmt.quantize(*(torch.randn(7, w) for w in fmt.widths))
        for exact, part in zip(fmt.dequantize(rows), fmt.dequantize(rows, dtype)):
            assert part.dtype == dtype and torch.equal(part, exact.to(dtype))

    def test_wrong_widths_are_refused(self, make, name, size):
        with pytest.raises(ValueError, match=name):
            make(name, *size).quantize(torch.zeros(2, 48), torch.zeros(2, 16))


def test_beyond_its_range_a_format_gives_its_largest_number():
    huge = torch.full((32,), F32_MAX)
    largest = {"bfloat16": torch.finfo(torch.bfloat16).max, "fp8": 448, "nvfp4": 448 * 6, "q8_0": 127 * 65504, "q4_0": 8 * 65504}
    for name, value in largest.items():
        fmt = head_format(name, 32)
        k, v = fmt.dequantize(fmt.quantize(huge, -huge))
        assert (k == value).all() and (v == -value).all(), name


def test_plain_rows_come_back_as_views():
    for fmt, dtype in ((row_format("float32", 32, 8), torch.float32), (head_format("bfloat16", 32), torch.bfloat16)):
        rows = torch.zeros(3, fmt.storage_width, dtype=dtype)
        for part in fmt.dequantize(rows, dtype):
            assert part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", LATENT_DTYPES)
@pytest.mark.parametrize("width", [128, 30])
def test_indexer_keys(name, width):
    fmt = indexer_format(name, width)
    torch.manual_seed(5)
    keys = torch.randn(6, width) * torch.tensor([1e-30, 1e-3, 1.0, 100.0, 1e30, 0.0])[:, None]
    rows = fmt.quantize(keys)
    assert rows.shape == (6, fmt.storage_width) and fmt.storage_width * rows.element_size() == fmt.nbytes == indexer_bytes(name, width).total
    back = fmt.dequantize(rows)
    tolerance = {"float32": 0.0, "bfloat16": 2.0**-8}.get(name, 2.0**-4)
    assert ((back - keys).abs() <= tolerance * keys.abs().amax(-1, keepdim=True)).all()
    assert fmt.quantize(keys[:0]).shape == (0, fmt.storage_width) and fmt.dequantize(rows[:0]).shape == (0, width)
    if name not in ("float32", "bfloat16"):
        amax = keys.abs().amax(-1)
        assert rows[:, width:].clone().view(torch.float32)[:, 0].tolist() == (amax / 448).clamp(min=2.0**-126).tolist()
        assert fmt.quantize(torch.tensor([[math.inf] + [1.0] * (width - 1)]))[0, 0] == 126


def test_sizes_are_those_of_arithmetic():
    for name in LATENT_DTYPES:
        for rank, rope in ((512, 64), (48, 10)):
            assert row_format(name, rank, rope).nbytes == row_bytes(name, rank, rope).total
    for name in HEAD_DTYPES:
        assert head_format(name, 96).nbytes == head_row_bytes(name, 96).total


@pytest.mark.parametrize("call, words", [
    (lambda: row_format("nvfp4", 512, 64), ["kv_cache_dtype='nvfp4'", "nvfp4_fp8_ds_mla"]),
    (lambda: head_format("fp8_ds_mla", 64), ["kv_cache_dtype='fp8_ds_mla'", "q8_0"]),
    (lambda: row_format("fp8", 40, 64), ["kv_lora_rank=40", "multiple of 16"]),
    (lambda: row_format("float32", 0, 64), ["kv_lora_rank=0"]),
    (lambda: row_format("fp8", 64, 0), ["qk_rope_head_dim=0"]),
    (lambda: head_format("q4_0", 48), ["head_dim=48", "multiple of 32"]),
    (lambda: head_format("nvfp4", 24), ["head_dim=24", "multiple of 16"]),
    (lambda: head_format("int3", 12), ["head_dim=12", "multiple of 8"]),
    (lambda: head_format("fp8:q4_0", 48), ["head_dim=48", "'fp8:q4_0'", "multiple of 32"]),
    (lambda: head_format("q4_0:fp9", 64), ["kv_cache_dtype='q4_0:fp9'", "'fp9' is no format of V", "q8_0"]),
    (lambda: head_format(":q4_0", 64), ["kv_cache_dtype=':q4_0'", "'' is no format of K"]),
    (lambda: head_format("fp8:fp8:fp8", 64), ["'fp8:fp8' is no format of V"]),
    (lambda: head_format("q4_0:q4_0", 64), ["K and V are alike", "kv_cache_dtype='q4_0'"]),
    (lambda: row_format("fp8:int4"), ["kv_cache_dtype='fp8:int4'", "not a latent row"]),
    (lambda: indexer_format("q8_0", 128), ["kv_cache_dtype='q8_0'"]),
])
def test_what_does_not_fit_is_named_with_the_remedy(call, words):
    with pytest.raises(ConfigError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_nvfp4_refuses_broken_groups_and_unknown_rounding():
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4_quantize(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="scale_rounding='down'"):
        nvfp4_quantize(torch.zeros(2, 16), "down")
