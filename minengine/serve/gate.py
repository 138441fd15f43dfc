"""What stands between the network and the endpoints, in plain ASGI: host, key, draining, the body's size; and what becomes of an
exception that nobody foresaw. Streams pass through it chunk by chunk, so it does next to nothing for one."""
from __future__ import annotations

import asyncio
import logging
import traceback
from typing import TYPE_CHECKING, Any

from .auth import ApiKeys, check_host, is_loopback
from .errors import ApiError, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .state import ServerState

__all__ = ["NO_KEY", "Gate"]

log = logging.getLogger("minengine.serve")

BODY_GAP_S = 60  # between two parts of a body; what is slower than that has been given up
NO_KEY = ("/", "/health", "/ping")  # and the page's own files: a browser cannot send a key for them


class Gate:
    def __init__(self, app: ASGIApp, state: ServerState, keys: ApiKeys | None) -> None:
        self.app, self.state, self.keys = app, state, keys
        self.local_names_only = keys is None and is_loopback(state.args.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, method = 0, scope["method"]
        if method == "HEAD":  # is answered as GET is; who writes to the socket leaves the body out
            scope = {**scope, "method": "GET"}

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = self._admit(scope)
            await self.app(scope, _limited(receive, headers, self.state.limits.max_body_bytes), counted)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("%s", _where(scope, error))
            if not status:  # else the connection is closed midway, which a client sees as the failure that it is
                await error_response(error)(scope, receive, counted)
        finally:
            self.state.metrics.count_answer(method, _handler(scope), status)

    def _admit(self, scope: Scope) -> dict[bytes, bytes]:
        """The request's headers.

        Raises:
            ApiError: it may not go on.
        """
        headers = dict(scope["headers"])
        path = scope["path"]
        if self.local_names_only:
            check_host(headers.get(b"host"))
        is_open = path in NO_KEY or path.startswith("/page/")
        if self.keys is not None and not is_open:
            self.keys.check(headers.get(b"authorization"))
        if not is_open and path != "/metrics":
            self.state.check_serving()
        return headers


def _limited(receive: Receive, headers: dict[bytes, bytes], max_bytes: int) -> Receive:
    """`receive`, which raises a 413 when the body turns out to be longer than `max_bytes`, whether or not its length was announced,
    and a 408 when its next part does not come within BODY_GAP_S."""
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    seen, whole = 0, False

    async def counting() -> Message:
        nonlocal seen, whole
        try:
            async with asyncio.timeout(None if whole else BODY_GAP_S):  # behind the body nothing comes but the client's leaving
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"body: its next part did not come within {BODY_GAP_S} s; send the request again", code="request_timeout",
                           headers={"Connection": "close"}) from None
        seen += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if seen > max_bytes:
            raise _too_large(max_bytes)
        return message

    return counting


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"body: is larger than max_body_bytes={max_bytes}; send less, or start the server with a larger --max-body-bytes",
                    code="request_too_large", headers={"Connection": "close"})


def _handler(scope: Scope) -> str:
    """The endpoint's path as it is declared: a label that clients cannot make up."""
    route: Any = scope.get("route")
    return getattr(route, "path", "none")


def _where(scope: Scope, error: Exception) -> str:
    """An exception's kind and place, without its text: that may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown place"
    return f"{scope['method']} {_handler(scope)} failed with {type(error).__name__} at {at}; please report it"
