"""`POST /v1/completions`: text in, text on. Prompts may be token ids, and several.

A prompt is raw, as it is for vLLM: a control token that is written out in it is one, for who continues a text may write a template by hand.
Text from others belongs into a chat's messages, where it stays text.
"""
from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from ..request import RequestError
from .answer import Answer, check_choices, session_id
from .body import JsonRoute
from .choices import Choice, Piece
from .limits import check_count
from .logprobs import CompletionLogprobs
from .prompts import LONG_TEXT
from .protocol import CompletionRequest
from .sse import ANSWERS, json_bytes
from .state import ServerState
from .structured import extension

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute)

DEFAULT_MAX_TOKENS = 16  # OpenAI's, and vLLM's


@router.post("/v1/completions", response_model=None, responses=ANSWERS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, whole or as server-sent events."""
    server: ServerState = request.app.state.server
    server.check_model(body.model)
    body.check(server.limits)
    check_choices(body, server)
    _check(body, server)
    structured = None if body.structured_outputs is None else await extension(body.structured_outputs, server.limits)
    prompts = [await _token_ids(prompt, server) for prompt in body.prompt]
    room = [body.room("prompt", "max_tokens", len(ids), server.engine.max_model_len, DEFAULT_MAX_TOKENS) for ids in prompts]
    params = [body.sampling_params(max_tokens=tokens, logprobs=body.logprobs, structured=structured) for tokens in room]
    choices = [Choice(index, logprobs=None if body.logprobs is None else CompletionLogprobs()) for index in range(body.num_choices)]
    return CompletionAnswer(server, body, prompts, params, choices, session_id(request, server.limits)).response()


def _check(body: CompletionRequest, server: ServerState) -> None:
    limits = server.limits
    check_count(len(body.prompt), limits.max_prompts, "prompt", "prompts", "max_prompts")
    check_count(sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)), limits.max_prompt_chars, "prompt", "characters", "max_prompt_chars")
    check_count(body.logprobs or 0, limits.max_top_logprobs, "logprobs", "tokens", "max_top_logprobs")
    vocab = server.engine.model_config.vocab_size
    for prompt in body.prompt:
        if not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < vocab:
            raise RequestError(f"prompt: {next(id for id in prompt if not 0 <= id < vocab)} is not a token; ids go from 0 to {vocab - 1}")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo=true: the prompt's own log-probabilities are not kept; leave out echo or logprobs")


async def _token_ids(prompt: str | list[int], server: ServerState) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    tokenizer = server.engine.tokenizer
    if tokenizer is None:
        raise RequestError("prompt: this model has no tokenizer; send token ids")
    server.prompts.check_length(prompt, "prompt", server.engine.max_model_len)
    return await asyncio.to_thread(tokenizer.encode, prompt) if len(prompt) > LONG_TEXT else tokenizer.encode(prompt)


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest

    def opening(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, echo) if self.body.echo and (echo := self._echo(choice.index)) else b""

    def _echo(self, index: int) -> str:
        """The prompt of a choice, as text."""
        prompt = self.body.prompt[index // self.usage.choices_a_prompt]
        return prompt if isinstance(prompt, str) else self.server.engine.tokenizer.decode(prompt, skip_special_tokens=False)

    def chunk(self, piece: Piece) -> bytes:
        if not piece.content and piece.logprobs is None and piece.finish_reason is None:
            return b""
        logprobs = b"null" if piece.logprobs is None else json_bytes(piece.logprobs)
        finish_reason = b"null" if piece.finish_reason is None else json_bytes(piece.finish_reason)
        return self._chunk(piece.choice.index, piece.content, logprobs, finish_reason)

    def _chunk(self, index: int, text: str, logprobs: bytes = b"null", finish_reason: bytes = b"null") -> bytes:
        return self.event(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, json_bytes(text), logprobs, finish_reason))

    def whole_choice(self, pieces: list[Piece]) -> dict[str, Any]:
        index = pieces[0].choice.index
        text = (self._echo(index) if self.body.echo else "") + "".join(piece.content for piece in pieces)
        logprobs = None if pieces[0].logprobs is None else {
            name: [entry for piece in pieces for entry in piece.logprobs[name]] for name in pieces[0].logprobs}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}
