"""A closed loop against an engine or a cluster: so many streams, each of which sends its next request when its last one has ended.

    seen = run(cluster, Load(prompt_tokens=128), warm_s=1.0, window_s=3.0)
    percentile(seen.gaps_s, 90)

What is counted is what falls into the window, by the requests' own stamps. The loop has an event loop of its own, so it also runs where
another one is running already, as in a notebook.
"""
from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Callable

from ..request import SamplingParams, Timeline
from .cluster import Cluster

__all__ = ["Load", "Scene", "Seen", "record_scene", "run", "tokens", "work"]

FIRST_TEXT_TOKEN, LAST_TOKEN = 17, 49151  # smollm2's; other ids are control tokens
LIMIT_S = 600.0  # for a part of the loop that takes seconds on a quiet machine
_names = count()


@dataclass(frozen=True, kw_only=True)
class Load:
    """
    Attributes:
        streams: requests under way at any time.
        prompt_tokens: of each request, drawn anew, so that none of them is in any cache.
        output_tokens: of an answer on average; lengths are uniform from half of it to one and a half, or streams that began together would
            end together, and their prompts would meet no running stream.
        history_tokens: each stream is a session, whose past of so many tokens is in the caches; a turn adds `prompt_tokens` and its answer.
    """

    streams: int = 8
    prompt_tokens: int = 64
    output_tokens: int = 24
    history_tokens: int = 0


@dataclass(slots=True)
class Seen:
    """What fell into the window."""

    gaps_s: list[float] = field(default_factory=list)  # between tokens of a request
    second_s: list[float] = field(default_factory=list)  # those between a first token and a second, which are in gaps_s too
    ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0  # of answers
    moved: dict[str, float] = field(default_factory=dict)  # by the cluster's transfers since the loop began: its counts and sums


def run(cluster: Cluster, load: Load, *, warm_s: float, window_s: float, seed: int = 0) -> Seen:
    """Run the loop, count for a while, and give up what is under way then. Returns when the workers are idle.

    Args:
        warm_s: what is passed over, and more of it until every stream has ended a request.
        window_s: what is counted, and more of it until as many first tokens as streams were in it: a machine may be slow, or a prompt long.

    Raises:
        RuntimeError: a request failed, or nothing comes any more.
    """
    before = _moved(cluster)
    with ThreadPoolExecutor(1) as own_loop:
        timelines, start_s, end_s = own_loop.submit(asyncio.run, _loop(cluster.engine, load, warm_s, window_s, seed)).result()
    _until_idle(cluster)
    seen = Seen()
    for timeline in timelines:
        stamps = timeline.token_s
        if stamps and start_s <= stamps[0] < end_s:
            seen.ttft_s.append(stamps[0] - timeline.arrival_s)
        if len(stamps) > 1 and start_s <= stamps[1] < end_s:
            seen.second_s.append(stamps[1] - stamps[0])
        seen.gaps_s += [b - a for a, b in zip(stamps, stamps[1:]) if start_s <= b < end_s]
        seen.tokens_per_s += sum(start_s <= stamp < end_s for stamp in stamps) / (end_s - start_s)
    seen.moved = {name: total - before.get(name, 0) for name, total in _moved(cluster).items()}
    return seen


async def _loop(engine: Any, load: Load, warm_s: float, window_s: float, seed: int) -> tuple[list[Timeline], float, float]:
    timelines: dict[str, Timeline] = {}  # of each request, as it was said last
    ended: dict[int, int] = dict.fromkeys(range(load.streams), 0)
    tasks = [asyncio.create_task(_stream(engine, load, i, seed, timelines, ended)) for i in range(load.streams)]

    async def until(least_s: float, enough: Callable[[float], bool]) -> float:
        start_s = time.perf_counter()  # the clock of the workers' stamps, too
        while (passed_s := time.perf_counter() - start_s) < least_s or not enough(start_s):
            if passed_s > LIMIT_S:
                raise RuntimeError(f"the streams of {load} came no further in {LIMIT_S:.0f} s")
            for task in (await asyncio.wait(tasks, timeout=0.05))[0]:
                task.result()  # none ends but by an error
        return start_s

    try:
        await until(warm_s, lambda _: all(ended.values()))
        start_s = await until(window_s, lambda begun_s: sum(t.token_s[0] >= begun_s for t in timelines.values()) >= load.streams)
        end_s = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return list(timelines.values()), start_s, end_s


async def _stream(engine: Any, load: Load, number: int, seed: int, timelines: dict[str, Timeline], ended: dict[int, int]) -> None:
    rng, session = Random(f"{seed} {number}"), f"stream-{number}" if load.history_tokens else None
    past, mean = tokens(load.history_tokens, f"history {number}"), load.output_tokens
    for turn in count():
        length = rng.randint(mean // 2, mean + mean // 2)
        if turn == 0:  # so that the streams do not end together the first time either
            length = 2 + mean * number // load.streams
        prompt, answer, name = past + tokens(load.prompt_tokens, f"{seed} {number} {turn}"), [], f"loop-{next(_names)}"
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name, session_id=session):
            if output.error:
                raise RuntimeError(output.error)
            answer += output.outputs[0].token_ids
            timelines[name] = output.metrics
        ended[number] += 1
        if load.history_tokens:
            past = prompt + answer


