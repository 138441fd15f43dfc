"""`POST /v1/chat/completions`."""
from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ..request import RequestError
from .answer import Answer, check_choices, session_id
from .body import JsonRoute
from .choices import Choice, Piece
from .limits import check_count
from .logprobs import ChatLogprobs
from .protocol import ChatCompletionRequest
from .reasoning import ReasoningParser
from .sse import ANSWERS, json_bytes
from .state import ServerState
from .structured import chat_structure, check_tool_fields
from .tools import ToolCallParser

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events.

    A `stop` string ends an answer wherever it comes, also inside a tool call under a grammar: what there is of the call is content then.
    """
    server: ServerState = request.app.state.server
    server.check_model(body.model)
    body.check(server.limits)
    check_choices(body, server)
    check_tool_fields(body, server.limits)
    logprobs = _top_logprobs(body, server)
    prompt = await server.prompts.prompt(body, server.engine.max_model_len)
    max_tokens = body.room("messages", _max_tokens_field(body), len(prompt.token_ids), server.engine.max_model_len)
    structured = await chat_structure(body, server, reasoning=prompt.reasoning)
    params = body.sampling_params(max_tokens=max_tokens, logprobs=logprobs, structured=structured)
    choices = [Choice(index, _parser(body, server.prompts.tool_format, prompt.reasoning),
                      None if logprobs is None else ChatLogprobs(server.engine.tokenizer, logprobs)) for index in range(len(params))]
    return ChatAnswer(server, body, [prompt.token_ids], [params], choices, session_id(request, server.limits)).response()


def _parser(body: ChatCompletionRequest, tool_format: str, reasoning: bool) -> ToolCallParser | ReasoningParser | None:
    """One a choice: it holds the choice's text so far."""
    if body.tools and body.tool_choice != "none":
        return ToolCallParser(tool_format, body.declared, reasoning)
    return ReasoningParser() if reasoning else None


def _max_tokens_field(body: ChatCompletionRequest) -> str:
    if body.max_completion_tokens is None:
        return "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise RequestError(f"max_tokens={body.max_tokens}: max_completion_tokens={body.max_completion_tokens} says otherwise; send one of them")
    return "max_completion_tokens"


def _top_logprobs(body: ChatCompletionRequest, server: ServerState) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError(f"top_logprobs={body.top_logprobs}: needs logprobs=true; send both or neither")
        check_count(body.top_logprobs, server.limits.max_top_logprobs, "top_logprobs", "tokens", "max_top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, b'{"role":"assistant","content":"","refusal":null}')

    def chunk(self, piece: Piece) -> bytes:
        index, logprobs = piece.choice.index, _logprobs(piece.logprobs)
        if not piece.reasoning and not piece.calls and piece.finish_reason is None and piece.logprobs is None:  # nearly every token
            return self._chunk(index, b'{"content":' + json_bytes(piece.content) + b"}") if piece.content else b""
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        if piece.calls:
            deltas.append({"tool_calls": [{"index": piece.first_call + at, **call} for at, call in enumerate(piece.calls)]})
        if not deltas and piece.logprobs is not None:
            deltas.append({"content": ""})
        written = [self._chunk(index, json_bytes(delta), b"null" if at else json_bytes(logprobs)) for at, delta in enumerate(deltas)]
        if piece.finish_reason is not None:
            written.append(self._chunk(index, b"{}", finish_reason=json_bytes(piece.finish_reason)))
        return b"".join(written)

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null") -> bytes:
        return self.event(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish_reason))

    def whole_choice(self, pieces: list[Piece]) -> dict[str, Any]:
        content, reasoning = "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces)
        calls = [call for piece in pieces for call in piece.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        entries = None if pieces[0].logprobs is None else [entry for piece in pieces for entry in piece.logprobs]
        return {"index": pieces[0].choice.index, "message": message, "logprobs": _logprobs(entries), "finish_reason": pieces[-1].finish_reason}


def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}
