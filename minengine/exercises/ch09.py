"""Exercises of "Moving the cache". The references are the engine's own pieces, the linear cost of a transfer, and the source's two transfers."""
from __future__ import annotations

from random import Random

from .kinds import Function, Number

__all__ = ["EXERCISES"]

COPIES, DESCRIPTORS, MS = 32_000, (19_559, 1_940), (146, 78)  # as reported


def merged_pieces(here: list[int], there: list[int]) -> int:
    """Pieces of a move between two block-major pools that are left when neighbours have been merged."""
    from ..disagg.pieces import pieces  # numpy, only when this exercise is checked
    from ..kv.layout import KVLayout

    layout = KVLayout("BLHNC", num_layers=2, num_blocks=1 + max([0, *here, *there]), num_heads=1, block_size=4, row_bytes=4)
    return pieces(layout, here, layout, there, stop=4 * len(here)).merged


def draw_tables(random: Random) -> tuple[list[int], list[int]]:
    """Two tables of up to thirty blocks in runs; one of three pairs is listed in no order, both sides alike."""
    count = random.randint(1, 30)
    pairs = list(zip(_table(random, count), _table(random, count)))
    if random.randrange(3) == 0:
        random.shuffle(pairs)
    return [a for a, _ in pairs], [b for _, b in pairs]


def _table(random: Random, count: int) -> list[int]:
    """`count` different blocks of sixty, cut into runs of up to eight whose order is drawn."""
    numbers, runs = list(range(60)), []
    while numbers:
        size = random.randint(1, 8)
        runs.append(numbers[:size])
        numbers = numbers[size:]
    random.shuffle(runs)
    return [number for run in runs for number in run][:count]


def smallest_block(token_bytes: int, bytes_a_us: int, copy_us: int, percent: int) -> int:
    """Tokens of the smallest block of which at most `percent` of the time is the piece's own."""
    return -(-copy_us * (100 - percent) * bytes_a_us // (percent * token_bytes))


EXERCISES = {
    "ex1": Function(
        reference=merged_pieces, draw=draw_tables,
        corners=(([0], [5]), ([0, 1, 2], [5, 6, 7]), ([0, 1, 2], [7, 6, 5]), ([2, 1, 0], [7, 6, 5]), ([4, 0, 5, 1], [9, 2, 10, 3])),
        hint="Two blocks are one piece where one follows the other on both sides; the order in which they are listed does not matter."),
    "ex2": Function(
        reference=smallest_block, draw=lambda random: (random.randint(10_000, 60_000), random.choice((300, 5_000, 48_000)), random.randint(1, 50), random.randint(5, 50)),
        corners=((27_456, 48_000, 4, 10), (10_000, 10_000, 9, 10), (60_000, 300, 1, 50)),
        hint="A block of n tokens takes n x token_bytes / bytes_a_us, and copy_us on top. The share is of both together. Whole tokens, rounded up."),
    "ex3": Number(
        value=lambda: COPIES * (MS[0] - MS[1]) / (DESCRIPTORS[0] - DESCRIPTORS[1]),
        hint="The bytes of both transfers are the same, so the difference of the times is the difference of the pieces: that is the cost of one."),
}
