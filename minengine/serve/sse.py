"""Answers that take their time: a response of raw ASGI messages, which ends with its client, and server-sent events in it.

A token costs this server one `send`; so events are bytes that were formatted once, with the new text put in, and all that is
ready goes out together. No response object, iterator wrapper or model stands between the engine's delta and the socket.
"""
from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any, AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import api_error

__all__ = ["ANSWERS", "EngineResponse", "json_bytes", "send_events", "send_json"]

# For the document of the API.
ANSWERS: dict[int | str, dict[str, Any]] = {200: {
    "description": "The answer, as one object or, with stream=true, as server-sent events that end in [DONE]",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {
        "type": "object", "description": "of each event", "properties": {"data": {"type": "string"}}, "required": ["data"]}}}}}

DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class EngineResponse(Response):
    """Runs `work(send)` until it is done or the client has gone, whichever is first; then `work` is cancelled, and the
    engine's generators in it are closed, which frees their blocks.

    What `work` raises before it has sent anything goes to the app's exception handlers and becomes a proper status.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        self.work = work
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self.work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if finished:
            work.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_events(send: Send, events: AsyncGenerator[bytes, None]) -> None:
    """Send whole events as they come, and [DONE]. The status waits for the first of them: until then an error can have its own.
    Later it is an event in OpenAI's error shape, and the stream ends as one that went well does."""
    async with aclosing(events):
        body = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        try:
            while True:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = await anext(events)
        except StopAsyncIteration:
            body = DONE
        except Exception as error:
            told = api_error(error)
            await send({"type": "http.response.body", "body": b"data: " + json_bytes(told.body()) + b"\n\n" + DONE})
            if told.code == "internal_error":
                raise  # the answer is complete; whoever logs what nobody foresaw still has to see it
            return
    await send({"type": "http.response.body", "body": body})


def json_bytes(value: object) -> bytes:
    """Compact JSON in ASCII: any text can stand in it, and no newline ends an event early."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
