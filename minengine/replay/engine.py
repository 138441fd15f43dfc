"""An engine in this process as the target of a replay, on its own clock: seconds that its thread has worked, and those in which it had nothing to do.

So think gaps take no real time, and other programs on the machine do not disturb the figures. That is right only where all work is done by this
thread: one rank, on a CPU, with one thread. Elsewhere the wall's clock must be used (`replay.wall`).
"""
from __future__ import annotations

import threading
import time
from itertools import count
from typing import Any

from ..disagg.opening import open_connector
from ..engine import LLMEngine
from ..engine_args import EngineArgs
from ..request import Request, RequestError, RequestOutput, SamplingParams
from ..workload.closed_loop import Turn
from ..workload.open_loop import EngineClock
from ..workload.report import Record
from ..workload.scaling import PromptTokens

__all__ = ["FIRST_TEXT_TOKEN", "EngineTarget", "runs_on_one_thread"]

FIRST_TEXT_TOKEN = 20  # lower ids are control tokens in the engine's own models


def runs_on_one_thread(args: EngineArgs) -> bool:
    """Whether the engine's own clock tells all of its work."""
    from ..machine import device_named

    return args.ranks.gpus == 1 and args.num_threads == 1 and device_named(args.device).type == "cpu"


class EngineTarget:
    """
    Args:
        args: of an engine that `runs_on_one_thread`.
        model, tokenizer: already loaded.
    """

    label = "engine"

    def __init__(self, args: EngineArgs, *, model: Any = None, tokenizer: Any = None) -> None:
        self._clock = EngineClock()
        self.engine = LLMEngine(args, model=model, tokenizer=tokenizer, clock=self._clock)
        self._woken = threading.Event()
        self._connector = open_connector(self.engine, wake=self._woken.set)
        self._tokens = PromptTokens(FIRST_TEXT_TOKEN, self.engine.config.vocab_size - 1)
        self._names = count()
        self._under_way: dict[str, tuple[Turn, Record, Request]] = {}
        self._ended: list[tuple[Turn, Record]] = []
        self._warm_up()
        self._now_s = self._clock()  # time stands still but in `wait`: what the client does is not the engine's work
        self._tier = {(True, False): "host", (False, True): "disk"}.get((args.host_tier_bytes > 0, args.disk_tier_bytes > 0), "tier")

    def _warm_up(self) -> None:
        """Compute something once: what libraries prepare at their first use is nobody's wait."""
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = self.engine.add_request("warm-up", {"prompt_token_ids": [FIRST_TEXT_TOKEN] * 2}, params)
        while not request.finished:
            self.engine.step()

    def clock(self) -> float:
        return self._now_s

    def send(self, turn: Turn, due_s: float) -> Record:
        prompt = self._tokens(turn)
        name, record = f"replay-{next(self._names)}", Record.of(turn, due_s)
        params = SamplingParams(max_tokens=turn.request.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            request = self.engine.add_request(name, {"prompt_token_ids": prompt}, params, arrival_s=due_s)
            self._under_way[name] = turn, record, request
        except RequestError as error:
            record.error, record.end_s = str(error), self.clock()
            self._ended.append((turn, record))
        return record

    def wait(self, until_s: float) -> list[tuple[Turn, Record]]:
        self._clock.idle(self._now_s - self._clock())
        while not self._ended and self._clock() < until_s:
            self._woken.clear()
            if self._connector is not None:
                self._connector.poll()
            for output in self.engine.step():
                if output.finished:
                    self._ended.append(self._end(output))
            if not self.engine.idle:
                continue
            if self.engine.has_unfinished_requests():  # something is on its way here and takes real time
                asleep_s = time.perf_counter()
                self._woken.wait(0.05)
                self._clock.idle(time.perf_counter() - asleep_s)
            elif self._clock.is_cpu:
                self._clock.idle(until_s - self._clock())
            else:
                self._woken.wait(until_s - self._clock())
        self._now_s = self._clock()
        ended, self._ended = self._ended, []
        return ended

    def _end(self, output: RequestOutput) -> tuple[Turn, Record]:
        turn, record, request = self._under_way.pop(output.request_id)
        loaded = request.num_loaded_tokens
        self._stamp(record, request)
        record.end_s = output.metrics.finished_s
        record.error, record.output_tokens, record.cached_tokens = output.error, len(output.outputs[0].token_ids), output.num_cached_tokens
        record.num_hits_by_tier = {"device": record.cached_tokens - loaded, **({self._tier: loaded} if self._connector is not None else {})}
        return turn, record

    @staticmethod
    def _stamp(record: Record, request: Request) -> None:
        record.admitted_s, record.first_token_s = request.timeline.admitted_s, request.timeline.prefill_end_s

    def close(self) -> None:
        for name, (_, record, request) in self._under_way.items():
            self._stamp(record, request)  # how far it has come
            self.engine.abort_request(name)
        if self._connector is not None:
            self._connector.close()
        self.engine.close()