def tokens(n: int, seed: str) -> list[int]:
    """So many token ids that stand for text: how long a step takes does not depend on what they say. No text begins as a longer one does: a
    cache would find it again."""
    rng = Random(f"{n} {seed}")
    return [rng.randint(FIRST_TEXT_TOKEN, LAST_TOKEN) for _ in range(n)]


def _moved(cluster: Cluster) -> dict[str, float]:
    """The transfers of all workers together, since their start."""
    totals: dict[str, float] = {}
    for worker in cluster.workers:
        for name, value in worker.transfers.items():
            if isinstance(value, (int, float)):
                totals[name] = totals.get(name, 0) + value
    return totals


def _until_idle(cluster: Cluster) -> None:
    """The next one to be measured has the machine for itself."""
    limit_s = time.perf_counter() + LIMIT_S
    while any(worker.num_running or worker.num_waiting or worker.num_free_blocks < worker.num_blocks for worker in cluster.workers):
        if time.perf_counter() > limit_s:
            raise RuntimeError("a worker has not become idle; look at cluster.workers")
        time.sleep(0.01)


# --- what a load asks for ------------------------------------------------------------------------------------------


def work(engine: Any, load: Load, repeats: int = 2) -> tuple[list[float], list[float]]:
    """(prefill, decode): seconds that one request of the load takes of an `LLMEngine`, by the engine's own clock; one sample a repeat.

    Prefill is the time to the first token of a prompt that is alone there. Decode is that of the other tokens, in steps shared by all streams.
    """
    prefill_s, decode_s = [], []
    for repeat in range(repeats + 1):  # the first one warms up
        past = tokens(load.history_tokens, f"past {repeat}")
        if past:
            _serve(engine, [past], 1)
        prompt = past + tokens(load.prompt_tokens, f"alone {repeat}")
        [alone] = _serve(engine, [prompt], 1)
        # The streams have contexts of the load's length, and share what of them fills blocks, so that the repeat is short.
        beside = _serve(engine, [prompt + tokens(1, f"beside {i}") for i in range(load.streams)], 10)
        stamps = beside[-1].token_s[1:]
        if repeat:
            prefill_s.append(alone.token_s[0] - alone.arrival_s)
            decode_s.append((load.output_tokens - 1) * (stamps[-1] - stamps[0]) / (len(stamps) - 1) / load.streams)
    return prefill_s, decode_s


def _serve(engine: Any, prompts: list[list[int]], length: int) -> list[Timeline]:
    requests = [engine.add_request(f"work-{next(_names)}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
                for prompt in prompts]
    while engine.has_unfinished_requests():
        engine.step()
    return [request.timeline for request in requests]


# --- one scene, recorded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """Streams that are decoding, and a cold prompt that arrives: the requests' stamps, in seconds since the prompt arrived."""

    prompt: Timeline
    streams: list[Timeline]

    def since(self, stamp_s: float) -> float:
        return stamp_s - self.prompt.arrival_s

    @property
    def quiet_s(self) -> list[float]:
        """The streams' gaps that end before the prompt's arrival."""
        return [b - a for stream in self.streams for a, b in zip(stream.token_s, stream.token_s[1:]) if b <= self.prompt.arrival_s]

    @property
    def gaps_s(self) -> list[float]:
        """The streams' gaps that end after the prompt's arrival and begin before its last token."""
        arrival_s, end_s = self.prompt.arrival_s, self.prompt.token_s[-1]
        return [b - a for stream in self.streams for a, b in zip(stream.token_s, stream.token_s[1:]) if b > arrival_s and a < end_s]


def record_scene(cluster: Cluster, *, streams: int = 3, prompt_tokens: int = 1024, lead: int = 8, tail: int = 8, seed: int = 0) -> Scene:
    """The prompt arrives when every stream has `lead` tokens, and the scene ends when it has `tail` of its own."""
    with ThreadPoolExecutor(1) as own_loop:
        scene = own_loop.submit(asyncio.run, _scene(cluster.engine, streams, prompt_tokens, lead, tail, seed)).result()
    _until_idle(cluster)
    return scene


async def _scene(engine: Any, streams: int, prompt_tokens: int, lead: int, tail: int, seed: int) -> Scene:
    ready = asyncio.Semaphore(0)
    last: dict[int, Timeline] = {}

    async def stream(number: int) -> None:
        params, seen = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True), 0
        async for output in engine.generate({"prompt_token_ids": tokens(16, f"{seed} stream {number}")}, params, f"scene-{next(_names)}"):
            last[number] = output.metrics
            seen += 1
            if seen == lead:
                ready.release()

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    for _ in range(streams):
        await ready.acquire()
    params = SamplingParams(max_tokens=tail, temperature=0, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": tokens(prompt_tokens, f"{seed} prompt")}, params, f"scene-{next(_names)}"):
        prompt = output.metrics
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return Scene(prompt, [last[number] for number in range(streams)])
