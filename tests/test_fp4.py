"""Four-bit formats whose scales differ from the cache row's: MXFP4, and NVFP4 with a scale for the whole tensor."""
import math
from fractions import Fraction
from random import Random

import pytest
import torch

from minkernels.fp4 import (E2M1_MAX, E4M3_MAX, MX_GROUP, e4m3_decode, mxfp4_dequantize, mxfp4_quantize, nvfp4_dequantize, nvfp4_global_scale,
                            nvfp4_quantize)

MAGNITUDES = [Fraction(m) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def relative_error(x, read):
    return ((x.double() - read.double()).square().sum() / x.double().square().sum()).item()


def nearest(x: Fraction) -> tuple[int, Fraction]:
    """Code and magnitude of the E2M1 nearest to |x|; of two equally near the one with the even code."""
    code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - abs(x)), c % 2))
    return code, MAGNITUDES[code]


def mx_group(values) -> tuple[int, list[int], list[float]]:
    """Scale byte, codes and read values of one group, in exact fractions."""
    largest = max(abs(v) for v in values)
    exponent = max(math.frexp(largest)[1] - 3, -127) if largest else -127
    scale = Fraction(2) ** exponent
    found = [nearest(Fraction(v) / scale) for v in values]
    return (exponent + 127, [code | 8 * (math.copysign(1, v) < 0) for (code, _), v in zip(found, values)],
            [math.copysign(float(magnitude * scale), v) for (_, magnitude), v in zip(found, values)])


def draw(random: Random) -> list[float]:
    """A group in float32: of any size, with ties, a zero and a value that saturates."""
    size = 2.0 ** random.randint(-140, 125)
    kind = random.random()
    values = [random.gauss(0, 1) * size if kind < 0.5 else random.randint(-16, 16) / 4 * size for _ in range(MX_GROUP)]
    values[random.randrange(MX_GROUP)] = 0.0
    return torch.tensor(values).tolist()


def test_mxfp4_equals_exact_arithmetic():
    random = Random(0)
    groups = [draw(random) for _ in range(300)] + [[0.0] * MX_GROUP, [-0.0] * MX_GROUP, [3.4028234663852886e38] * MX_GROUP, [2.0**-149] * MX_GROUP,
                                                   [7.9, 6.0, 5.0, 4.0, 3.5, 2.5, 1.75, -1.25] * 4]
    packed, scales = mxfp4_quantize(torch.tensor(groups))
    read = mxfp4_dequantize(packed, scales)
    assert packed.shape == (len(groups), MX_GROUP // 2) and scales.shape == (len(groups), 1) and scales.dtype == torch.uint8
    for i, group in enumerate(groups):
        byte, codes, values = mx_group(group)
        assert scales[i].item() == byte
        assert [b >> shift & 15 for b in packed[i].tolist() for shift in (0, 4)] == codes, group
        assert read[i].tolist() == values
        assert [math.copysign(1, v) for v in read[i].tolist()] == [math.copysign(1, v) for v in group]


def test_mxfp4_groups_are_independent_and_keep_leading_dims():
    x = torch.randn(3, 5, 2 * MX_GROUP, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 2.0**60]).repeat_interleave(MX_GROUP)
    packed, scales = mxfp4_quantize(x)
    assert packed.shape == (3, 5, MX_GROUP) and scales.shape == (3, 5, 2)
    read = mxfp4_dequantize(packed, scales)
    for part in (slice(0, MX_GROUP), slice(MX_GROUP, None)):
        assert torch.equal(read[..., part], mxfp4_dequantize(*mxfp4_quantize(x[..., part])))
        assert 0.011 < relative_error(x[..., part], read[..., part]) < 0.016
    assert torch.equal(mxfp4_dequantize(packed, scales, torch.bfloat16).float(), read)


def test_mxfp4_makes_infinities_the_largest_number():
    x = torch.zeros(1, MX_GROUP)
    x[0, 3], x[0, 4] = torch.inf, -torch.inf
    read = mxfp4_dequantize(*mxfp4_quantize(x))[0]
    assert read[3] == 6 * 2.0**125 and read[4] == -read[3] and read.count_nonzero() == 2


@pytest.mark.parametrize("quantize, group", [(mxfp4_quantize, 32), (nvfp4_quantize, 16)])
def test_a_width_that_is_no_multiple_of_the_group_is_refused(quantize, group):
    with pytest.raises(ValueError, match=f"the last dimension is {group + 8}, pad it to a multiple of {group}"):
        quantize(torch.zeros(2, group + 8))


# Relative squared errors on N(0, sigma), computed from the formats' definitions.
@pytest.mark.parametrize("sigma, no_floor, row", [(1.0, 0.00904, 0.0100), (0.01, 0.0158, 0.0127), (0.001, 1.0, 0.0795)])
def test_what_a_global_scale_saves(sigma, no_floor, row):
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(2)) * sigma
    g = nvfp4_global_scale(x)
    assert relative_error(x, nvfp4_dequantize(*nvfp4_quantize(x, "nearest", global_scale=g), global_scale=g)) == pytest.approx(0.00904, rel=0.01)
    assert relative_error(x, nvfp4_dequantize(*nvfp4_quantize(x, "nearest", least_scale=0.0))) == pytest.approx(no_floor, rel=0.01)
    assert relative_error(x, nvfp4_dequantize(*nvfp4_quantize(x))) == pytest.approx(row, rel=0.01)
    assert relative_error(x, mxfp4_dequantize(*mxfp4_quantize(x))) == pytest.approx(0.0132, rel=0.06)  # depends on where sigma lies between powers of two


def test_the_global_scale_takes_the_largest_group_to_the_largest_scale():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) * 1e-20
    g = nvfp4_global_scale(x)
    assert g.shape == () and g.dtype == torch.float32 and g.item() == pytest.approx(x.abs().max().item() / (E4M3_MAX * E2M1_MAX), rel=1e-6)
    packed, scales = nvfp4_quantize(x, "nearest", global_scale=g)
    assert e4m3_decode(scales).max() == E4M3_MAX
    at = x.abs().argmax()
    assert nvfp4_dequantize(packed, scales, global_scale=g).flatten()[at].item() == pytest.approx(x.flatten()[at].item(), rel=1e-6)


def test_zeros_stay_zeros_with_and_without_a_scale_for_all():
    x = torch.zeros(2, 32)
    g = nvfp4_global_scale(x)
    assert g == 2.0**-126
    for options in ({}, {"global_scale": g}, {"least_scale": 0.0}, {"scale_rounding": "nearest", "least_scale": 0.0}):
        packed, scales = nvfp4_quantize(x, **options)
        assert not nvfp4_dequantize(packed, scales, global_scale=options.get("global_scale")).any(), options


def test_a_group_whose_scale_is_zero_is_stored_as_zeros_beside_one_that_is_not():
    x = torch.cat((torch.full((1, 16), 2.0**-12), torch.full((1, 16), 3.0)), dim=-1)
    packed, scales = nvfp4_quantize(x, "nearest", least_scale=0.0)
    assert not packed[0, :8].any(), "codes of zero, too: what would be divided by a scale of zero has no code"
    assert scales[0, 0] == 0 and nvfp4_dequantize(packed, scales)[0].tolist() == [0.0] * 16 + [3.0] * 16
    assert nvfp4_dequantize(packed, scales, torch.bfloat16, torch.tensor(1 / 3)).dtype == torch.bfloat16
