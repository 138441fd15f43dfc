"""The engine, one process. A request's whole way is `step()`:

    schedule   which tokens of which requests, under one budget          schedule.py
    execute    tensors, model, KV rows written, tokens sampled           runner.py
    update     advance, offer full blocks to the prefix cache, finish    schedule.py
    deliver    forced tokens, text, stop strings, outputs                here
"""
from __future__ import annotations

import time
from random import Random
from threading import RLock
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch

from .config import ConfigError, ModelConfig
from .engine_args import EngineArgs
from .grammar import GrammarBackend
from .kv.blocks import BlockPool
from .kv.cache import KVCache
from .kv.connector import KVConnector
from .machine import attention_backend, device_named, dtype_named, size_pool
from .prompt import Prompt, read_prompt
from .request import OutputKind, Request, RequestError, RequestOutput, Resume, SamplingParams, given_params
from .runner import ModelRunner, StepTimes
from .schedule import Scheduler

if TYPE_CHECKING:
    from .parallel.comm import Parallel

__all__ = ["LLMEngine", "Prompt"]


class LLMEngine:
    """Add requests, call `step()` until `has_unfinished_requests()` is False.

    One thread steps. Others may add, abort and release requests and report loads, also while a step computes: `lock` is held for all
    of these and for a step's decisions, and not while the model runs.

    Args:
        model, tokenizer: already loaded; engines may share them, and each has a cache of its own.
        clock: seconds; the same one in all processes whose timelines are compared.
        connector: brings the blocks of requests from elsewhere and takes copies of them.
        storage: the cache's bytes, as `KVCache` takes them.
        parallel: this rank's place among several (see `parallel.opening.open_engine`); None: there is one.
    """

    def __init__(self, args: EngineArgs, *, model: Any = None, tokenizer: Any = None, clock: Callable[[], float] = time.perf_counter,
                 connector: KVConnector | None = None, storage: Any = None, parallel: Parallel | None = None) -> None:
        if parallel is None:
            if args.ranks.gpus > 1:
                raise ConfigError(f"topology: an LLMEngine is one rank and {args.ranks.name} has {args.ranks.gpus}; use LLM, or parallel.opening.open_engine")
            if args.num_threads:
                torch.set_num_threads(args.num_threads)
        self.args = args
        self.clock = clock
        self.parallel = parallel
        device = device_named(args.device) if parallel is None else parallel.device
        if model is None:
            from .model.decoder import load_model
            from .tokenizer import load_tokenizer

            model = load_model(args.model, dtype=dtype_named(args.dtype, device), device=device, parallel=parallel)
            tokenizer = load_tokenizer(args.model)
        self.model, self.tokenizer = model, tokenizer
        self.config: ModelConfig = self.model.config
        kv_cache_dtype = str(self.model.dtype).removeprefix("torch.") if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        self.cuda_graphs = device.type == "cuda" and not args.enforce_eager and parallel is None
        here = self.config if parallel is None else parallel.ranks.local(self.config)
        rows = args.block_size // args.ranks.context  # of a block that are on this rank
        num_blocks, self.max_model_len = size_pool(args, here, kv_cache_dtype, rows)
        # A CUDA graph runs at a fixed batch width; its empty places write to a block of their own at the end.
        try:
            self.kv = KVCache(here, kv_cache_dtype, args.kv_cache_layout, num_blocks + self.cuda_graphs, rows, device,
                              self.model.dtype, attention_backend(args.attention_backend, device, kv_cache_dtype), storage)
        except RuntimeError as error:  # torch's word for "out of memory", on a CPU and on CUDA
            raise ConfigError(f"kv_cache_memory_bytes: a pool of {num_blocks} blocks does not fit this machine's memory ({error}); ask for less") from error
        self.pool = BlockPool(num_blocks, args.block_size, args.enable_prefix_caching)
        self.scheduler = Scheduler(self.pool, max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.max_num_seqs,
                                   long_prefill_token_threshold=args.long_prefill_token_threshold, connector=connector,
                                   load_admission=args.load_admission, kv_load_failure_policy=args.kv_load_failure_policy)
        self.runner = self._open_runner()
        self.grammars = GrammarBackend(tokenizer, self.config.vocab_size, self.config.eos_token_ids)
        self.requests: dict[str, Request] = {}  # unfinished ones, held ones too
        self.lock = RLock()
        self.idle = True  # the last step had nothing to compute and nobody to tell; until something changes, nor has the next
        self._computing: frozenset[Request] | set[Request] = frozenset()  # whose rows and tokens the model is working on
        self._aborted: list[Request] = []  # of these, to be ended once it is done
        self._seeds = Random(args.seed)  # for requests that bring none

    def _open_runner(self) -> ModelRunner:
        return ModelRunner(self.model, self.kv, cuda_graphs=self.cuda_graphs, max_num_seqs=self.args.max_num_seqs, max_model_len=self.max_model_len)

    def close(self) -> None:
        """End what the engine has started outside this process: on one rank, nothing."""

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, in any thread, when the engine cannot go on because another process of it has ended; `check` then says so."""

    def check(self) -> None:
        """Raise what keeps the engine from going on, if something does."""

    # --- requests -------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: str | Sequence[int] | Mapping[str, Any] | Prompt, params: SamplingParams | None = None, *,
                    cache_salt: str | None = None, output_kind: OutputKind = OutputKind.FINAL_ONLY, arrival_s: float | None = None,
                    seed: int | None = None, resume: Resume | None = None, hold: bool = False, source: Any = None) -> Request:
        """Queue one request. `prompt` is whatever `read_prompt` takes, or what it returned. Text is decoded token by token for outputs
        that come with every step; for a final one it is decoded once, at the end. `arrival_s`, on the engine's clock, is for a request that
        waited elsewhere before it was added; None: now.

        Args:
            seed: for params that bring none; None: one of the engine's own. Engines that continue each other's requests share it.
            resume: what another engine has given of it already: the deltas go on there, as if it had been one engine. Only with
                OutputKind.DELTA.
            hold: keep its blocks once its first token is there, until `release_request`: another engine reads them and goes on.
            source: where the rows of its tokens can be read, for the connector.

        Raises:
            RequestError: the request can never be served; nothing was queued.
        """
        request = self._new_request(request_id, prompt, params, cache_salt, output_kind, arrival_s, seed, resume, hold, source)
        if self.tokenizer is not None and (output_kind is not OutputKind.FINAL_ONLY or request.params.stop):
            request.detokenizer = self.tokenizer.stream_decoder()
        if request.params.structured_outputs is not None:
            request.grammar = self.grammars.matcher(request.params.structured_outputs)
        self._replay(request)
        with self.lock:
            self._refuse_known(request_id)
            self.scheduler.add(request)
            self.requests[request_id] = request
            self.idle = False
        return request

    def _new_request(self, request_id: str, prompt: Any, params: SamplingParams | None, cache_salt: str | None, output_kind: OutputKind,
                     arrival_s: float | None, seed: int | None, resume: Resume | None = None, hold: bool = False, source: Any = None) -> Request:
        text, ids, salt = prompt if isinstance(prompt, Prompt) else self.read_prompt(prompt)
        salt = salt if cache_salt is None else cache_salt
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt={salt!r}: use a string")
        params = given_params(params)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: this model has no tokenizer, so stop strings cannot be seen; use stop_token_ids")
        return Request(request_id, ids, params, max_model_len=self.max_model_len,
                       eos_token_ids=self.config.eos_token_ids, arrival_s=self.clock() if arrival_s is None else arrival_s,
                       cache_salt=salt, prompt=text, output_kind=output_kind, seed=self._seeds.getrandbits(64) if seed is None else seed,
                       resume=resume, hold=hold, source=source)

    def _refuse_known(self, request_id: str) -> None:
        if request_id in self.requests:
            raise RequestError(f"request_id={request_id!r}: is in use by an unfinished request; choose another")

    def resume_request(self, request_id: str, resume: Resume) -> None:
        """The output of a request that was added without, because its rows began to come before there was any. Before `landed`; if it is not
        loading any more, nothing happens.

        Raises:
            RequestError: the output is complete.
        """
        with self.lock:
            request = self.scheduler.loading.get(request_id)
            if request is not None:
                request.resume(resume)
                self._replay(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and give its blocks back; an unknown or finished one is left alone. One that the model is working on ends with
        the step, which returns its output."""
        with self.lock:
            request = self.requests.get(request_id)
            if request is None:
                return None
            if request in self._computing:
                self._aborted.append(request)
                return None
            return self._abort(request)

    def _abort(self, request: Request) -> RequestOutput:
        del self.requests[request.request_id]
        self.scheduler.now_s = self.clock()
        self.scheduler.abort(request)
        self.idle = False
        return self._output(request)

    def has_unfinished_requests(self) -> bool:
        """A step has something to compute, or will have once it has landed."""
        return self.scheduler.has_unfinished

    # --- requests that come from and go to other engines: reports of the connector and its peers --------------

    def held(self, request_id: str) -> Request | None:
        return self.scheduler.held.get(request_id)

    def release_request(self, request_id: str) -> None:
        """A held request has been read, or nobody will: its blocks are free, and stay cached. Whatever else that id is, is left alone."""
        with self.lock:
            self.scheduler.now_s = self.clock()
            if self.scheduler.release(request_id) is not None:
                del self.requests[request_id]
                self.idle = False

    def landed(self, request: Request, num_blocks: int) -> None:
        """See Scheduler.landed; and so on."""
        with self.lock:
            self.scheduler.landed(request, num_blocks, self.clock())
            self.idle = False

    def load_failed(self, request: Request, error: str = "", *, settled: bool = True) -> None:
        with self.lock:
            self.scheduler.load_failed(request, self.clock(), error=error, settled=settled)
            self.idle = False

    def settled(self, request: Request) -> None:
        with self.lock:
            self.scheduler.settled(request)
            self.idle = False

    def stored(self, block_ids: Sequence[int]) -> None:
        with self.lock:
            self.scheduler.stored(block_ids)
            self.idle = False

    # --- one iteration --------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One iteration; returns an output for each request that got a token or ended."""
        times, clock = self.runner.times, self.clock
        with self.lock:
            start = clock()
            step = self.scheduler.schedule(start)
            scheduled = clock()
            if not step.num_tokens and not step.failed:
                self.idle = True
                return []
            sampled = step.sampled()
            self._computing = {*step.decodes, *(request for request, _ in step.prefills)}
        try:
            tokens = self.runner.execute(step) if step.num_tokens else []
        except BaseException:
            self._computing = frozenset()
            raise
        with self.lock:
            self._computing = frozenset()
            executed = clock()
            self.scheduler.update(step, tokens, executed)
            outputs = self._deliver(sampled, step.failed)
            while self._aborted:
                request = self._aborted.pop()
                if not request.finished:
                    outputs.append(self._abort(request))
            times.steps += 1
            times.schedule_s += scheduled - start
            times.update_s += clock() - executed
        return outputs

    def _deliver(self, sampled: list[Request], failed: list[Request]) -> list[RequestOutput]:
        outputs = []
        for request in sampled:
            new = 0 if request.error else 1  # none if no token was allowed
            if request.grammar is not None and not request.finished:
                new += self._jump(request)
            if request.detokenizer is not None:
                self._decode_text(request, new)
            if request.logprobs and self.tokenizer is not None:
                for token, logprob in request.logprobs[-1].items():
                    logprob.decoded_token = self.tokenizer.decode([token], skip_special_tokens=False)
            if request.finished:
                del self.requests[request.request_id]
            if request.finished or request.output_kind is not OutputKind.FINAL_ONLY:
                outputs.append(self._output(request))
        for request in failed:
            if self.requests.pop(request.request_id, None) is not None:  # else it was aborted meanwhile
                outputs.append(self._output(request))
        return outputs

    def _replay(self, request: Request) -> None:
        """Bring text and grammar to where they were when another engine had given the output so far."""
        if not request.num_resumed_tokens:
            return
        if request.output_kind is not OutputKind.DELTA:
            raise ValueError(f"{request} resumes another's output, so its own can only be deltas")
        if request.detokenizer is not None:
            request.text = "".join(map(request.detokenizer.feed, request.output_token_ids))
        if request.grammar is not None:
            request.grammar.replay(request.output_token_ids, jumping=_may_jump(request))

    def _jump(self, request: Request) -> int:
        """Append the tokens that the grammar leaves no choice about; returns how many. They have no log-probabilities, and those that may
        have to stop the request are left to be sampled."""
        if not _may_jump(request):
            return 0
        tokens = request.grammar.jump(self.scheduler.room(request))
        self.scheduler.append(request, tokens, self.scheduler.now_s)
        self.times.jump_forward_tokens += len(tokens)
        if request.params.temperature > 0:
            for _ in tokens:  # one draw a token, sampled or not: the rest of the answer does not depend on how many were forced at once
                request.rng.random()
        return len(tokens)

    def _decode_text(self, request: Request, new: int) -> None:
        """Append the text of the last `new` tokens; a stop string cuts the text before it and ends the request."""
        ended_by_token = request.finish_reason == "stop"
        seen = len(request.text)
        if not ended_by_token:
            for token in request.token_ids[request.num_tokens - new:]:
                request.text += request.detokenizer.feed(token)
        if request.finished:
            request.text += request.detokenizer.finish()
        for stop in request.params.stop:
            # A stop string may straddle tokens: look back as far as its own length.
            at = request.text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0:
                request.text = request.text[:at]
                request.stop_reason = stop
                if not request.finished:
                    self.scheduler.finish(request, "stop")
                request.finish_reason = "stop"
                return

    def _output(self, request: Request) -> RequestOutput:
        if request.finished and request.detokenizer is None and self.tokenizer is not None:
            ids = request.output_token_ids
            request.text = self.tokenizer.decode(ids[:-1] if request.finish_reason == "stop" else ids)
        # What may be the beginning of a stop string is held back: text once shown is never taken away.
        held = 0 if request.finished else _open_stop(request.text, request.params.stop)
        return RequestOutput.of(request, request.text[: len(request.text) - held])

    def read_prompt(self, prompt: str | Sequence[int] | Mapping[str, Any]) -> Prompt:
        """`prompt.read_prompt` with this model's tokenizer and vocabulary."""
        return read_prompt(prompt, self.tokenizer, self.config.vocab_size)

    # --- what can be seen from outside ----------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def times(self) -> StepTimes:
        return self.runner.times

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    def reset_prefix_cache(self) -> None:
        self.pool.reset_prefix_cache()

    def zero_kv_cache(self) -> None:
        """Overwrite every cached row with zeros; the prefix cache goes on serving them."""
        self.kv.zero_()


def _may_jump(request: Request) -> bool:
    """Whether tokens that its grammar forces may be appended and need not be sampled."""
    return request.logprobs is None and not request.params.stop and not request.params.stop_token_ids


def _open_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
