"""Exercises of "Copies". The references are the engine's own count of copies, a group that is stepped through, and the weights that ranks keep."""
from __future__ import annotations

from random import Random

from .kinds import Function, Number

__all__ = ["EXERCISES"]

TIMES = 5  # DEP8 over TEP8, as reported


def copies(kv_heads: int, tensor: int, context: int) -> int:
    from ..arithmetic import kv_copies

    return kv_copies(f"TP{tensor}+DCP{context}", kv_heads)


def draw_shape(random: Random) -> tuple[int, int, int]:
    """Powers of two; the sequence is split among ranks that would repeat each other."""
    kv_heads, tensor = 2 ** random.randint(0, 6), 2 ** random.randint(0, 6)
    context = 2 ** random.randint(0, max(1, tensor // kv_heads).bit_length() - 1)
    return kv_heads, tensor, context


def lockstep(steps: list[list[int]]) -> list[tuple[int, int]]:
    """(dummy forwards, ms of waiting) of each rank, step by step."""
    counts = [[0, 0] for _ in steps[0]] if steps else []
    for step in steps:
        end = max(step)
        for count, own in zip(counts, step):
            if end:
                count[0] += own == 0
                count[1] += end - own
    return [(dummies, waited) for dummies, waited in counts]


def draw_steps(random: Random) -> tuple[list[list[int]]]:
    ranks = random.randint(1, 6)
    return ([[random.choice((0, 0, 5, random.randint(1, 400))) for _ in range(ranks)] for _ in range(random.randint(1, 8))],)


def memory_gb() -> float:
    """What a card needs for weights of a byte a parameter and a cache that is TIMES as many tokens under DEP8 as under TEP8."""
    from ..arithmetic import GLM_5_3, rank_weights, topology
    from ..config import model_config

    glm = model_config({**GLM_5_3, "architectures": ["GlmMoeDsaForCausalLM"]})
    dep, tep = (sum(rank_weights(glm, name, 0, "bfloat16").values()) / 2e9 for name in ("DEP8", "TEP8"))
    ranks = topology("DEP8").gpus
    return (ranks * dep - TIMES * tep) / (ranks - TIMES)


EXERCISES = {
    "ex1": Function(
        reference=copies, draw=draw_shape, corners=((1, 4, 1), (1, 8, 4), (8, 8, 1), (8, 2, 1), (2, 8, 2)),
        hint="Give the heads to the ranks. How many ranks get the same one? The sequence is split among those."),
    "ex2": Function(
        reference=lockstep, draw=draw_steps, corners=(([[3, 5]],), ([[0, 5], [0, 5]],), ([[0, 0], [4, 0]],), ([[7]],), ([[0, 0, 0]],)),
        hint="Take the steps one by one: is there one at all, how long is it, and what of it has each rank not worked?"),
    "ex3": Number(
        value=memory_gb,
        hint="Both caches are what the weights leave. A token takes one copy of eight cards under DEP8, and eight under TEP8. GB are powers of 1,000."),
}
