"""Exercises of "The scheduler bubble". The references look at every moment of a row of steps, and run the engine's own scheduler."""
from __future__ import annotations

from random import Random

from ..kv.blocks import BlockPool
from ..request import Request, SamplingParams
from ..schedule import Scheduler
from .kinds import Function

__all__ = ["EXERCISES"]


def until_the_next_look(steps: list[int]) -> float:
    """Mean wait from a random moment to the end of its step, steps in whole milliseconds one after another."""
    waits = [length - at - 0.5 for length in steps for at in range(length)]
    return sum(waits) / len(waits)


def draw_steps(random: Random) -> tuple[list[int]]:
    return ([random.choice((random.randint(1, 20), random.randint(1, 20), random.randint(50, 600))) for _ in range(random.randint(1, 12))],)


def steps_before(cold_tokens: int, budget: int, cap: int) -> int:
    """Whole steps from which a ready request is left out, when the prompt of a request that came before has just been begun."""
    pool = BlockPool(4 * (cold_tokens // 16 + 2), 16, False)
    scheduler = Scheduler(pool, max_num_batched_tokens=budget, max_num_seqs=2, long_prefill_token_threshold=cap)
    cold, ready = (Request(name, list(range(n)), SamplingParams(max_tokens=1), max_model_len=n + 2) for name, n in (("cold", cold_tokens), ("ready", 2)))
    scheduler.add(cold)
    scheduler.add(ready)
    steps = 0
    while ready.timeline.admitted_s is None:
        step = scheduler.schedule()
        if ready.timeline.admitted_s is None:
            scheduler.update(step, [1] * len(step.sampled()))
            steps += 1
    return steps


def draw_prompt(random: Random) -> tuple[int, int, int]:
    budget = random.choice((16, 32, 64, 128))
    return random.choice((random.randint(1, 600), budget * random.randint(1, 4))), budget, random.choice((0, 0, budget // 2, budget, 2 * budget))


def noticed(steps: list[int], arrives: int, load: int, event: bool) -> int:
    """When a step first begins that can take a request, in ms. Steps run one after another from 0 on; its load takes `load` ms, and begins when it
    arrives (event) or when the next step begins (poll). What has landed is known at the beginning of a step, and the last step ends in idleness."""
    starts = [sum(steps[:i]) for i in range(len(steps) + 1)]
    begin = arrives if event else next((s for s in starts if s >= arrives), arrives)
    there = begin + load
    return next((s for s in starts if s >= there and s > begin), there)


def draw_load(random: Random) -> tuple[list[int], int, int, bool]:
    steps = [random.randint(2, 400) for _ in range(random.randint(1, 8))]
    return steps, random.randint(1, sum(steps)), random.randint(1, 120), random.random() < 0.5


EXERCISES = {
    "ex1": Function(
        reference=until_the_next_look, draw=draw_steps, corners=(([100],), ([1, 1, 1],), ([10, 10, 10, 400],)),
        hint="In which of the steps does a random moment lie? In a long one more often than in a short one, and then it also waits longer."),
    "ex2": Function(
        reference=steps_before, draw=draw_prompt, corners=((100, 64, 0), (128, 64, 0), (64, 64, 0), (1, 64, 0), (600, 64, 32), (200, 64, 128)),
        hint="A prompt that has begun goes before a request that is ready, and takes what the budget allows, or what the limit on one prompt does. "
             "When is something left for the other?"),
    "ex3": Function(
        reference=noticed, draw=draw_load, corners=(([100, 100], 50, 10, True), ([100, 100], 50, 10, False), ([100], 50, 10, False), ([100, 50], 60, 40, True)),
        hint="Three moments: the load begins, it ends, a step begins at or after that. With poll the first of them is itself the beginning of a step, and "
             "that step cannot take the request."),
}
