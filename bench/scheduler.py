"""Row 6: the scheduler alone. 256 requests run, 1,000 wait, tokens are made up; pure Python, no tensor.

Two cases: steady (everybody decodes, nobody ends, blocks grow and are hashed) and turnover (outputs of 16 to 128 tokens end,
waiting requests with prompts of 32 to 512 tokens take their places, new ones arrive).
"""
from __future__ import annotations

import time
from random import Random
from typing import Any

from .harness import Bench, Variant
from .table import Row, at_least, figure

RUNNING, WAITING, STEPS_A_SAMPLE, SAMPLES = 256, 1000, 100, 10


def rows(bench: Bench) -> list[Row]:
    result = bench.run(Variant("scheduler", "bench.scheduler:steps_per_second")).result
    return [figure(f"scheduler alone, {RUNNING} running and {WAITING} waiting, {case}", samples, at_least(2500), "steps/s")
            for case, samples in result.items()]


def steps_per_second(threads: int) -> dict[str, Any]:
    return {case: _measure(turnover) for case, turnover in (("steady", False), ("turnover", True))}


def _measure(turnover: bool) -> list[float]:
    from minengine.kv.blocks import BlockPool
    from minengine.request import Request, SamplingParams
    from minengine.schedule import Scheduler

    rng = Random(0)
    block_size, longest = 64, 8192
    pool = BlockPool(RUNNING * longest // block_size, block_size, True)
    scheduler = Scheduler(pool, max_num_batched_tokens=2048, max_num_seqs=RUNNING)
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        ids = [17 + int(rng.random() * 49000) for _ in range(32 + int(rng.random() * 481))]
        tokens = 16 + int(rng.random() * 113) if turnover else longest - 512
        scheduler.add(Request(f"r{arrived}", ids, SamplingParams(max_tokens=tokens, ignore_eos=True), max_model_len=longest))
        arrived += 1

    def step() -> None:
        decision = scheduler.schedule(0.0)
        scheduler.update(decision, [100] * len(decision.sampled()), 0.0)

    for _ in range(RUNNING + WAITING):
        arrive()
    while len(scheduler.running) < RUNNING or any(r.num_tokens - r.num_computed_tokens > 1 for r in scheduler.running):
        step()  # fill the places
        if turnover and len(scheduler.running) == RUNNING:
            break
    samples = []
    for _ in range(SAMPLES):
        spent_s = 0.0
        for _ in range(STEPS_A_SAMPLE):
            while len(scheduler.waiting) < WAITING:
                arrive()  # made outside the clock: it is the client's work
            start = time.perf_counter()
            step()
            spent_s += time.perf_counter() - start
        samples.append(STEPS_A_SAMPLE / spent_s)
    return samples
