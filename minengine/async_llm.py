"""The engine as a server sees it: requests in, deltas out, and a thread that steps in between.

    generate()   loop thread     reads the prompt, posts the request, awaits its deltas
      post       ───────────▶    a queue of commands: add, abort
    _run()       engine thread   between two steps takes the commands; steps while there is work, sleeps while there is none
      publish    ◀───────────    one wake-up of the loop a step, with every delta of the step
    compile()    loop thread     a grammar, in a third thread, one after the other (compiling.py)

Only the engine's thread touches the engine. What is asked of it here (generate, health, counts, drain) does not say that the
engine is in this process, so workers elsewhere can stand behind the same face.
"""
from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from .compiling import Compiling
from .config import EngineArgs, ModelConfig
from .engine import LLMEngine
from .request import OutputKind, RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from .request import StructuredOutputsParams

__all__ = ["AsyncLLM", "EngineDead", "EngineDraining", "EngineOverloaded", "EngineStats"]

LONG_TEXT = 4096  # characters; a shorter prompt is tokenized faster than a thread is found for it


class EngineOverloaded(RuntimeError):
    """The queue is full; `retry_after_s` is when a place may be free, in whole seconds."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"the server is busy: {waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class EngineDraining(RuntimeError):
    """The engine finishes what it has and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down: it finishes what it has; send the request to another one")


