"""The choices of one HTTP request: their generators run together, and each delta of the engine becomes a piece of an answer.

A stream sends pieces as they come and a whole response adds them up, so the two cannot differ.
"""
from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, AsyncGenerator, AsyncIterator, Callable, Sequence
from uuid import uuid4

from ..request import RequestError, RequestOutput, Timeline
from .errors import ApiError
from .metrics import ServerMetrics
from .reasoning import ReasoningParser
from .tools import ToolCallParser

__all__ = ["Choice", "Piece", "Usage", "pieces", "timeline"]


@dataclass(slots=True)
class Piece:
    """What one delta added to one choice."""

    choice: Choice
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form, without an index
    first_call: int = 0  # the index of the first of them among the choice's calls
    logprobs: Any = None  # as the endpoint writes them; None when there are none
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """One answer on its way.

    Args:
        parser: takes reasoning and tool calls out of the text; None: all of it is content.
        logprobs: makes the endpoint's form of a delta's log-probabilities; None: they were not asked for.
    """

    index: int
    parser: ToolCallParser | ReasoningParser | None = None
    logprobs: Callable[[RequestOutput], Any] | None = None
    num_calls: int = 0

    def feed(self, output: RequestOutput) -> Piece:
        """
        Raises:
            ApiError, RequestError: the request ended without an answer.
        """
        delta = output.outputs[0]
        if self.parser is None:
            piece = Piece(self, delta.text)
        else:
            parsed = self.parser.feed(delta.text)
            calls = parsed.calls
            piece = Piece(self, parsed.content, parsed.reasoning)
            if output.finished:
                rest = self.parser.finish()
                calls += rest.calls
                piece.content += rest.content
                piece.reasoning += rest.reasoning
            if calls:
                piece.calls, piece.first_call = list(map(_call, calls)), self.num_calls
                self.num_calls += len(calls)
        if self.logprobs is not None:
            piece.logprobs = self.logprobs(output)
        if output.finished:
            piece.finish_reason = self._finish_reason(output)
        return piece

    def _finish_reason(self, output: RequestOutput) -> str:
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise ApiError(503, "the server is shutting down and has cut this answer off; send the request again", code="aborted")
        if reason == "error" and output.error.startswith("structured_outputs"):
            raise RequestError(output.error)  # a form that this model's vocabulary cannot write: asked for by the client, and no fault here
        if reason == "error":
            raise ApiError(500, f"the engine could not finish this answer: {output.error}", code="engine_error")
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A parsed call in OpenAI's form; what is wrong with a marked one stands beside it."""
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    marked = {"error": call["error"]} if "error" in call else {}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function, **marked}


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request. A prompt counts once, however many choices it has, and its cached tokens are its first choice's."""

    choices_a_prompt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, index: int, output: RequestOutput) -> None:
        self.completion_tokens += len(output.outputs[0].token_ids)
        if index % self.choices_a_prompt == 0 and index not in self._seen:
            self._seen.add(index)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


async def pieces(choices: Sequence[Choice], generators: Sequence[AsyncGenerator[RequestOutput, None]], usage: Usage,
                 metrics: ServerMetrics) -> AsyncIterator[tuple[list[Piece], RequestOutput]]:
    """Everything that is ready, each time something is, with the output it ends in. Closing it closes all generators.

    Raises:
        ApiError, RequestError, or what `AsyncLLM.generate` raises: one choice failed, and the others are given up with it.
    """
    async with aclosing(_alone(generators[0]) if len(generators) == 1 else _together(generators)) as batches:
        async for batch in batches:
            ready = []
            for index, output in batch:
                usage.add(index, output)
                if output.finished:
                    metrics.observe(output)
                ready.append(choices[index].feed(output))
            yield ready, output


async def _alone(generator: AsyncGenerator[RequestOutput, None]) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
    async with aclosing(generator):
        async for output in generator:
            yield [(0, output)]


async def _together(generators: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
    ready: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(generator):
                async for output in generator:
                    ready.put_nowait((index, output))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(index, generator)) for index, generator in enumerate(generators)]
    running = len(pumps)
    try:
        while running:
            batch = []
            news = [await ready.get()]
            while not ready.empty():
                news.append(ready.get_nowait())
            for new in news:
                if isinstance(new, BaseException):
                    raise new
                if new is None:
                    running -= 1
                else:
                    batch.append(new)
            if batch:
                yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def timeline(times: Timeline) -> dict[str, Any]:
    """When what happened to a request, in seconds since its arrival."""
    return {"queue_s": times.queue_s, "ttft_s": times.ttft_s, "e2e_s": times.e2e_s,
            "token_s": [at - times.arrival_s for at in times.token_s], "num_preemptions": times.num_preemptions}
