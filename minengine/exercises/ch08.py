"""Exercises of "A kernel that reads four bits". The references are the floors of a kernel, the rows as they are unpacked, and the merge of parts."""
from __future__ import annotations

import math
from functools import cache
from random import Random

from ..arithmetic import CARDS, decode_floor, row_bytes
from .kinds import Function, Number

__all__ = ["EXERCISES"]

RANK, ROPE = 512, 64
ROW = row_bytes("nvfp4_fp8_ds_mla", RANK, ROPE)
LOWEST = -1e30


def heads_at_the_ridge() -> int:
    """The fewest heads with which the source's launch of the native kernel is bound by arithmetic on an H200."""
    return next(heads for heads in range(1, 513) if decode_floor("native", CARDS["H200"], 15, heads, 2048).bounds == ("compute",))


def home(element: int) -> tuple[int, int, int]:
    """(byte, shift, byte of the scale) of an element of the latent, found by unpacking rows that have one field set."""
    return _homes()[element]


@cache
def _homes() -> list[tuple[int, int, int]]:
    import torch
    from minkernels.rows import unpack  # torch, only when this exercise is checked

    one, codes, scales = 0x38, ROW.span("latent"), ROW.span("scales")
    nibbles = torch.zeros(RANK, ROW.total, dtype=torch.uint8)  # row n has a 1 in nibble n, and scales of 1
    nibbles[:, scales] = one
    at = torch.arange(RANK)
    nibbles[at, at // 2] = (2 << 4 * (at % 2)).to(torch.uint8)
    groups = torch.zeros(RANK // 16, ROW.total, dtype=torch.uint8)  # row s has a 1 in scale s, and ones in all nibbles
    groups[:, codes] = 0x22
    groups[:, scales] = torch.eye(RANK // 16, dtype=torch.uint8) * one
    nibble_of, scale_of = (unpack(rows, ROW.name, RANK, ROPE)[0].argmax(0).tolist() for rows in (nibbles, groups))
    return [(nibble // 2, 4 * (nibble % 2), scales.start + scale) for nibble, scale in zip(nibble_of, scale_of)]


def merged(parts: list[tuple[float, float, float]]) -> float:
    """Weighted mean of all entries, from the maximum, the sum and the blend of each part."""
    top = max((top for top, total, _ in parts if total > 0), default=LOWEST)
    weights = [math.exp(part_top - top) if total > 0 else 0.0 for part_top, total, _ in parts]
    total = sum(weight * total for weight, (_, total, _) in zip(weights, parts))
    return sum(weight * blend for weight, (_, _, blend) in zip(weights, parts)) / total if total else 0.0


def draw_parts(random: Random) -> tuple[list[tuple[float, float, float]]]:
    """Up to six parts of up to eight entries each, which may score hundreds or nothing at all; some parts are empty."""
    base, parts = random.choice((0.0, 900.0, -900.0)), []
    for _ in range(random.randint(1, 6)):
        entries = [(base + random.uniform(-5, 5), random.uniform(1, 9)) for _ in range(random.choice((0, 1, 3, 8)))]
        top = max((score for score, _ in entries), default=LOWEST)
        parts.append((top, sum(math.exp(score - top) for score, _ in entries), sum(math.exp(score - top) * value for score, value in entries)))
    return (parts,)


EXERCISES = {
    "ex1": Number(
        value=heads_at_the_ridge,
        hint="Operations grow with the heads, and so do the queries and outputs that are moved, but the rows do not. decode_floor says which bound decides."),
    "ex2": Function(
        reference=home, draw=lambda random: (random.randrange(RANK),), corners=((0,), (1,), (15,), (16,), (64,), (511,)), tries=100,
        hint="Two elements a byte, the even one in the low half. Sixteen elements a scale, and scales stand in four runs of eight."),
    "ex3": Function(
        reference=merged, draw=draw_parts, corners=(([(LOWEST, 0.0, 0.0)],), ([(2.0, 1.0, 5.0), (2.0, 1.0, 7.0)],), ([(0.0, 1.0, 3.0), (LOWEST, 0.0, 0.0)],)),
        hint="Bring all parts to one maximum before you add them, sums and blends alike; divide once, at the end, and not by zero."),
}
