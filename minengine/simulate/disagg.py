"""Three timelines of one scene: streams are decoding, a cold prompt arrives. On one engine with large chunks, on one with small
chunks, and with prefill and decode apart.

`Scheduler`, `BlockPool`, holding, loading and landing are the engine's own; made up are the seconds of a step (`StepCost`) and of a
transfer. Two engines run at once, so time goes from event to event: a step ends, the prompt arrives, its rows have landed.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import fsum, isfinite
from typing import Any

from ..arithmetic.moving import wire_time_s
from ..config import ConfigError
from ..kv.blocks import BlockPool
from ..request import Request, Resume, SamplingParams
from ..schedule import Scheduler, Step
from ..workload.stats import percentile
from .clock import VirtualClock
from .cost import StepCost
from .timeline import BLOCK_SIZE, LEAD, TAIL, TOKEN, Scenario

__all__ = ["ADMISSIONS", "AMOUNTS", "COUNTS", "TOKEN_BYTES", "prefill_decode"]

COUNTS = {  # least and most of each setting
    "streams": (1, 24),
    "prompt_tokens": (16, 8192),
    "large_budget": (16, 8192),
    "small_budget": (16, 8192),
    "seed": (0, 10**6),
}
AMOUNTS = {"transfer_gb_s": (0.05, 1000.0), "pd_slowdown": (1.0, 4.0)}
ADMISSIONS = ("poll", "event")
TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # of SmolLM2-135M in float32: 30 layers, 3 heads, K and V of 64 values
LONG = 4096  # tokens of an answer: more than a timeline is long


class Events:
    """What happens when: actions in order of time; of those at the same nanosecond, in the order in which they were planned."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.numbers = count()

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        heappush(self.queue, (when_ns, next(self.numbers), action))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen one by one, until `until()` says so after one."""
        while self.queue and not until():
            when_ns, _, action = heappop(self.queue)
            self.clock.advance((when_ns - self.clock.now_ns) / 1e9)
            action()


class Engine:
    """An engine as a scheduler that takes steps for as long as there is work; `before` is done ahead of each decision."""

    def __init__(self, events: Events, scheduler: Scheduler, cost: StepCost, slowdown: float = 1.0) -> None:
        self.events, self.scheduler, self.cost, self.slowdown = events, scheduler, cost, slowdown
        self.steps: list[tuple[int, int, int, int]] = []  # start and end in nanoseconds, decode and prefill tokens
        self.marks: dict[str, list[int]] = {}  # for each request, the steps at whose end it got a token
        self.busy = False
        self.before: Callable[[], None] = lambda: None
        self.begins: Callable[[Step, int, int], None] = lambda step, start_ns, end_ns: None
        self.ended: Callable[[], None] = lambda: None

    def add(self, request: Request) -> None:
        self.marks[request.request_id] = []
        self.scheduler.add(request)
        self.wake()

    def wake(self) -> None:
        """Begin a step, unless one is being computed or there is nothing to compute."""
        if self.busy:
            return
        now_ns = self.events.clock.now_ns
        self.before()
        step = self.scheduler.schedule(now_ns / 1e9)
        if step.num_tokens == 0:
            return
        end_ns = now_ns + round(self.cost.seconds(step) * self.slowdown * 1e9)
        self.busy = True
        self.begins(step, now_ns, end_ns)
        self.events.at(end_ns, lambda: self._end(step, now_ns))

    def _end(self, step: Step, start_ns: int) -> None:
        now_ns = self.events.clock.now_ns
        work = (len(step.decodes), sum(chunk.num_tokens for chunk in step.prefills))
        sampled = step.sampled()
        self.scheduler.update(step, [TOKEN] * len(sampled), now_ns / 1e9)
        for request in sampled:
            self.marks[request.request_id].append(len(self.steps))
        self.steps.append((start_ns, now_ns, *work))
        self.busy = False
        self.ended()
        self.wake()


class Wire:
    """A connector whose transfers take virtual time. "event": the scheduler hears of a landing when it happens; "poll": between steps."""

    def __init__(self, events: Events, seconds: Callable[[int], float], admission: str) -> None:
        self.events, self.seconds, self.admission = events, seconds, admission
        self.landed: Callable[[Request, int], None] = lambda request, num_blocks: None
        self.there: list[tuple[Request, int]] = []  # landed, and not yet told
        self.receiver: Engine | None = None

    def find(self, hashes: Sequence[bytes]) -> int:
        return 0  # there is no tier

    def load(self, request: Request, block_ids: Sequence[int], num_cached_blocks: int, hashes: Sequence[bytes]) -> None:
        now_ns = self.events.clock.now_ns
        request.timeline.transfer_start_s = now_ns / 1e9
        missing = len(block_ids) - num_cached_blocks
        rows = request.num_tokens - 1 - num_cached_blocks * self.receiver.scheduler.pool.block_size
        self.events.at(now_ns + round(self.seconds(rows) * 1e9), lambda: self._arrive(request, missing))

    def cancel(self, request: Request) -> bool:
        return True

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        raise NotImplementedError  # nothing is cached here

    def _arrive(self, request: Request, num_blocks: int) -> None:
        request.timeline.transfer_end_s = self.events.clock()
        self.there.append((request, num_blocks))
        if self.admission == "event":
            self.poll()
        self.receiver.wake()

    def poll(self) -> None:
        """Tell of what has landed."""
        for request, num_blocks in self.there:
            self.landed(request, num_blocks)
        self.there.clear()


class Scene:
    """The streams and the prompt on the engines of one timeline."""

    def __init__(self, scenario: Scenario, budget: int, cost: StepCost, seed: int, *, apart: bool = False, slowdown: float = 1.0,
                 transfer_s: Callable[[int], float] = lambda rows: 0.0, admission: str = "poll") -> None:
        self.events, self.scenario, self.budget, self.seed, self.apart = Events(), scenario, budget, seed, apart
        self.arrival_ns: int | None = None
        self.seen = 0  # the streams' step in which the prompt arrives
        num_seqs = len(scenario.stream_prompts) + 1
        blocks = sum(-(-(tokens + LONG) // BLOCK_SIZE) + 1 for tokens in (*scenario.stream_prompts, scenario.prompt_tokens)) + 2 * num_seqs

        def engine(wire: Wire | None = None) -> Engine:
            pool = BlockPool(blocks, BLOCK_SIZE, enable_prefix_caching=False)
            return Engine(self.events, Scheduler(pool, max_num_batched_tokens=budget, max_num_seqs=num_seqs, connector=wire, load_admission=admission),
                          cost, slowdown)

        wire = Wire(self.events, transfer_s, admission) if apart else None
        self.decoder = engine(wire)
        self.prefiller = engine() if apart else self.decoder
        if wire is not None:
            wire.receiver, wire.landed = self.decoder, self._landed
            self.decoder.before = wire.poll
            self.prefiller.ended = self._hand_over
        self.decoder.begins = self._watch
        self.prompt = self._request("prompt", scenario.prompt_tokens, hold=apart)
        self.continued = self.prompt  # by the decoder
        streams = [self._request(f"stream-{i}", tokens) for i, tokens in enumerate(scenario.stream_prompts)]
        self.stream_ids = [stream.request_id for stream in streams]
        self.decoder.marks = {name: [] for name in self.stream_ids}
        for stream in streams:  # all are there when the first step begins
            self.decoder.scheduler.add(stream)
        self.decoder.wake()

    def _request(self, name: str, tokens: int, **how: Any) -> Request:
        return Request(name, [TOKEN] * tokens, SamplingParams(max_tokens=LONG), max_model_len=tokens + LONG, seed=self.seed, **how)

    def _watch(self, step: Step, start_ns: int, end_ns: int) -> None:
        """The prompt arrives in the step after which every stream has a few tokens."""
        if self.arrival_ns is not None:
            return
        sampled = {request.request_id for request in step.sampled()}
        if all(len(self.decoder.marks[name]) + (name in sampled) > LEAD for name in self.stream_ids):
            self.arrival_ns = start_ns + (end_ns - start_ns) * self.scenario.arrives_at // 1000
            self.seen = len(self.decoder.steps)
            self.prompt.timeline.arrival_s = self.arrival_ns / 1e9
            self.events.at(self.arrival_ns, lambda: self.prefiller.add(self.prompt))

    def _hand_over(self) -> None:
        """The prompt is computed and its first token is out: the decoder takes it from there."""
        if self.prompt.request_id in self.prefiller.scheduler.held:
            resume = Resume(output_token_ids=tuple(self.prompt.output_token_ids), timeline=self.prompt.timeline)
            self.continued = self._request("prompt", self.scenario.prompt_tokens, resume=resume, source="the prefill engine")
            self.decoder.add(self.continued)

    def _landed(self, request: Request, num_blocks: int) -> None:
        self.decoder.scheduler.landed(request, num_blocks, self.events.clock())
        self.prefiller.scheduler.release(request.request_id)

    def run(self) -> int:
        """Until the prompt has a few tokens; returns nanoseconds since it arrived."""
        self.events.run(lambda: len(self.continued.timeline.token_s) > TAIL)
        return self.events.clock.now_ns - self.arrival_ns

    def run_on(self, after_ns: int) -> None:
        """Until so much time after the prompt's arrival a step has ended."""
        self.events.run(lambda: self.decoder.steps[-1][1] - self.arrival_ns >= after_ns)

    def result(self) -> dict[str, Any]:
        zero = self.arrival_ns

        def since(seconds: float | None) -> float | None:
            return None if seconds is None else (round(seconds * 1e9) - zero) / 1e9

        def shown(engine: Engine) -> list[list[float]]:
            return [[(start - zero) / 1e9, (end - zero) / 1e9, decodes, prefill] for start, end, decodes, prefill in engine.steps]

        steps, marks, timeline = self.decoder.steps, self.decoder.marks, self.continued.timeline
        quiet = steps[self.seen][1] - steps[self.seen][0]
        gaps = [steps[b][1] - steps[a][1] for name in self.stream_ids for a, b in zip(marks[name], marks[name][1:]) if b > self.seen]
        stalled = [end - start for start, end, decodes, prefill in steps[self.seen + 1:] if decodes and prefill]
        tokens = [since(seconds) for seconds in timeline.token_s]
        return {
            "budget": self.budget,
            "steps": shown(self.decoder),
            "prefill_steps": shown(self.prefiller) if self.apart else [],
            "streams": [[marks[name][0], marks[name][-1]] for name in self.stream_ids],
            "prompt": tokens,
            "admitted_s": since(timeline.admitted_s),
            "transfer_s": [since(timeline.transfer_start_s), since(timeline.transfer_end_s)] if self.apart else [],
            "landed_s": since(timeline.landed_s),
            "decode_admitted_s": since(timeline.decode_admitted_s),
            "ttft_s": tokens[0],
            "second_gap_s": (round(timeline.token_s[1] * 1e9) - round(timeline.token_s[0] * 1e9)) / 1e9,
            "stalled_gaps": len(stalled),
            "quiet_gap_s": quiet / 1e9,
            "longest_gap_s": max(gaps) / 1e9,
            "p90_gap_s": percentile(gaps, 90) / 1e9,
            "lost_s": fsum(gap - quiet for gap in stalled) / 1e9,
        }


