"""Targets that take real time: whoever serves does so in other threads or processes, and think gaps are waited for."""
from __future__ import annotations

import asyncio
import time
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..request import SamplingParams
from ..workload.closed_loop import Turn
from ..workload.report import Record
from ..workload.scaling import PromptTokens
from .engine import FIRST_TEXT_TOKEN

__all__ = ["FrontTarget", "WallTarget"]


class WallTarget:
    """What all of them do: keep the time, and hand over what has ended."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.over: SimpleQueue[tuple[Turn, Record]] = SimpleQueue()

    def wait(self, until_s: float) -> list[tuple[Turn, Record]]:
        ended = []
        try:
            while True:
                ended.append(self.over.get(block=not ended, timeout=max(0.0, until_s - self.clock())))
        except Empty:
            return ended


class FrontTarget(WallTarget):
    """An engine in a thread (`AsyncLLM`), or workers in processes (`AsyncCluster`). It is the target's from now on, and ends with it.

    Args:
        front: made by the thread that makes this.
    """

    label = "engine"

    def __init__(self, front: Any) -> None:
        super().__init__()
        self.front, self.clock = front, front.clock
        self._tokens = PromptTokens(FIRST_TEXT_TOKEN, front.model_config.vocab_size - 1)
        self._names = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="replay", daemon=True)
        self._thread.start()

    def send(self, turn: Turn, due_s: float) -> Record:
        prompt = {"prompt_token_ids": self._tokens(turn)}
        record = Record.of(turn, self.clock())
        self._loop.call_soon_threadsafe(self._begin, turn, record, prompt)
        return record

    def _begin(self, turn: Turn, record: Record, prompt: dict[str, Any]) -> None:
        task = self._loop.create_task(self._serve(turn, record, prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, turn: Turn, record: Record, prompt: dict[str, Any]) -> None:
        params = SamplingParams(max_tokens=turn.request.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            async for output in self.front.generate(prompt, params, f"replay-{next(self._names)}", session_id=turn.session):
                times = output.metrics
                record.arrival_s, record.admitted_s, record.first_token_s = times.arrival_s, times.admitted_s, times.prefill_end_s
                record.output_tokens += len(output.outputs[0].token_ids)
                record.cached_tokens, record.error = output.num_cached_tokens, output.error
            record.end_s = times.finished_s
        except Exception as error:  # whatever it is, the replay goes on
            record.error = f"{type(error).__name__}: {error}"
        if record.end_s is None:
            record.end_s = self.clock()
        self.over.put((turn, record))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        under_way = list(self._tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.front.shutdown()
