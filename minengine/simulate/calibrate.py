"""Prices of this machine's steps, measured on the real engine: `minengine simulate --calibrate`.

Scenes of random shapes (streams that decode in contexts of some length, and a cold prompt that arrives) are served by one engine, every step is
timed with the work in it, and the prices of `LinearCosts` are fitted to them. Scenes know nothing of any trace: what is simulated with these
prices is a prediction.
"""
from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from ..config import ConfigError
from ..schedule import Step
from ..workload.fitting import relative_errors, relative_fit
from ..workload.stats import Summary, summary
from .cost import attended_pairs

__all__ = ["Calibration", "FILE", "QUICK", "Scenes", "calibrate", "main"]

PRICES = {"base_s": "a step", "decode_s": "a decode token", "decode_attention_s": "a row that a decode attends to", "prefill_s": "a prompt's token",
          "attention_s": "a row that a prompt's token attends to"}
FILE = "this-machine.yml"
HEAD = "# What a step of this engine takes on this machine: minengine.simulate.work.LinearCosts. Written by: minengine simulate --calibrate\n"


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """What is drawn for each scene, evenly between least and most.

    Attributes:
        streams: requests that decode.
        context: tokens of each so far; fewer where all together would have more than `all_context`, which takes the time to compute them.
        prompt: tokens of the one that arrives.
        budget: tokens of a step.
    """

    count: int = 24
    streams: tuple[int, int] = (1, 12)
    context: tuple[int, int] = (16, 3000)
    all_context: int = 4000
    prompt: tuple[int, int] = (16, 2000)
    budget: tuple[int, int] = (64, 1024)
    lead: int = 5  # steps of decodes alone
    tail: int = 3  # and again after the prompt's first token


QUICK = Scenes(count=4, streams=(1, 4), context=(16, 256), prompt=(16, 256), budget=(64, 128))  # to see that it works, not to measure


@dataclass(frozen=True)
class Calibration:
    """The prices, and how well they fit the steps that they were fitted to."""

    prices: dict[str, float]
    errors: Summary  # of a step's price, as a fraction of its seconds, without sign
    machine: dict[str, Any]  # where, when and on what it was measured

    def mapping(self) -> dict[str, Any]:
        """As a machine's file has it."""
        return {"kind": "linear", "measured": {**self.machine, "steps": self.errors.n, "median_error": round(self.errors.median, 4),
                                               "middle_half_of_errors": [round(self.errors.low, 4), round(self.errors.high, 4)]},
                **self.prices}


