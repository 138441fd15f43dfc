"""The engine as a server sees it: requests in, deltas out (streams.py), and a thread that steps in between.

    _submit      loop thread      posts a command: add, abort
    _run()       engine thread    between two steps takes the commands; steps while there is work, sleeps while there is none
    compile()    loop thread      a grammar, in a third thread, one after the other (compiling.py)

Only the engine's thread touches the engine, but for one thing: with load_admission="event" a request is added by the loop's thread, also while a
step is computed.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from .engine_args import EngineArgs
from .disagg.opening import open_connector
from .engine import LLMEngine
from .parallel.opening import open_engine
from .prompt import Prompt
from .request import OutputKind, RequestError, SamplingParams
from .streams import AsyncFront, EngineDead, EngineDraining, EngineOverloaded, EngineStats

__all__ = ["AsyncLLM", "EngineDead", "EngineDraining", "EngineOverloaded", "EngineStats"]


class AsyncLLM(AsyncFront):
    """An engine in a thread of its own, awaited from asyncio. The names are vLLM's.

    Args:
        engine: nobody else may use it from now on.
        max_num_waiting: requests that may wait while max_num_seqs run; one more is refused with `EngineOverloaded`.
    """

    def __init__(self, engine: LLMEngine, *, max_num_waiting: int = 1024) -> None:
        super().__init__(args=engine.args, tokenizer=engine.tokenizer, config=engine.config, max_model_len=engine.max_model_len,
                         num_seqs=engine.args.max_num_seqs * engine.args.ranks.data, max_num_waiting=max_num_waiting, clock=engine.clock, compile=engine.grammars.compile)
        self.engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._connector = open_connector(engine, wake=lambda: self._commands.put(_look))
        engine.on_lost(lambda: self._commands.put(engine.check))  # else nobody would know before the next request
        # A load may begin while a step is computed, and a long step is what there is to gain: then a request must not wait for its end to be added.
        self._adds_at_once = self._connector is not None and engine.args.load_admission == "event"
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **options: Any) -> "AsyncLLM":
        return cls(open_engine(args), **options)

    def stats(self) -> EngineStats:
        """Read without waiting for the engine: a count may be one step old."""
        engine, counts = self.engine, self._counts
        pool = engine.pool
        return EngineStats(self._num_running(), self._num_waiting(), 1 - pool.num_free_blocks / pool.num_blocks, counts["prompt"],
                           counts["cached"], counts["generation"], counts["preemptions"], engine.times.steps,
                           engine.times.jump_forward_tokens, dict(self._finished))

    async def shutdown(self) -> None:
        """End the engine's thread after its present step; requests that are left see `EngineDead`."""
        self._draining = True
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.close)

    # --- on the loop's thread -----------------------------------------------------------------------------------

    def _read(self, prompt: Any, params: SamplingParams, cache_salt: str | None) -> Prompt:
        return self.engine.read_prompt(prompt)

    def _submit(self, request_id: str, read: Prompt, params: SamplingParams, cache_salt: str | None, session_id: str | None, arrival_s: float) -> None:
        add = partial(self._add, request_id, read, params, cache_salt, arrival_s)
        if self._adds_at_once and params.structured_outputs is None:  # a matcher is made by the engine's thread
            add()
            add = _look
        self._commands.put(add)

    def _cancel(self, request_id: str) -> None:
        self._commands.put(lambda: self._abort(request_id))

    def _num_running(self) -> int:
        return self.engine.num_running

    def _num_waiting(self) -> int:
        return self.engine.num_waiting + self._commands.qsize() + self._num_preparing

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self.engine
        try:
            while not self._stopping:
                self._take_commands(wait=engine.idle)
                if self._connector is not None:
                    self._connector.poll()
                if not engine.idle and not self._stopping:
                    self._publish(engine.step())
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._error = error
        self._end_all(self._error or "shut down")

    def _take_commands(self, *, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except Empty:
            pass

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, cache_salt: str | None, arrival_s: float) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt, output_kind=OutputKind.DELTA, arrival_s=arrival_s)
        except RequestError as error:
            self._on_loops([(request_id, error)])

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        if output is not None:
            self._publish([output])


def _look() -> None:
    """The command that only wakes the engine's thread."""
