"""The endpoints beside the two that generate: models, health, metrics, tokens, and the chat page."""
from __future__ import annotations

import asyncio
import mimetypes
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field

from .. import __version__
from ..tokenizer import Tokenizer
from .body import JsonRoute
from .errors import ApiError
from .limits import check_count
from .protocol import ChatCompletionRequest, Message, Tool
from .state import ServerState

__all__ = ["router"]

router = APIRouter(route_class=JsonRoute)

# The page needs nothing from elsewhere, and nothing elsewhere needs the page.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
                               "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "minengine"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """`degraded`: some worker is not up; requests are answered by the others, or wait for it. `workers`: each one's state, where there are any;
    `topologies`: their ranks, where one has several."""

    status: str = "ok"
    workers: dict[str, str] | None = None
    topologies: dict[str, str] | None = None


class Version(BaseModel):
    version: str = __version__


class TokenizeRequest(BaseModel):
    """vLLM's two in one: a prompt, or messages as a chat completion has them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True  # around a prompt; a chat template writes its own
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str


def _server(request: Request) -> ServerState:
    return request.app.state.server


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The models served: one."""
    return ModelList(data=[_card(_server(request))])


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> ModelCard:
    """One model by its name."""
    server = _server(request)
    server.check_model(model)
    return _card(server)


def _card(server: ServerState) -> ModelCard:
    return ModelCard(id=server.model_name, created=int(server.started_s), root=server.model_name, max_model_len=server.engine.max_model_len)


@router.get("/health", response_model_exclude_none=True)
@router.get("/ping", include_in_schema=False, response_model_exclude_none=True)  # SageMaker's name for it
async def health(request: Request) -> Health:
    """200 while the server takes requests; 503 once it drains or its engine has ended. Waits for nothing, the engine least of all."""
    server = _server(request)
    server.check_serving()
    server.engine.check_health()
    workers = server.engine.workers
    states = {worker.name: worker.state for worker in workers}
    topologies = {worker.name: worker.topology for worker in workers} if any(worker.num_ranks > 1 for worker in workers) else None
    return Health(status="ok" if all(state == "up" for state in states.values()) else "degraded", workers=states or None, topologies=topologies)


@router.get("/version")
async def version() -> Version:
    """This package's version."""
    return Version()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counts, gauges and histograms in Prometheus' text format."""
    return Response(_server(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a prompt or a conversation, as the engine would read it."""
    server = _server(request)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        given = "are both there" if body.prompt is not None else "are both missing"
        raise ApiError(400, f"prompt: it and messages {given}; send one of them", "prompt")
    tokenizer = _tokenizer(server)
    if body.messages is not None:
        chat = ChatCompletionRequest.model_construct(messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs)
        ids = (await server.prompts.prompt(chat)).token_ids
    else:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise ApiError(400, f"{name}: belongs to messages; leave it out or send messages", name)
        check_count(len(body.prompt), server.limits.max_prompt_chars, "prompt", "characters", "max_prompt_chars")
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
    return await asyncio.to_thread(_told, ids, tokenizer if body.return_token_strs else None, server.engine.max_model_len)


def _told(ids: list[int], tokenizer: Tokenizer | None, max_model_len: int) -> Response:
    """The answer of /tokenize: of a long text it takes a while. With `tokenizer`, tokens are told as strings too."""
    strings = None if tokenizer is None else [tokenizer.token_bytes(id).decode("utf-8", errors="replace") for id in ids]
    told = TokenizeResponse.model_construct(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings)
    return Response(told.model_dump_json(), media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of token ids, of as many as the model takes."""
    server = _server(request)
    server.check_model(body.model)
    if len(body.tokens) > server.engine.max_model_len:
        raise ApiError(400, f"tokens: has {len(body.tokens)} ids and max_model_len is {server.engine.max_model_len}; send fewer at a time", "tokens")
    size = server.engine.model_config.vocab_size
    bad = next((at for at, id in enumerate(body.tokens) if id >= size), None)
    if bad is not None:
        raise ApiError(400, f"tokens.{bad}={body.tokens[bad]}: is not a token; ids go from 0 to {size - 1}", f"tokens.{bad}")
    return DetokenizeResponse(prompt=await asyncio.to_thread(_tokenizer(server).decode, body.tokens, skip_special_tokens=False))


def _tokenizer(server: ServerState) -> Tokenizer:
    if server.engine.tokenizer is None:
        raise ApiError(400, "prompt: this model has no tokenizer; send token ids to /v1/completions", "prompt")
    return server.engine.tokenizer


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """A page to talk to the model; it uses this server and nothing else."""
    return _page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    return _page_file(name)


def _page_file(name: str) -> Response:
    if name not in (contents := _page_files()):
        raise ApiError(404, "path: the page has no such file; open / for the page itself")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(contents[name], media_type=kind, headers=PAGE_HEADERS)


@lru_cache
def _page_files() -> dict[str, bytes]:
    """The page's files by name, read once: a name from a client never becomes a path."""
    return {file.name: file.read_bytes() for file in files("minengine.serve").joinpath("page").iterdir() if file.is_file()}