def prefill_decode(*, streams: int = 3, prompt_tokens: int = 1024, large_budget: int = 512, small_budget: int = 64, transfer_gb_s: float = 1.0,
                   pd_slowdown: float = 1.0, load_admission: str = "event", token_bytes: int = TOKEN_BYTES, seed: int = 0,
                   cost: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Run the same streams and the same cold prompt three times, each until all three prompts have a few tokens.

    Args:
        large_budget: tokens a step of the engine with large chunks, and of both engines where prefill and decode are apart.
        small_budget: of the engine with small chunks.
        transfer_gb_s: how fast the prompt's rows travel; each token has `token_bytes` bytes of them.
        pd_slowdown: how much longer a step takes on each of the two engines than on the one: 1 where they have twice its
            hardware, more where they share it.
        load_admission: the decoder hears of a landing at once ("event"), or looks between its steps ("poll").
        cost: the parameters of a `StepCost`.

    Returns, ready for JSON, `large`, `small` and `apart`, each with times in seconds since the prompt arrived:
        budget; steps: [start, end, decode tokens, prefill tokens] of the engine that has the streams; prefill_steps: of the other.
        streams: for each stream the first and the last step at whose end it got a token: it got one in each between, too.
        prompt: when each of its tokens came; admitted_s; transfer_s: start and end; landed_s; decode_admitted_s; ttft_s;
        second_gap_s: from its first token to its second.
        stalled_gaps: gaps of running streams with prompt tokens in them. The streams share each step, so a step counts once.
        quiet_gap_s: the gap in which the prompt arrives; longest_gap_s, p90_gap_s: of the streams from then on;
        lost_s: what the stalled gaps exceed the quiet one by, in all.

    Raises:
        ConfigError: a setting outside its limits or of a wrong kind, or a small budget above the large one.
        ValueError: a budget too small to give each request a token (the scheduler's own refusal).
    """
    asked = {"streams": streams, "prompt_tokens": prompt_tokens, "large_budget": large_budget, "small_budget": small_budget, "seed": seed,
             "token_bytes": token_bytes, "transfer_gb_s": transfer_gb_s, "pd_slowdown": pd_slowdown}
    for name, (least, most) in {**COUNTS, "token_bytes": (1, 10**8)}.items():
        value = asked[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{name}={value!r}: use a whole number from {least} to {most}")
    for name, (least, most) in AMOUNTS.items():
        value = asked[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (isfinite(value) and least <= value <= most):
            raise ConfigError(f"{name}={value!r}: use a number from {least:g} to {most:g}")
    if load_admission not in ADMISSIONS:
        raise ConfigError(f"load_admission={load_admission!r}: use one of {', '.join(ADMISSIONS)}")
    if small_budget > large_budget:
        raise ConfigError(f"small_budget={small_budget}: use at most large_budget, {large_budget}")
    step_cost = StepCost(**(cost or {}))
    scenario = Scenario(streams, prompt_tokens, LONG, seed)
    scenes = {
        "large": Scene(scenario, large_budget, step_cost, seed),
        "small": Scene(scenario, small_budget, step_cost, seed),
        "apart": Scene(scenario, large_budget, step_cost, seed, apart=True, slowdown=pd_slowdown, admission=load_admission,
                       transfer_s=lambda rows: wire_time_s(rows * token_bytes, 1e9 * transfer_gb_s)),
    }
    longest = max(scene.run() for scene in scenes.values())
    for scene in scenes.values():
        scene.run_on(longest)
    return {name: scene.result() for name, scene in scenes.items()}