def calibrate(model: str = "smollm2", *, scenes: Scenes = Scenes(), threads: int = 1, seed: int = 0, progress: Callable[[int, int], None] = lambda done, of: None,
              **options: Any) -> Calibration:
    """
    Args:
        threads: 1 counts the engine's own thread alone, whatever else the machine does; with more the clock is the wall's.
        options: of the engine, beside those that the scenes set.

    Raises:
        ConfigError: scenes that the model or its cache cannot hold.
    """
    import torch

    from ..workload.open_loop import EngineClock

    clock = EngineClock() if threads == 1 else None
    engine = _engine(model, scenes, threads, clock, options)
    rng, work, seconds = Random(seed), [], []
    for number in range(scenes.count):
        drawn = {name: rng.randint(*getattr(scenes, name)) for name in ("streams", "context", "prompt", "budget")}
        drawn["context"] = min(drawn["context"], scenes.all_context // drawn["streams"])
        for amount, took in _scene(engine, scenes, number, rng, **drawn):
            work.append(amount)
            seconds.append(took)
        progress(number + 1, scenes.count)
    prices = [float(f"{price:.4g}") for price in relative_fit(work, seconds, nonnegative=True, of_fitted=True)]
    errors = [abs(error) for error in relative_errors(work, seconds, prices)]
    machine = {"model": model, "dtype": str(engine.model.dtype).removeprefix("torch."), "kv_cache_dtype": engine.kv.kv_cache_dtype,
               "device": str(engine.kv.device), "cpu": f"{os.cpu_count()}-core {platform.machine()}", "threads": threads,
               "clock": "the engine's thread" if threads == 1 else "the wall", "torch": str(torch.__version__), "date": date.today().isoformat(),
               "scenes": scenes.count, "seed": seed}
    return Calibration(dict(zip(PRICES, prices)), summary(errors), machine)


def main(model: str = "smollm2", out: str = FILE, quick: bool = False) -> int:
    """Measure, write the machine's file and say how well it fits; returns the exit code.

    Raises:
        ConfigError: the file cannot be written.
    """
    from tqdm import tqdm
    import yaml

    path = Path(out)
    if not path.parent.is_dir():
        raise ConfigError(f"--out={out}: there is no folder {path.parent}; make it first")
    with tqdm(desc="scenes", unit="scene") as bar:
        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        found = calibrate(model, scenes=QUICK if quick else Scenes(), progress=progress)
    path.write_text(HEAD + yaml.safe_dump(found.mapping(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    for name, unit in PRICES.items():
        print(f"{1e3 * found.prices[name]:10.5f} ms  {unit}")
    print(f"{found.errors.n} steps; half of them lie within {found.errors.median:.1%} of these prices, three quarters within {found.errors.high:.1%}")
    print(f"written to {out}; use it with: minengine simulate --machine {out}")
    return 0


def _engine(model: str, scenes: Scenes, threads: int, clock: Any, options: dict[str, Any]) -> Any:
    from ..engine import LLMEngine
    from ..engine_args import EngineArgs

    block_size = options.pop("block_size", 64)
    answer = scenes.lead + scenes.tail + -(-scenes.prompt[1] // scenes.budget[0]) + 8  # of a stream, at most
    longest = max(scenes.context[1], scenes.prompt[1]) + answer
    if scenes.budget[0] <= scenes.streams[1]:
        raise ConfigError(f"scenes: a budget of {scenes.budget[0]} tokens leaves a prompt none beside {scenes.streams[1]} streams; use a larger budget or fewer streams")
    blocks = (scenes.streams[1] + 1) * -(-longest // block_size)
    args = EngineArgs(model=model, block_size=block_size, num_gpu_blocks_override=blocks, max_model_len=longest, max_num_seqs=scenes.streams[1] + 1,
                      max_num_batched_tokens=scenes.budget[1], enable_prefix_caching=False, num_threads=threads, **options)
    return LLMEngine(args, **({} if clock is None else {"clock": clock}))


def _amounts(step: Step) -> tuple[int, ...]:
    """What PRICES are for, in their order."""
    rows = sum(request.num_computed_tokens + 1 for request in step.decodes)
    return 1, len(step.decodes), rows, step.num_tokens - len(step.decodes), attended_pairs(step) - rows


def _scene(engine: Any, scenes: Scenes, number: int, rng: Random, streams: int, context: int, prompt: int, budget: int) -> list[tuple[tuple[int, ...], float]]:
    """(work, seconds) of each of its steps, those that fill the streams' contexts among them."""
    from ..request import SamplingParams

    vocabulary = engine.config.vocab_size
    params = SamplingParams(max_tokens=engine.max_model_len, temperature=0.0, ignore_eos=True)
    engine.scheduler.max_num_batched_tokens = budget
    schedule, seen, clock = engine.scheduler.schedule, [], engine.clock

    def watched(now_s: float) -> Any:
        step = schedule(now_s)
        seen.append(_amounts(step))  # before the step is booked
        return step

    def add(name: str, tokens: int) -> Any:
        ids = [20 + int(rng.random() * (vocabulary - 20)) for _ in range(tokens)]
        return engine.add_request(f"{number}-{name}", {"prompt_token_ids": ids}, params)

    samples: list[tuple[tuple[int, ...], float]] = []

    def steps_until(done: Callable[[], bool]) -> None:
        while not done():
            start_s = clock()
            engine.step()
            samples.append((seen.pop(), clock() - start_s))

    engine.scheduler.schedule = watched
    try:
        running = [add(f"stream-{i}", context) for i in range(streams)]
        steps_until(lambda: all(len(request.timeline.token_s) > 0 for request in running))
        last = running[-1].num_tokens
        steps_until(lambda: running[-1].num_tokens >= last + scenes.lead)
        late = add("prompt", prompt)
        steps_until(lambda: len(late.timeline.token_s) > scenes.tail)
    finally:
        del engine.scheduler.schedule
        for name in list(engine.requests):
            engine.abort_request(name)
    return samples
