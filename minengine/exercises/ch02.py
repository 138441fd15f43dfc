"""Exercises of "One engine, one budget". The references run the engine's own scheduler, with made-up tokens in place of a model's."""
from __future__ import annotations

from random import Random
from typing import Sequence

from ..kv.blocks import BlockPool
from ..request import Request, SamplingParams
from ..schedule import Scheduler
from .kinds import Function

__all__ = ["EXERCISES"]


def run(jobs: Sequence[tuple[int, int]], places: int) -> tuple[int, list[Request]]:
    """Steps until all (prompt, answer) jobs, there from the start, are done; and the requests they were."""
    requests = [Request(str(i), list(range(prompt)), SamplingParams(max_tokens=answer), max_model_len=prompt + answer)
                for i, (prompt, answer) in enumerate(jobs)]
    pool = BlockPool(sum((prompt + answer) // 16 + 1 for prompt, answer in jobs), 16, False)
    scheduler = Scheduler(pool, max_num_batched_tokens=10_000, max_num_seqs=places)
    for request in requests:
        scheduler.add(request)
    steps = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        scheduler.update(step, [1] * len(step.sampled()))
        steps += 1
    return steps, requests


def batching_steps(lengths: Sequence[int], places: int) -> tuple[int, int]:
    """(static, continuous) steps for answers of these lengths."""
    jobs = [(8, length) for length in lengths]
    return sum(run(jobs[i:i + places], places)[0] for i in range(0, len(jobs), places)), run(jobs, places)[0]


def draw_lengths(random: Random) -> tuple[list[int], int]:
    return [random.randint(1, 30) for _ in range(random.randint(1, 16))], random.randint(1, 6)


def rows(prompt_tokens: int, output_tokens: int) -> int:
    """Rows that the cache holds for a request when it ends."""
    return run([(prompt_tokens, output_tokens)], 1)[1][0].num_computed_tokens


EXERCISES = {
    "ex1": Function(
        reference=batching_steps, draw=draw_lengths, corners=(([5], 4), ([3, 3, 3, 3], 2)), tries=60,
        hint="Static: which request of a batch decides when the next batch may start? Continuous: give each request the place that becomes free first."),
    "ex2": Function(
        reference=rows, draw=lambda random: (random.randint(1, 300), random.randint(1, 40)), corners=((1, 1), (5, 1), (64, 2), (65, 3)), tries=60,
        hint="Does the last token ever go through the model?"),
}
