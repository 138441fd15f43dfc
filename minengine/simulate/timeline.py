"""One engine's timeline: streams are decoding, a cold prompt arrives, and the scheduler decides step by step.

`Scheduler` and `BlockPool` are the engine's own; only the seconds of a step are made up, by a `StepCost`.
"""
from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from random import Random
from typing import Any

from ..config import ConfigError
from ..kv.blocks import BlockPool
from ..request import Request, SamplingParams
from ..schedule import Scheduler
from .clock import VirtualClock
from .cost import StepCost

__all__ = ["LIMITS", "Scenario", "timeline"]

LIMITS = {  # least and most of each setting
    "streams": (1, 24),
    "prompt_tokens": (1, 8192),
    "max_num_batched_tokens": (16, 8192),
    "output_tokens": (8, 512),
    "seed": (0, 10**6),
}
LEAD = 6  # tokens that every stream has before the prompt arrives
TAIL = 6  # steps shown after the prompt's first token
STREAM_PROMPT = (8, 16)  # least and most tokens of a stream's own prompt
BLOCK_SIZE = 64
TOKEN = 1  # every token of every request: what tokens say does not change a decision


class Scenario:
    """What is asked of the engine: the streams, the prompt, and when it arrives. The seed decides the streams' own prompts
    (8 to 16 tokens) and at which moment of a step the prompt comes in.
    """

    def __init__(self, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> None:
        rng = Random(seed)  # whole numbers only: they are the same on every machine
        self.stream_prompts = [rng.randint(*STREAM_PROMPT) for _ in range(streams)]
        self.arrives_at = rng.randrange(1000)  # thousandths of the step in which the prompt arrives
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks for all requests at their longest: memory is not what this timeline is about, so nobody is preempted."""
        return sum(-(-(tokens + self.output_tokens) // BLOCK_SIZE) for tokens in (*self.stream_prompts, self.prompt_tokens))


def timeline(*, streams: int = 3, prompt_tokens: int = 640, max_num_batched_tokens: int = 128, output_tokens: int = 64, seed: int = 0,
             cost: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Run `streams` streams until each has a few tokens, let a cold prompt arrive, and go on until it has a few tokens too.

    Every request has `output_tokens` tokens of answer. `cost` holds the parameters of a `StepCost`.

    Returns, ready for JSON, times in seconds from the start:
        steps: [start, end, decode tokens, prefill tokens] of each step.
        streams: for each stream, the steps at whose end it got a token; prompt: the same of the prompt's request.
        arrival_s, admitted_s, first_token_s of the prompt; ttft_s, its time to first token.
        stalled_gaps: gaps of running streams with prompt tokens in them. The streams share each step, so a step counts once.
        quiet_gap_s: the gap just before the prompt is looked at; longest_gap_s: of any stream from then on.
        lost_s: what the stalled gaps exceed the quiet one by, in all.

    Raises:
        ConfigError: a setting outside LIMITS or of a wrong kind.
        ValueError: a budget too small to give each request a token (the scheduler's own refusal).
    """
    settings = {"streams": streams, "prompt_tokens": prompt_tokens, "max_num_batched_tokens": max_num_batched_tokens,
                "output_tokens": output_tokens, "seed": seed}
    for name, (least, most) in LIMITS.items():
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{name}={value!r}: use a whole number from {least} to {most}")
    step_cost = StepCost(**(cost or {}))
    scenario = Scenario(streams, prompt_tokens, output_tokens, seed)
    scheduler = Scheduler(BlockPool(scenario.num_blocks, BLOCK_SIZE, enable_prefix_caching=False),
                          max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=streams + 1)
    clock = VirtualClock()

    def request(name: str, tokens: int) -> Request:
        return Request(name, [TOKEN] * tokens, SamplingParams(max_tokens=output_tokens), max_model_len=tokens + output_tokens, seed=seed)

    running = [request(f"stream-{i}", tokens) for i, tokens in enumerate(scenario.stream_prompts)]
    late = request("prompt", prompt_tokens)
    for stream in running:
        scheduler.add(stream)
    marks: dict[str, list[int]] = {r.request_id: [] for r in (*running, late)}
    steps: list[tuple[int, int, int, int]] = []  # start and end in nanoseconds, decode and prefill tokens
    arrival_ns = seen = None  # when the prompt came in; the first step that could take it
    while scheduler.has_unfinished and len(marks["prompt"]) <= TAIL:
        start_ns = clock.now_ns
        step = scheduler.schedule(clock())
        work = (len(step.decodes), sum(chunk.num_tokens for chunk in step.prefills))
        clock.advance(step_cost.seconds(step))
        sampled = step.sampled()
        scheduler.update(step, [TOKEN] * len(sampled), clock())
        for r in sampled:
            marks[r.request_id].append(len(steps))
        steps.append((start_ns, clock.now_ns, *work))
        if seen is None and all(len(marks[stream.request_id]) > LEAD for stream in running):
            arrival_ns, seen = start_ns + (clock.now_ns - start_ns) * scenario.arrives_at // 1000, len(steps)
            late.timeline.arrival_s = arrival_ns / 1e9
            scheduler.add(late)

    ends = [end for _, end, _, _ in steps]
    gaps = [ends[b] - ends[a] for stream in running for a, b in zip(marks[stream.request_id], marks[stream.request_id][1:]) if b >= seen]
    quiet = steps[seen - 1][1] - steps[seen - 1][0]
    stalled = [end - start for start, end, decodes, prefill in steps[seen:] if decodes and prefill]
    return {
        "steps": [[start / 1e9, end / 1e9, decodes, prefill] for start, end, decodes, prefill in steps],
        "streams": [marks[stream.request_id] for stream in running],
        "prompt": marks["prompt"],
        "arrival_s": late.timeline.arrival_s,
        "admitted_s": late.timeline.admitted_s,
        "first_token_s": late.timeline.token_s[0],
        "ttft_s": (ends[marks["prompt"][0]] - arrival_ns) / 1e9,
        "stalled_gaps": len(stalled),
        "quiet_gap_s": quiet / 1e9,
        "longest_gap_s": max(gaps, default=0) / 1e9,
        "lost_s": fsum(gap - quiet for gap in stalled) / 1e9,
    }
