"""Exercises of "A tier below HBM". The references are the linear cost of a way back, the engine's own pool with a tier below it, and the headline's sessions."""
from __future__ import annotations

from random import Random

from ..arithmetic import bytes_per_token, row_bytes, session_bytes
from .kinds import Function, Number

__all__ = ["EXERCISES"]

SESSIONS, DECODERS, HELD, TOKENS, LAYERS = 66, 4, 11, 146_000, 78  # as reported and reasoned


def fewest_blocks(block_size: int, token_us: int, start_us: int, block_us: int, token_bytes: int, bytes_a_us: int) -> int:
    """Blocks from which on bringing back is quicker than computing again, 0 if it never is; times are multiplied by `bytes_a_us`, so that all is whole."""
    saved = (block_size * token_us - block_us) * bytes_a_us - block_size * token_bytes
    return start_us * bytes_a_us // saved + 1 if saved > 0 else 0


def draw_costs(random: Random) -> tuple[int, ...]:
    return (random.choice((4, 16, 64)), random.randint(1, 900), random.choice((0, 1, 500, 20_000)), random.randint(0, 300),
            random.randint(1_000, 50_000), random.choice((100, 2_000, 20_000)))


def found_blocks(chain: list[int], device: set[int], tier: set[int]) -> tuple[int, int, int]:
    """What the engine's pool finds, then what a tier has from there on, then the rest."""
    from ..kv.blocks import BlockPool  # only when this exercise is checked

    pool = BlockPool(len(device) + 1, 1)
    for block, h in zip(pool.allocate(len(device)), sorted(device)):
        pool.register(block, _name(h))
    here = len(pool.find(map(_name, chain)))
    there = 0
    while here + there < len(chain) and chain[here + there] in tier:
        there += 1
    return here, there, len(chain) - here - there


def _name(h: int) -> bytes:
    return h.to_bytes(32, "big")


def draw_chain(random: Random) -> tuple[list[int], set[int], set[int]]:
    """Up to a dozen blocks; what a place has is mostly a beginning of the chain, with holes, and other sessions' blocks."""
    chain = random.sample(range(1, 100), random.randint(0, 12))

    def some(likely: float) -> set[int]:
        return {h for h in chain if random.random() < likely} | set(random.sample(range(100, 120), 3))

    return chain, some(random.choice((0.0, 0.6, 0.9))), some(random.choice((0.0, 0.7, 0.95)))


EXERCISES = {
    "ex1": Function(
        reference=fewest_blocks, draw=draw_costs,
        corners=((64, 1_000, 20_000, 200, 46_080, 2_000), (4, 10, 100, 40, 1_000, 1_000), (16, 100, 0, 100, 27_456, 20_000), (16, 2, 0, 0, 1_000, 100),
                 (10, 10, 180, 0, 100, 100), (10, 1, 50, 0, 100, 100)),
        hint="Each block saves the time of its tokens, less its own cost and its bytes; the start must be saved first. Just as quick is not quicker."),
    "ex2": Function(
        reference=found_blocks, draw=draw_chain,
        corners=(([1, 2, 3], {1}, {2, 3}), ([1, 2, 3], {1, 3}, set()), ([1, 2, 3], {3}, {1}), ([1, 2, 3], {1, 2, 3}, {1, 2, 3}), ([], set(), {1})),
        hint="A run from the front on the device, then a run in the tier that begins where the first one ended. Behind a gap nothing counts."),
    "ex3": Number(
        value=lambda: (SESSIONS - DECODERS * HELD) * session_bytes(TOKENS, bytes_per_token(row_bytes("nvfp4_fp8_ds_mla").total, LAYERS)) / 1e9,
        hint="The sessions that do not fit on the decoders, times the bytes of one, in units of a thousand million."),
}