class EngineDead(RuntimeError):
    """The engine's loop has ended; no request will be answered any more."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and the state between two steps."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of the pool's blocks that requests hold
    prompt_tokens: int  # of requests that have been admitted
    cached_tokens: int  # of these, found in the prefix cache
    generation_tokens: int
    preemptions: int  # of requests that have ended
    steps: int
    jump_forward_tokens: int  # of the generation tokens, those that a grammar forced and nobody sampled
    finished: Mapping[str, int] = field(default_factory=dict)  # requests by finish_reason


class _Stream:
    """One request's deltas on their way from the engine's thread to the coroutine that awaits them."""

    __slots__ = ("loop", "started", "_pending", "_error", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.started = False
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._pending = output if self._pending is None else _joined(self._pending, output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """All that is new, once there is something."""
        while self._pending is None and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._pending is None:
            raise self._error
        output, self._pending = self._pending, None
        return output


class AsyncLLM:
    """An engine in a thread of its own, awaited from asyncio. The names are vLLM's.

    Args:
        engine: nobody else may use it from now on.
        max_num_waiting: requests that may wait while max_num_seqs run; one more is refused with `EngineOverloaded`.
    """

    def __init__(self, engine: LLMEngine, *, max_num_waiting: int = 1024) -> None:
        self.engine_args, self.tokenizer = engine.args, engine.tokenizer
        self.model_config: ModelConfig = engine.config
        self.max_model_len = engine.max_model_len
        self.max_num_waiting = max_num_waiting
        self.capacity = engine.args.max_num_seqs + max_num_waiting  # unfinished requests at once
        self.engine = engine
        self._streams: dict[str, _Stream] = {}
        self._num_preparing = 0  # requests whose grammar or prompt is being read
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._draining = False
        self._drained: asyncio.Event | None = None
        self._over = False  # set before the last streams are told, so that none can be added unseen
        self._error: BaseException | None = None
        self._ended: deque[float] = deque(maxlen=64)  # when the last requests ended, on the engine's clock
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._compiling = Compiling(engine.grammars.compile)
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **options: Any) -> "AsyncLLM":
        return cls(LLMEngine(args), **options)

    # --- requests, on the loop's thread ---------------------------------------------------------------------

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, *, cache_salt: str | None = None,
                       session_id: str | None = None) -> AsyncIterator[RequestOutput]:
        """Serve one request; yields what is new since the last yield, the last time with `finished`. Closing the generator, or
        cancelling what awaits it, aborts the request and frees its blocks before the next step.

        Args:
            prompt: as `LLMEngine.read_prompt` takes it.
            session_id: requests that share it belong together; with one engine there is nothing to choose.

        Raises, before anything is yielded:
            RequestError: the request can never be served.
            EngineOverloaded: the queue is full.
            EngineDraining: the engine takes no new requests.
        and at any time:
            EngineDead: the engine's loop has ended.
        """
        self._accept(request_id)
        arrival_s = self.engine.clock()  # here, and not when the engine's thread gets to it between two steps
        stream = self._streams[request_id] = _Stream(asyncio.get_running_loop())
        posted = finished = False
        held: Any = None  # the compiled grammar, so that it is still there when the engine's thread asks for it
        self._num_preparing += 1
        try:
            if params.structured_outputs is not None:
                held = await self._compiling.run(params.structured_outputs)
            read = self.engine.read_prompt
            prompt = await asyncio.to_thread(read, prompt) if len(_text(prompt)) > LONG_TEXT else read(prompt)
            self._commands.put(lambda: self._add(request_id, prompt, params, cache_salt, arrival_s))
            posted = True
            self._num_preparing -= 1
            self.check_health()
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if not posted:
                self._num_preparing -= 1
            elif not finished:
                self._commands.put(lambda: self._abort(request_id))
            if self._drained is not None and not self._streams:
                self._drained.set()

    def _accept(self, request_id: str) -> None:
        self.check_health()
        if self._draining:
            raise EngineDraining
        waiting = self._num_waiting()
        if len(self.engine.scheduler.running) + waiting >= self.capacity:  # what waits may be about to run
            raise EngineOverloaded(waiting, self._retry_after_s())
        if request_id in self._streams:
            raise RequestError(f"request_id={request_id!r}: is in use by an unfinished request; choose another")

    async def compile(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar, in a thread beside the loop and the engine; it stays cached for the requests that use it. Cancelled before its
        turn has come, it is not compiled.

        Raises:
            RequestError: it is no grammar that the engine can follow.
            EngineDraining: no request will follow it any more.
        """
        await self._compiling.run(params)

    def check_health(self) -> None:
        """
        Raises:
            EngineDead: the engine's loop has ended.
        """
        if self._error is not None:
            raise EngineDead(f"the engine has stopped ({type(self._error).__name__}: {self._error}); restart the server") from self._error
        if self._over:
            raise EngineDead("the engine has been shut down; start a new one")

    def stats(self) -> EngineStats:
        """Read without waiting for the engine: a count may be one step old."""
        engine, counts = self.engine, self._counts
        pool = engine.pool
        return EngineStats(len(engine.scheduler.running), self._num_waiting(), 1 - pool.num_free_blocks / pool.num_blocks, counts["prompt"],
                           counts["cached"], counts["generation"], counts["preemptions"], engine.times.steps,
                           engine.times.jump_forward_tokens, dict(self._finished))

    def _num_waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + self._commands.qsize() + self._num_preparing

    def _retry_after_s(self) -> int:
        """Seconds until a request ends, at the pace of the last ones; 1 to 60."""
        ended = self._ended
        if len(ended) < 2:
            return 1
        return min(60, max(1, math.ceil((ended[-1] - ended[0]) / (len(ended) - 1))))

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what there is. Returns whether all of it has ended; what has not is aborted then,
        and what still waits for its grammar sees `EngineDraining`."""
        self._draining = True
        self._drained = asyncio.Event()
        try:
            if self._streams:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            return True
        except TimeoutError:
            for request_id in list(self._streams):
                self._commands.put(lambda request_id=request_id: self._abort(request_id))
            return False
        finally:
            self._compiling.close(EngineDraining())

    async def shutdown(self) -> None:
        """End the engine's thread after its present step; requests that are left see `EngineDead`."""
        self._draining = True
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self.engine
        try:
            while not self._stopping:
                self._take_commands(wait=not engine.has_unfinished_requests())
                if engine.has_unfinished_requests() and not self._stopping:
                    self._publish(engine.step())
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._error = error
        self._over = True
        gone = EngineDead(f"the engine has stopped ({self._error or 'shut down'}); the request was not finished")
        self._on_loops([(request_id, gone) for request_id in list(self._streams)])

    def _take_commands(self, *, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except Empty:
            pass

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, request_id: str, prompt: Any, params: SamplingParams, cache_salt: str | None, arrival_s: float) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt, output_kind=OutputKind.DELTA, arrival_s=arrival_s)
        except RequestError as error:
            self._on_loops([(request_id, error)])

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        if output is not None:
            self._publish([output])

    def _publish(self, outputs: list[RequestOutput]) -> None:
        counts = self._counts
        for output in outputs:
            counts["generation"] += len(output.outputs[0].token_ids)
            stream = self._streams.get(output.request_id)
            if stream is not None and not stream.started:
                stream.started = True
                counts["prompt"] += len(output.prompt_token_ids)
                counts["cached"] += output.num_cached_tokens
            if output.finished:
                self._finished[output.outputs[0].finish_reason] += 1
                counts["preemptions"] += output.metrics.num_preemptions
                self._ended.append(output.metrics.finished_s)
        self._on_loops([(output.request_id, output) for output in outputs])

    def _on_loops(self, news: list[tuple[str, RequestOutput | Exception]]) -> None:
        """Hand news to their streams; one wake-up for each loop that has any (there is one, outside tests)."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput | Exception]]] = {}
        for request_id, what in news:
            stream = self._streams.get(request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, what))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, batch)
            except RuntimeError:  # the loop was closed and took its coroutines with it
                pass


def _hand_over(batch: list[tuple[_Stream, RequestOutput | Exception]]) -> None:
    for stream, what in batch:
        if isinstance(what, Exception):
            stream.fail(what)
        else:
            stream.put(what)


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one: nobody read the first before the second came."""
    a, b = first.outputs[0], second.outputs[0]
    b.text, b.token_ids = a.text + b.text, a.token_ids + b.token_ids
    b.logprobs = None if b.logprobs is None else a.logprobs + b.logprobs
    return second


def _text(prompt: Any) -> str:
    """The text of a prompt that has one, for its length alone."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", "")
    return prompt if isinstance(prompt, str) else ""
