"""One HTTP request's answer, streamed or whole: what chat and completions have in common."""
from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, AsyncGenerator, Sequence
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Send

from ..request import RequestError, RequestOutput, SamplingParams
from .choices import Choice, Piece, Usage, pieces, timeline
from .limits import ServeLimits, check_count
from .protocol import GenerationRequest
from .sse import EngineResponse, json_bytes, send_events, send_json
from .state import ServerState

__all__ = ["Answer", "check_choices", "session_id"]


def check_choices(body: GenerationRequest, server: ServerState) -> None:
    """
    Raises:
        RequestError: the request has more choices than the engine can hold at all; waiting would not help.
    """
    count, n = body.num_choices, body.n or 1
    capacity = server.engine.capacity
    if count > capacity:
        field, each = (f"n={n}", f", {n} to each of {count // n} in prompt," if count > n else "") if n > 1 else ("prompt", "")
        raise RequestError(f"{field}: asks for {count} answers{each} and the server holds {capacity}, running and waiting; send fewer in a request")


def session_id(request: Request, limits: ServeLimits) -> str | None:
    """What the header X-Session-Id says: requests that share it belong together."""
    session = request.headers.get("x-session-id")
    check_count(len(session or ""), limits.max_id_chars, "X-Session-Id", "characters", "max_id_chars")
    return session


class Answer:
    """
    Subclasses write the endpoint's own form: `opening` and `chunk` of a stream, `whole_choice` of a response.

    Args:
        prompts: token ids or texts; choice p*n + i is the i-th of prompt p.
        params: one a choice of a prompt.
        choices: one a choice of all prompts.
    """

    prefix: str  # of the id
    object: str
    chunk_object: str

    def __init__(self, server: ServerState, body: GenerationRequest, prompts: Sequence[str | list[int]], params: Sequence[Sequence[SamplingParams]],
                 choices: list[Choice], session: str | None) -> None:
        self.server, self.body, self.choices = server, body, choices
        self.id, self.created = f"{self.prefix}-{uuid4().hex}", int(time.time())
        self.usage = Usage(len(choices) // len(prompts))
        self.last: RequestOutput | None = None
        engine, salt = server.engine, body.cache_salt
        wanted = [(prompt, one) for prompt, of_prompt in zip(prompts, params) for one in of_prompt]
        self.generators = [engine.generate(prompt, one, f"{self.id}-{index}", cache_salt=salt, session_id=session)
                           for index, (prompt, one) in enumerate(wanted)]

    def response(self) -> EngineResponse:
        return EngineResponse(self._stream if self.body.stream else self._whole)

    # --- the endpoint's own form ----------------------------------------------------------------------------

    def opening(self, choice: Choice) -> bytes:
        """Events that come before a choice's first token."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """Events for what one delta added; none when it added nothing to show."""
        raise NotImplementedError

    def whole_choice(self, pieces: list[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    # --- streamed -------------------------------------------------------------------------------------------

    async def _stream(self, send: Send) -> None:
        options = self.body.stream_options
        self._wants_usage = bool(options and options.include_usage)
        head = json_bytes({"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.server.model_name})[:-1]
        self._head = b"data: " + head + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._wants_usage else b"]}\n\n"
        await send_events(send, self._events())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        opening = b"".join(map(self.opening, self.choices))
        async with aclosing(pieces(self.choices, self.generators, self.usage, self.server.metrics)) as batches:
            async for ready, self.last in batches:
                events = opening + b"".join(map(self.chunk, ready))
                if events:
                    yield events
                opening = b""
        if self._wants_usage or self.body.return_timeline:
            yield self._head + b"]," + json_bytes(self._accounts())[1:] + b"\n\n"

    def event(self, choice: bytes) -> bytes:
        """A chunk around one choice, `{"index":...}`."""
        return self._head + choice + self._tail

    # --- whole ----------------------------------------------------------------------------------------------

    async def _whole(self, send: Send) -> None:
        gathered: list[list[Piece]] = [[] for _ in self.choices]
        async with aclosing(pieces(self.choices, self.generators, self.usage, self.server.metrics)) as batches:
            async for ready, self.last in batches:
                for piece in ready:
                    gathered[piece.choice.index].append(piece)
        await send_json(send, json_bytes({"id": self.id, "object": self.object, "created": self.created, "model": self.server.model_name,
                                          "choices": list(map(self.whole_choice, gathered)), **self._accounts()}))

    def _accounts(self) -> dict[str, Any]:
        return {"usage": self.usage.body()} | ({"timeline": timeline(self.last.metrics)} if self.body.return_timeline else {})
