"""The public face: `LLM(...).generate(...)`, with vLLM's names and prompt forms."""
from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from threading import Event
from typing import Any, Iterator, Sequence

from .calls import Chat, Prompt, one_each
from .engine_args import EngineArgs
from .disagg.opening import open_connector
from .parallel.opening import open_engine
from .request import OutputKind, RequestError, RequestOutput, SamplingParams

__all__ = ["CacheInfo", "LLM"]


@dataclass(frozen=True)
class CacheInfo:
    """The KV pool as it is now."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    nbytes: int
    layout: str
    kv_cache_dtype: str


class LLM(Chat):
    """A model with its engine, in this process; with `topology`, rank 0 is, and the other ranks are processes that end with it.

    Args:
        model: "smollm2", "glm-mini", or a local Hugging Face directory.
        options: any field of `EngineArgs`, e.g. `kv_cache_dtype="fp8"`, `block_size=64`, `max_num_batched_tokens=512`.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.llm_engine = open_engine(EngineArgs.from_options({"model": model, **options}))
        self._woken = Event()
        self._connector = open_connector(self.llm_engine, wake=self._woken.set)
        self._ids = itertools.count()
        self._inbox: dict[str, deque[RequestOutput]] = {}  # outputs that nobody has read yet, of requests that somebody waits for

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
                 ) -> list[RequestOutput]:
        """Serve all prompts together; the outputs come in the prompts' order.

        A prompt is a text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, the dicts with an optional `cache_salt`.

        Raises:
            RequestError: a prompt cannot be served; none of them is then run.
        """
        many, params = one_each(prompts, sampling_params)
        added: list[str] = []
        try:
            for prompt, p in zip(many, params):
                added.append(self._add(prompt, p, OutputKind.FINAL_ONLY))
            return [self._next_output(request_id) for request_id in added]  # without streaming there is one output, the last
        finally:  # a refused prompt or Ctrl-C leaves nothing behind
            for request_id in added:
                self._drop(request_id)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Serve one prompt; yields the output so far after each token. Closing the iterator aborts the request."""
        request_id = self._add(prompt, sampling_params, OutputKind.CUMULATIVE)
        try:
            finished = False
            while not finished:
                out = self._next_output(request_id)
                finished = out.finished
                yield out
        finally:
            self._drop(request_id)

    def _add(self, prompt: Prompt, params: SamplingParams | None, output_kind: OutputKind) -> str:
        request_id = f"request-{next(self._ids)}"
        self.llm_engine.add_request(request_id, prompt, params, output_kind=output_kind)
        self._inbox[request_id] = deque()
        return request_id

    def _next_output(self, request_id: str) -> RequestOutput:
        """Step the engine until this request has an output. Steps serve everybody: outputs of others go to their inboxes."""
        while not self._inbox[request_id]:
            if request_id not in self.llm_engine.requests:
                raise RequestError(f"{request_id}: was aborted by someone else before it ended; send it again")
            if self._connector is not None:
                self._woken.clear()
                self._connector.poll()
            for out in self.llm_engine.step():
                if out.request_id in self._inbox:
                    self._inbox[out.request_id].append(out)
            if self._connector is not None and self.llm_engine.idle:  # all that is left is on its way here
                self._woken.wait()
        return self._inbox[request_id].popleft()

    def _drop(self, request_id: str) -> None:
        del self._inbox[request_id]
        self.llm_engine.abort_request(request_id)

    @property
    def _tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.llm_engine.reset_prefix_cache()

    def zero_kv_cache(self) -> None:
        """Overwrite every cached row with zeros, and let the prefix cache go on serving them.

        An experiment, not a service: what the model still answers after it was not in the cache. `reset_prefix_cache`
        makes the rows count again.
        """
        self.llm_engine.zero_kv_cache()

    def close(self) -> None:
        """End the other ranks now; without `topology` there are none. The engine serves no more."""
        self.llm_engine.close()

    @property
    def kv_cache(self) -> CacheInfo:
        """The pool; with `topology`, that of rank 0."""
        engine = self.llm_engine
        return CacheInfo(engine.pool.num_blocks, engine.pool.num_free_blocks, engine.pool.num_cached_blocks, engine.pool.block_size,
                         engine.kv.nbytes, engine.kv.layout, engine.kv.kv_cache_dtype)
