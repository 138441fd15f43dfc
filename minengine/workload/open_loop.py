"""Requests that come when they come, whether or not the engine is free: mostly turns on known histories, and some cold prompts among them.

    with Desk() as desk:
        desk.serve(turns(40, seed=1), Setting(max_num_batched_tokens=512))

One real engine a setting, all with one model and one host tier. A thread of its own adds each request at its time, also while a step is
computed, as a server does. The pool starts empty and is too small for all histories, so a turn's prefix comes from the tier, or is still there.
"""
from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

from .stats import mean, median

__all__ = ["Desk", "EngineClock", "Run", "Setting", "Turn", "turns"]

BLOCK_SIZE, HISTORY_TOKENS, NEW_TOKENS, COLD_TOKENS, OUTPUT_TOKENS = 64, 1024, 24, 1024, 8  # new ones and output are less than a block: no history grows
HISTORIES, POOL_BLOCKS, COLD_SHARE, LOAD = 16, 112, 1 / 8, 0.8
TIER_BYTES = 1 << 28
LIMIT_S = 120.0


class Turn(NamedTuple):
    at: float  # in units of the mean time between two arrivals
    history: int | None  # which one it goes on from; None: a cold prompt


class Setting(NamedTuple):
    max_num_batched_tokens: int
    load_admission: str = "poll"
    long_prefill_token_threshold: int = 0


@dataclass(frozen=True)
class Run:
    """What came of one schedule. Timelines are in the order of arrival."""

    turns: list[Turn]
    timelines: list[Any]
    step_s: list[float]  # of every step that computed something
    seconds: float  # from the first arrival to the last token

    def queue_ms(self, cold: bool | None = None) -> list[float]:
        return [1e3 * t.queue_s for t in self._of(cold)]

    def ttft_ms(self, cold: bool | None = None) -> list[float]:
        return [1e3 * t.ttft_s for t in self._of(cold)]

    def parts_ms(self) -> list[tuple[float, ...]]:
        """Of each request whose prefix came from the tier: until the tier was asked, then the four of `Timeline.wait_parts`."""
        return [(1e3 * (t.retrieve_start_s - t.arrival_s), *(1e3 * part for part in parts)) for t in self.timelines if (parts := t.wait_parts()) is not None]

    def _of(self, cold: bool | None) -> list[Any]:
        return [t for turn, t in zip(self.turns, self.timelines) if cold is None or (turn.history is None) is cold]


def turns(n: int, seed: int, cold_share: float = COLD_SHARE, histories: int = HISTORIES) -> list[Turn]:
    """A schedule: gaps are exponential with mean 1; every so many requests, at a place drawn among them, one is cold."""
    rng, every, at, found = Random(seed), round(1 / cold_share), 0.0, []
    for i in range(n):
        if i % every == 0:
            cold = i + int(rng.random() * every)
        at += rng.expovariate(1.0)
        found.append(Turn(at, None if i == cold else int(rng.random() * histories)))
    return found


class EngineClock:
    """Seconds that the engine's thread has worked, and those in which it had nothing to do: a quiet machine's wall clock, on any machine.
    Other programs do not count. Made on the engine's thread; read on any. Where the system has no such clock it is the wall's.
    """

    def __init__(self) -> None:
        own = getattr(time, "pthread_getcpuclockid", None)
        self.is_cpu = own is not None
        self._read = partial(time.clock_gettime, own(threading.get_ident())) if own else time.perf_counter
        self._idle_s = 0.0

    def __call__(self) -> float:
        return self._read() + self._idle_s

    def idle(self, seconds: float) -> None:
        """Let time pass in which the thread did not work."""
        if self.is_cpu:
            self._idle_s += seconds


