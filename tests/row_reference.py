"""Row formats written from their definitions, one number at a time: what the tests of the formats compare with."""
import itertools
import math

import numpy as np
import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e, m in itertools.product(range(16), range(8))][:127]


def nearest(table: list[float], x: float) -> int:
    """Index of the entry nearest |x|, ties to the even index, beyond the end the last one."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - abs(x)), i % 2)) if abs(x) < table[-1] else len(table) - 1


def sign_bit(x: float) -> int:
    return int(math.copysign(1, x) < 0)


def e4m3_byte(x: float) -> int:
    return nearest(E4M3, x) + 128 * sign_bit(x)


def nvfp4_group(values) -> tuple[list[int], int]:
    """16 float32 -> 8 bytes, scale byte."""
    wanted = max(float(np.float32(max(abs(v) for v in values)) / np.float32(6)), 2.0**-9)
    scale = next((i for i, v in enumerate(E4M3) if v >= wanted), 126)
    codes = [nearest(E2M1, float(np.float32(v) / np.float32(E4M3[scale]))) + 8 * sign_bit(v) for v in values]
    return [codes[i] | codes[i + 1] << 4 for i in range(0, 16, 2)], scale


def nvfp4_latent_row(latent, rope) -> bytes:
    groups = [nvfp4_group(latent[i : i + 16]) for i in range(0, len(latent), 16)]
    scales = [0] * len(groups)
    for s, (_, scale) in enumerate(groups):
        scales[8 * (s & 3) + (s >> 2) if len(latent) == 512 else s] = scale
    return bytes([b for packed, _ in groups for b in packed] + [e4m3_byte(v) for v in rope] + scales)


def fp8_ds_mla_row(latent, rope) -> bytes:
    packed, scales = [], []
    for i in range(0, len(latent), 128):
        group = latent[i : i + 128]
        wanted = max(float(np.float32(max(abs(v) for v in group)) / np.float32(448)), 2.0**-126)
        scale = next(2.0**e for e in range(-126, 128) if 2.0**e >= wanted)
        packed += [e4m3_byte(v / scale) for v in group]
        scales.append(scale)
    return bytes(packed) + np.array(scales, np.float32).tobytes() + bf16_part(rope)


def int_part(bits, values) -> bytes:
    most = 2 ** (bits - 1) - 1
    scale = max(np.float32(max(abs(v) for v in values)) / np.float32(most), np.float32(2.0**-126))
    codes = [round(float(np.float32(v) / scale)) + most for v in values]  # ties to even
    stream = sum(code << bits * i for i, code in enumerate(codes))  # one long number, lowest bits first
    return stream.to_bytes(len(values) * bits // 8, "little") + np.float32(scale).tobytes()


def int_row(bits, latent, rope) -> bytes:
    return int_part(bits, latent) + bf16_part(rope)


def bf16_part(values) -> bytes:
    return torch.tensor(values).bfloat16().view(torch.int16).numpy().tobytes()


def nvfp4_head(values) -> bytes:
    groups = [nvfp4_group(values[i : i + 16]) for i in range(0, len(values), 16)]
    return bytes([b for packed, _ in groups for b in packed] + [scale for _, scale in groups])


def q8_0_head(values) -> bytes:
    out = b""
    for i in range(0, len(values), 32):
        block = [np.float32(v) for v in values[i : i + 32]]
        d = np.float32(max(abs(v) for v in block)) / np.float32(127)
        inverse = np.float32(0) if d == 0 else np.float32(1) / d
        q = [int(math.copysign(math.floor(abs(float(v * inverse)) + 0.5), v)) for v in block]
        out += np.float16(d).tobytes() + np.array(q, np.int8).tobytes()
    return out


def q4_0_head(values) -> bytes:
    out = b""
    for i in range(0, len(values), 32):
        block = [np.float32(v) for v in values[i : i + 32]]
        d = max(block, key=abs) / np.float32(-8)  # max() keeps the first of equals
        inverse = np.float32(0) if d == 0 else np.float32(1) / d
        q = [min(15, int(v * inverse + np.float32(8.5))) for v in block]
        out += np.float16(d).tobytes() + bytes(q[j] | q[j + 16] << 4 for j in range(16))
    return out


def hard_values(n: int, seed: int) -> torch.Tensor:
    """(n,) numbers whose magnitude differs from one group of 16 to the next, some on rounding ties, some zero."""
    torch.manual_seed(seed)
    x = torch.randn(n) * torch.exp2(torch.randint(-12, 9, (n // 16, 1)).float()).expand(-1, 16).flatten()[:n]
    x[::7] = torch.round(x[::7] * 8) / 8
    x[::11] = 0.0
    x[::13] = -0.0
    return x
