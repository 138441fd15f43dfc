"""`Cluster(...).generate(...)`: what `LLM` is, with its engines in processes of their own."""
from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Callable, Coroutine, Iterator, Sequence, TypeVar

from ..calls import Chat, Prompt, one_each
from ..engine_args import EngineArgs
from ..request import CompletionOutput, RequestError, RequestOutput, SamplingParams
from ..streams import EngineDead
from .front import AsyncCluster, WorkerInfo
from .plan import ClusterArgs

__all__ = ["Cluster"]

T = TypeVar("T")
CLUSTER_OPTIONS = tuple(ClusterArgs.__dataclass_fields__)


class Cluster(Chat):
    """A model served by worker processes, on this machine or on the nodes of a cluster. Close it, or use it as a context manager; its processes
    end with this one in any case.

    Works in scripts, notebooks and inside a running asyncio loop: what is asynchronous has a thread of its own.

    Args:
        model: "smollm2", "glm-mini", or a local Hugging Face directory.
        options: fields of `ClusterArgs` (prefill=1, decode=2, router_policy="random", ...) and of `EngineArgs`, which then hold for every worker;
            `num_threads` (default: the machine's cores) is split evenly among them.

    Raises:
        ConfigError: an option or a worker cannot run as asked; no process is left then.
    """

    def __init__(self, model: str = "smollm2", *, prefill: int = 0, decode: int = 1, **options: Any) -> None:
        cluster = {"prefill": prefill, "decode": decode, **{name: options.pop(name) for name in CLUSTER_OPTIONS if name in options}}
        args = EngineArgs.from_options({"model": model, **options}, CLUSTER_OPTIONS)
        self.engine = AsyncCluster(args, ClusterArgs(**cluster), max_num_waiting=1 << 30)
        self._ids = itertools.count()
        self._closing, self._closed = Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 session_ids: Sequence[str | None] | None = None) -> list[RequestOutput]:
        """Serve all prompts together; the outputs come in the prompts' order. Prompts as `LLM.generate` takes them.

        Args:
            session_ids: one a prompt; prompts that share one go to the same decoder.

        Raises:
            RequestError: a prompt cannot be served; the others are then given up.
            EngineDead: no worker is left.
        """
        many, params = one_each(prompts, sampling_params)
        sessions = list(session_ids or [None] * len(many))
        if len(sessions) != len(many):
            raise RequestError(f"session_ids: {len(sessions)} given for {len(many)} prompts; give one a prompt")
        return self._wait(lambda: self._all(many, params, sessions))

    async def _all(self, prompts: list[Prompt], params: list[SamplingParams], sessions: list[str | None]) -> list[RequestOutput]:
        tasks = [asyncio.create_task(self._whole(prompt, p, session)) for prompt, p, session in zip(prompts, params, sessions)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # what is given up has been given up when the caller hears of it

    async def _whole(self, prompt: Prompt, params: SamplingParams, session_id: str | None) -> RequestOutput:
        whole = None
        async for output in self.engine.generate(prompt, params, self._new_id(), session_id=session_id):
            whole = _appended(whole, output)
        return whole

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, session_id: str | None = None) -> Iterator[RequestOutput]:
        """Serve one prompt; yields the output so far whenever there is more. Closing the iterator aborts the request."""
        news: SimpleQueue[RequestOutput | BaseException] = SimpleQueue()

        async def read() -> None:
            try:
                whole = None
                async for output in self.engine.generate(prompt, sampling_params or SamplingParams(), self._new_id(), session_id=session_id):
                    whole = _appended(whole, output)
                    news.put(whole)
            except BaseException as error:
                news.put(error)
                raise

        task = self._begin(read)
        try:
            while True:
                output = news.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            task.cancel()

    @property
    def _tokenizer(self) -> Any:
        return self.engine.tokenizer

    # --- the workers ----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerInfo]:
        """Each with its role, process, threads and layout, as it is now."""
        return self.engine.workers

    def close(self) -> None:
        """End the workers. Requests that others still wait for see `EngineDead`. Twice is harmless."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.engine.close()
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._closing:  # what has begun is waited for by `close`
            if self._closed:
                raise EngineDead("the cluster has been closed; make a new one")
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    async def _settle(self) -> None:
        """Whoever still waits has been told that nobody computes any more; let them hear it before the loop ends."""
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: what nobody waits for is not computed
            future.cancel()
            raise


def _appended(whole: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """A new output, of a delta and everything before it."""
    if whole is None:
        return output
    a, b = whole.outputs[0], output.outputs[0]
    logprobs = None if b.logprobs is None else a.logprobs + b.logprobs
    completion = CompletionOutput(b.index, a.text + b.text, a.token_ids + b.token_ids, b.finish_reason, b.stop_reason, logprobs)
    return RequestOutput(output.request_id, output.prompt, output.prompt_token_ids, [completion], output.finished, output.num_cached_tokens, output.metrics,
                         output.error)
