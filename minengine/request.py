"""A request: what is asked for, how far it has come, and what it gives back. Pure Python.

One invariant holds from birth to end:  num_computed_tokens <= num_tokens <= max_model_len.
A request has no phase. Prefill and decode are both "num_computed_tokens catches up with num_tokens".
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from .kv.blocks import block_hash, root_hash
from .timeline import Timeline, WaitParts

__all__ = ["CompletionOutput", "Logprob", "OutputKind", "Request", "RequestError", "RequestOutput", "Resume", "SamplingParams", "Status",
           "StructuredOutputsParams", "Timeline", "WaitParts", "given_params"]


GREEDY_BELOW = 1e-5  # temperatures at which dividing by them leaves nothing but the best token, or overflows


class RequestError(ValueError):
    """A request that this engine cannot serve; the message names the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole answer must look like; exactly one field is set. The names are vLLM's.

    Attributes:
        json: a JSON schema, as a dict or its text; the answer is one line, `{"key": value, ...}`, keys in the schema's order.
        regex: matches the whole answer.
        choice: the answer is one of these.
        grammar: EBNF, whose rule `root` is the answer.
        structural_tag: xgrammar's, as a dict or its text: free text with parts that have a form, a tool call for instance.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(f"structured_outputs: set exactly one of {', '.join(self.__dataclass_fields__)}; got {', '.join(given) or 'none'}")
        kind, value = given[0], getattr(self, given[0])
        kinds = {"json": (str, dict, bool), "choice": (list, tuple), "structural_tag": (str, dict)}.get(kind, (str,))
        if not isinstance(value, kinds):
            raise RequestError(f"structured_outputs.{kind}: use {' or '.join(k.__name__ for k in kinds)}; got {type(value).__name__}")
        if kind == "choice":
            if not value or not all(isinstance(text, str) and text for text in value):
                raise RequestError("structured_outputs.choice: use one or more non-empty strings")
            object.__setattr__(self, "choice", tuple(value))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in self.__dataclass_fields__ if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """That field as text: with `kind`, all that tells one grammar from another. The order of keys counts.

        Raises:
            RequestError: it holds what JSON cannot.
        """
        value = getattr(self, self.kind)
        try:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.{self.kind}: cannot be written as JSON ({error}); use plain values, nested less deeply") from error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop; the names are vLLM's.

    Order of application: temperature, min_p, top_k, top_p. `temperature=0` takes the best token; below 1e-5 it is 0.
    `logprobs=k` returns the k best log-probabilities of the unmodified distribution, and the chosen token's.
    `structured_outputs` takes out, before all of these, every token that its grammar does not allow next.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = ()
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("stop", (str, list, tuple, type(None))), ("stop_token_ids", (list, tuple))):
            if not isinstance(getattr(self, name), kinds):
                raise RequestError(f"{name}={getattr(self, name)!r}: use a list")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise RequestError(f"{name}={getattr(self, name)!r}: {remedy}")

        def number(name: str) -> float:
            value = getattr(self, name)
            demand(isinstance(value, (int, float)) and not isinstance(value, bool) and value == value, name, "use a number")
            return value

        def whole(name: str) -> int:
            value = getattr(self, name)
            demand(isinstance(value, int) and not isinstance(value, bool), name, "use a whole number")
            return value

        demand(0.0 <= number("temperature") <= 100.0, "temperature", "use 0 (greedy) to 100")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        demand(0.0 < number("top_p") <= 1.0, "top_p", "use more than 0 and at most 1")
        demand(whole("top_k") >= -1, "top_k", "use 0 (all tokens) or a positive number")
        demand(0.0 <= number("min_p") <= 1.0, "min_p", "use 0 to 1")
        demand(whole("max_tokens") >= 1, "max_tokens", "use at least 1")
        demand(all(isinstance(s, str) and s for s in stop), "stop", "use non-empty strings")
        demand(all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "use token ids, 0 or more")
        demand(self.seed is None or isinstance(self.seed, int), "seed", "use a whole number or None")
        demand(self.logprobs is None or 0 <= whole("logprobs") <= 50, "logprobs", "use 0 to 50, or None")
        demand(isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))), "structured_outputs", "use StructuredOutputsParams(...)")


def given_params(params: Any) -> SamplingParams:
    """What a caller gave for `sampling_params`; None: the defaults.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(params, (SamplingParams, type(None))):
        raise RequestError(f"sampling_params={params!r}: use SamplingParams(...)")
    return params or SamplingParams()


class OutputKind(Enum):
    """What each output of a request carries; vLLM's `RequestOutputKind`."""

    CUMULATIVE = "cumulative"  # one a step: everything so far
    DELTA = "delta"  # one a step: what is new since the last
    FINAL_ONLY = "final_only"  # one, at the end