class Desk:
    """
    Args:
        model: one of the engine's own.
        histories: conversations that the tier knows from before.
        load: the part of the engine's time that the requests would take one after another, with nobody else there; it sets the mean time
            between arrivals.
    """

    def __init__(self, model: str = "glm-mini", *, histories: int = HISTORIES, load: float = LOAD, threads: int = 1) -> None:
        from ..engine import LLMEngine
        from ..model.decoder import load_model

        self._engine_type, self.threads, self.histories = LLMEngine, threads, histories
        self._folder = tempfile.TemporaryDirectory()
        self.clock = EngineClock()
        self.model_name = model
        self.model = load_model(model, dtype="float32", device="cpu")
        self._engines: dict[Setting, tuple[Any, Any, threading.Event]] = {}
        self._runs = 0
        self._prompts = [self._prompt(HISTORY_TOKENS, seed=i) for i in range(histories)]
        self.cold_s, self.known_s = self._prepare()
        self.interval_s = (COLD_SHARE * self.cold_s + (1 - COLD_SHARE) * self.known_s) / load

    def serve(self, schedule: list[Turn], setting: Setting) -> Run:
        """Serve a schedule from its first arrival to its last token.

        Raises:
            RuntimeError: a request failed, or was not as cold or as well known as it should be.
        """
        engine, connector, woken = self._engine(setting)
        engine.reset_prefix_cache()
        self._runs += 1
        clock, requests, steps = self.clock, [], []
        prompts = [self._turn(turn, 1000 * self._runs + i) for i, turn in enumerate(schedule)]
        start_s = clock()
        due = [start_s + turn.at * self.interval_s for turn in schedule]
        feeder = threading.Thread(target=self._feed, args=(engine, prompts, due, requests, woken), daemon=True)
        feeder.start()
        while len(requests) < len(due) or engine.has_unfinished_requests():
            woken.clear()
            connector.poll()
            before = clock()
            engine.step()
            if not engine.idle:
                steps.append(clock() - before)
            elif engine.has_unfinished_requests():
                self._sleep(woken)
            elif len(requests) < len(due):
                clock.idle(due[len(requests)] - clock())
                woken.wait(0.001)
        end_s = clock()
        feeder.join()
        if not connector.tier.wait_idle(LIMIT_S):
            raise RuntimeError("the tier has not stored what was computed in time")
        for turn, request in zip(schedule, requests):
            if request.error or request.num_cached_tokens != (0 if turn.history is None else HISTORY_TOKENS):
                raise RuntimeError(f"{turn}: {request.num_cached_tokens} tokens of {request} were cached; error: {request.error}")
        return Run(schedule, [request.timeline for request in requests], steps, end_s - due[0])

    def close(self) -> None:
        from ..kv.tier_open import tier_folders

        for _, connector, _ in self._engines.values():
            connector.close()
        self._engines.clear()
        shutil.rmtree(tier_folders(self._folder.name)["host"], ignore_errors=True)
        self._folder.cleanup()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # --- its parts -------------------------------------------------------------------------------------------

    def _sleep(self, woken: threading.Event) -> None:
        """Something is on its way here and takes real time. Looking all the while would take the interpreter from those who bring it."""
        asleep = time.perf_counter()
        woken.wait(0.05)
        self.clock.idle(time.perf_counter() - asleep)

    def _feed(self, engine: Any, prompts: list[Any], due: list[float], requests: list[Any], woken: threading.Event) -> None:
        """A server's other half: adds each request when its time has come. Ends early if the engine's thread does."""
        never, owner = threading.Event(), threading.main_thread()
        for i, ((ids, salt), due_s) in enumerate(zip(prompts, due)):
            while (left := due_s - self.clock()) > 0 and owner.is_alive():
                never.wait(min(left, 0.001))
            requests.append(self._add(engine, f"{self._runs}-{i}", ids, salt, due_s))
            woken.set()

    def _add(self, engine: Any, name: str, ids: list[int], salt: str | None, due_s: float | None = None) -> Any:
        from ..request import SamplingParams

        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        return engine.add_request(name, {"prompt_token_ids": ids}, params, cache_salt=salt, arrival_s=due_s)

    def _turn(self, turn: Turn, seed: int) -> tuple[list[int], str | None]:
        if turn.history is None:
            return self._prompt(COLD_TOKENS, seed=10_000 + seed), f"cold-{seed}"  # a salt of its own: nobody knows it, whatever was served before
        return self._prompts[turn.history] + self._prompt(NEW_TOKENS, seed=20_000 + seed), None

    def _prompt(self, num_tokens: int, seed: int) -> list[int]:
        rng, vocabulary = Random(seed), self.model.config.vocab_size
        return [20 + int(rng.random() * (vocabulary - 20)) for _ in range(num_tokens)]

    def _engine(self, setting: Setting) -> tuple[Any, Any, threading.Event]:
        if setting not in self._engines:
            from ..engine_args import EngineArgs
            from ..disagg.opening import open_connector

            args = EngineArgs(model=self.model_name, device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_gpu_blocks_override=POOL_BLOCKS,
                              max_num_seqs=16, num_threads=self.threads, host_tier_bytes=TIER_BYTES, tier_path=self._folder.name,
                              max_model_len=COLD_TOKENS + BLOCK_SIZE, **setting._asdict())
            engine, woken = self._engine_type(args, model=self.model, clock=self.clock), threading.Event()
            self._engines[setting] = engine, open_connector(engine, wake=woken.set), woken
        return self._engines[setting]

    def _prepare(self) -> tuple[float, float]:
        """Compute every history once, which puts it into the tier; returns the median seconds of a cold request and of a known one, alone."""
        setting = Setting(1024)
        engine, connector, woken = self._engine(setting)

        def alone(ids: list[int], salt: str | None) -> float:
            begin = self.clock()
            request = self._add(engine, f"alone-{begin}", ids, salt)
            while not request.finished:
                woken.clear()
                connector.poll()
                engine.step()
                if engine.idle and not request.finished:
                    self._sleep(woken)
            return self.clock() - begin

        for ids in self._prompts:
            alone(ids, None)
            if not connector.tier.wait_idle(LIMIT_S):
                raise RuntimeError("the tier has not stored a history in time")
        cold = [alone(*self._turn(Turn(0, None), -i)) for i in range(1, 6)]
        warm = [alone(*self._turn(Turn(0, i % self.histories), -i)) for i in range(1, 8)]
        connector.tier.wait_idle(LIMIT_S)
        return median(cold), median(warm)
