"""Requests that are awaited from asyncio while somebody else computes them: what the engine in this process and workers elsewhere share.

    generate()   loop thread      reads the prompt, submits the request, awaits its deltas
      _submit    ───────────▶     whoever computes: `AsyncLLM` has a thread, `AsyncCluster` has processes
      _publish   ◀───────────     any one thread at a time: deltas to their streams, one wake-up of the loop for all that it brings

Nobody waits for ever: a request that was accepted ends with its last delta, or with an exception that says why there is none.
"""
from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .compiling import Compiling
from .request import RequestError, RequestOutput, SamplingParams, given_params

if TYPE_CHECKING:
    from .config import ModelConfig
    from .engine_args import EngineArgs
    from .disagg.front import WorkerInfo
    from .request import StructuredOutputsParams
    from .tokenizer import Tokenizer

__all__ = ["AsyncFront", "EngineDead", "EngineDraining", "EngineOverloaded", "EngineStats"]

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


class Stream:
    """One request's deltas on their way from whoever computes to the coroutine that awaits them."""

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


class AsyncFront:
    """What a server sees of an engine, wherever it runs. The names are vLLM's.

    Args:
        num_seqs: requests that run at once.
        max_num_waiting: requests that may wait beside them; one more is refused with `EngineOverloaded`.
        clock: seconds, the clock of all timelines.
        compile: checks a grammar, in a thread of its own; whatever it returns is kept while its request is there.
    """

    def __init__(self, *, args: EngineArgs, tokenizer: Tokenizer | None, config: ModelConfig, max_model_len: int, num_seqs: int,
                 max_num_waiting: int, clock: Callable[[], float], compile: Callable[[StructuredOutputsParams], Any]) -> None:
        self.engine_args, self.tokenizer = args, tokenizer
        self.model_config = config
        self.max_model_len = max_model_len
        self.max_num_waiting = max_num_waiting
        self.capacity = num_seqs + max_num_waiting  # unfinished requests at once
        self.clock = clock
        self._streams: dict[str, Stream] = {}
        self._num_preparing = 0  # requests whose grammar or prompt is being read
        self._draining = False
        self._drained: asyncio.Event | None = None
        self._over = False  # set before the last streams are told, so that none can be added unseen
        self._error: BaseException | None = None
        self._ended: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._compiling = Compiling(compile)

    # --- what is different in each kind -------------------------------------------------------------------------

    def _read(self, prompt: Any, params: SamplingParams, cache_salt: str | None) -> Any:
        """Read a prompt, in any thread; what it returns is handed to `_submit`. Raises RequestError."""
        raise NotImplementedError

    def _submit(self, request_id: str, read: Any, params: SamplingParams, cache_salt: str | None, session_id: str | None, arrival_s: float) -> None:
        """Have a request computed; its stream is there. Returns at once; raises RequestError if it can never be served."""
        raise NotImplementedError

    def _cancel(self, request_id: str) -> None:
        """End a submitted request as aborted; one that has ended is left alone. Returns at once."""
        raise NotImplementedError

    def _num_running(self) -> int:
        raise NotImplementedError

    def _num_waiting(self) -> int:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Read without waiting for anybody: a count may be one step old."""
        raise NotImplementedError

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The processes that compute, as they are now; none if it is this one."""
        return ()

    async def shutdown(self) -> None:
        """End whoever computes; requests that are left see `EngineDead`."""
        raise NotImplementedError

    def kill(self) -> None:
        """This process ends at once, its requests with it: end what would outlive it. From a signal handler, on the loop's thread."""

    # --- requests, on the loop's thread ---------------------------------------------------------------------------

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, *, cache_salt: str | None = None,
                       session_id: str | None = None) -> AsyncIterator[RequestOutput]:
        """Serve one request; yields what is new since the last yield, the last time with `finished`. Closing the generator, or
        cancelling what awaits it, aborts the request and frees its blocks before the next step.

        Args:
            prompt: as `prompt.read_prompt` takes it.
            session_id: requests that share it belong together; with one engine there is nothing to choose.

        Raises, before anything is yielded:
            RequestError: the request can never be served.
            EngineOverloaded: the queue is full.
            EngineDraining: the engine takes no new requests.
        and at any time:
            EngineDead: nobody computes any more.
        """
        params = given_params(params)
        self._accept(request_id)
        arrival_s = self.clock()  # here, and not when whoever computes gets to it between two steps
        stream = self._streams[request_id] = Stream(asyncio.get_running_loop())
        posted = finished = False
        held: Any = None  # the compiled grammar, so that it is still there when the engine asks for it
        self._num_preparing += 1
        try:
            if params.structured_outputs is not None:
                held = await self._compiling.run(params.structured_outputs)
            long = _length(prompt) > LONG_TEXT
            read = await asyncio.to_thread(self._read, prompt, params, cache_salt) if long else self._read(prompt, params, cache_salt)
            self._submit(request_id, read, params, cache_salt, session_id, arrival_s)
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
                self._cancel(request_id)
            if self._drained is not None and not self._streams:
                self._drained.set()

    def _accept(self, request_id: str) -> None:
        self.check_health()
        if self._draining:
            raise EngineDraining
        waiting = self._num_waiting()
        if self._num_running() + waiting >= self.capacity:  # what waits may be about to run
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
            EngineDead: nobody computes any more.
        """
        if self._error is not None:
            raise EngineDead(f"the engine has stopped ({type(self._error).__name__}: {self._error}); restart the server") from self._error
        if self._over:
            raise EngineDead("the engine has been shut down; start a new one")

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
                self._cancel(request_id)
            return False
        finally:
            self._compiling.close(EngineDraining())

    # --- on the side that computes ----------------------------------------------------------------------------------

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Count deltas and hand them to their streams; one thread at a time."""
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

    def _end_all(self, why: object) -> None:
        """Nobody computes any more: tell whoever waits."""
        self._over = True
        gone = EngineDead(f"the engine has stopped ({why}); the request was not finished")
        self._on_loops([(request_id, gone) for request_id in list(self._streams)])

    def _on_loops(self, news: list[tuple[str, RequestOutput | Exception]]) -> None:
        """Hand news to their streams; one wake-up for each loop that has any (there is one, outside tests)."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput | Exception]]] = {}
        for request_id, what in news:
            stream = self._streams.get(request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, what))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, batch)
            except RuntimeError:  # the loop was closed and took its coroutines with it
                pass


def _hand_over(batch: list[tuple[Stream, RequestOutput | Exception]]) -> None:
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


def _length(prompt: Any) -> int:
    """Characters of a prompt that has a text, tokens of one that has none, as far as that can be told before it is read."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt", ""))
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