class Status(Enum):
    WAITING = "waiting"  # in the queue, holds no block (new, or preempted)
    LOADING = "loading"  # holds the blocks of all its tokens; the content of some is on its way
    READY = "ready"  # that content has landed; waits for admission
    RUNNING = "running"  # holds the blocks of all its tokens
    HELD = "held"  # its first token is there; holds its blocks until a decoder has read them
    FINISHED = "finished"  # holds no block


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How far another engine has come with a request: handed over after its prefill, or lost on the way.

    Attributes:
        output_token_ids: that its reader has.
        sent_chars: characters of their text that its reader has; fewer than all where a stop string may have begun.
        timeline: its stamps so far, those of `output_token_ids` among them.
        num_cached_tokens: of the prompt, found in a cache when it was first admitted.
    """

    output_token_ids: tuple[int, ...] = ()
    sent_chars: int = 0
    timeline: Timeline | None = None
    num_cached_tokens: int = 0


class Request:
    """The scheduler's view of one sequence: four counters, a block table, a hash chain, a timeline."""

    __slots__ = (
        "request_id", "params", "prompt", "token_ids", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_cached_tokens",
        "max_num_tokens", "stop_ids", "block_ids", "capacity", "block_hashes", "num_hashed_blocks", "cache_salt", "status",
        "finish_reason", "stop_reason", "error", "timeline", "rng", "logprobs", "detokenizer", "text", "output_kind", "sent",
        "prompt_token_ids", "grammar", "source", "hold", "may_load",
        "num_resumed_tokens", "num_loaded_tokens",
    )

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, max_model_len: int,
                 eos_token_ids: tuple[int, ...] = (), arrival_s: float = 0.0, cache_salt: str | None = None,
                 prompt: str | None = None, output_kind: OutputKind = OutputKind.FINAL_ONLY, seed: int | None = None,
                 resume: Resume | None = None, hold: bool = False, source: Any = None) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt: is empty; send at least one token")
        if len(prompt_token_ids) >= max_model_len:
            raise RequestError(f"prompt: has {len(prompt_token_ids)} tokens and max_model_len is {max_model_len}, which must also hold "
                               f"one output token; shorten the prompt or raise max_model_len")
        self.request_id = request_id
        self.params = params
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids  # as given, for every output to refer to: never changed
        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0  # tokens whose KV is in the cache
        self.num_cached_tokens = 0  # of the prompt, found in the cache at first admission
        self.num_loaded_tokens = 0  # of these, brought from a tier
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        # A grammar ends by the model's end token, whoever else ignores it.
        heeds_eos = not params.ignore_eos or params.structured_outputs is not None
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset(eos_token_ids) if heeds_eos else frozenset())
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids can hold
        self.block_hashes: list[bytes] = []  # of the full blocks of token_ids, as far as they were needed
        self.num_hashed_blocks = 0  # leading blocks already offered to the prefix cache
        self.cache_salt = cache_salt
        self.status = Status.WAITING
        self.finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; "handed_over" is never shown
        self.stop_reason: int | str | None = None  # the stop token or string that ended it
        self.error: str | None = None
        self.timeline = Timeline(arrival_s=arrival_s)
        # One draw an output token, whatever the batch; `seed` is the engine's for a request without one of its own.
        self.rng = Random(seed if params.seed is None else params.seed)
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.grammar: Any = None  # the grammar.Matcher that its tokens follow, or None
        self.detokenizer: Any = None
        self.text = ""
        self.output_kind = output_kind
        self.sent = (0, 0)  # characters and tokens of the output that deltas have carried so far
        self.hold = hold  # keep its blocks after the first token, for another engine to read
        self.source = source  # where else the rows of all its tokens but the last are, for the connector to read; or None
        self.may_load = True  # a load that failed is not tried again
        self.num_resumed_tokens = 0  # of the output, given by the engine that came before
        if resume is not None:
            self.resume(resume)

    def resume(self, resume: Resume) -> None:
        """Take over the output of an engine that came before; only while there is none of its own.

        Raises:
            RequestError: the output is complete, so there is nothing to go on with.
        """
        n = len(resume.output_token_ids)
        if self.num_tokens != self.num_prompt_tokens:
            raise ValueError(f"{self} has output of its own and cannot resume another's")
        if self.num_tokens + n >= self.max_num_tokens:
            raise RequestError(f"resume: {self.num_prompt_tokens} prompt and {n} output tokens leave no token to generate, because the request "
                               f"ends at {self.max_num_tokens}; raise max_tokens or max_model_len")
        self.token_ids += resume.output_token_ids
        self.num_tokens += n
        self.num_resumed_tokens = n
        if self.params.temperature > 0:
            for _ in range(n):
                self.rng.random()
        if self.logprobs is not None:
            self.logprobs += [{} for _ in range(n)]  # their reader has them
        self.sent = (resume.sent_chars, n)
        self.num_cached_tokens = resume.num_cached_tokens
        self.timeline = (resume.timeline or self.timeline).resumed(n, self.timeline)

    def hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The hash chain of its first `num_blocks` full blocks, extended as needed and kept."""
        chain = self.block_hashes
        while len(chain) < num_blocks:
            parent = chain[-1] if chain else root_hash(self.cache_salt)
            start = len(chain) * block_size
            chain.append(block_hash(parent, self.token_ids[start: start + block_size]))
        return chain if len(chain) == num_blocks else chain[:num_blocks]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, "
                f"computed={self.num_computed_tokens}, blocks={len(self.block_ids)})")


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities; None when logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids))


@dataclass(slots=True)
class RequestOutput:
    """What a request has given so far; `finished` says whether more will come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: Timeline
    error: str | None = None

    @classmethod
    def of(cls, request: Request, text: str) -> "RequestOutput":
        """The output of a request whose text to show, by now, is `text`; for a delta, what of it was not shown before."""
        characters, tokens = request.sent
        completion = CompletionOutput(0, text[characters:], request.token_ids[request.num_prompt_tokens + tokens:], request.finish_reason,
                                      request.stop_reason, None if request.logprobs is None else request.logprobs[tokens:])
        if request.output_kind is OutputKind.DELTA:
            request.sent = (len(text), request.num_tokens - request.num_prompt_tokens)
        return cls(request.request_id, request.prompt, request.prompt_token_ids, [completion], request.finished, request.num_cached_tokens,
                   request.timeline, request.error)
