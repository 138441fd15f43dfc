"""Request bodies as this server takes them: JSON, strictly. Endpoints with a body use `APIRouter(route_class=JsonRoute)`.

FastAPI's own reading lets duplicate keys, NaN, lone surrogates and bottomless nesting through to code that then fails.
"""
from __future__ import annotations

import json
import math
from typing import Any, Callable, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .errors import ApiError
from .limits import ServeLimits

__all__ = ["JsonRoute", "parse_json"]

MAX_KEYS = 2048  # of one object: an unknown key is an error each, and a million errors take seconds to put together


class JsonRoute(APIRoute):
    """A route whose body is read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return strict


class _JsonRequest(Request):
    async def body(self) -> bytes:
        if self.method == "POST":
            kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
            # A page of another origin can send a form or plain text to a loopback server unasked; for JSON its browser asks first.
            if kind != "application/json":
                raise ApiError(415, f"Content-Type={kind[:80]!r}: the body is read as JSON; send Content-Type: application/json", code="unsupported_media_type")
        return await super().body()

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body(), self.app.state.server.limits)
        return self._json


def parse_json(body: bytes, limits: ServeLimits) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ApiError: 400. It is no JSON; it holds a key twice, NaN, an infinite number or half of a surrogate pair; or it has more levels
            or parts than `limits` says.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise _refuse(f"byte {error.start} is not UTF-8; send the text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refuse(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno}); send one JSON object") from None
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError:  # a number of more digits than Python converts
        raise _refuse("holds a number of thousands of digits; send smaller numbers") from None
    # The check walks the whole value; it finds nothing unless these bytes are there.
    if body.count(b"[") + body.count(b"{") > min(limits.max_json_depth, limits.max_json_parts) or b"\\u" in body:
        _check(value, limits)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _refuse(f"holds an object of {len(pairs)} keys and {MAX_KEYS} are the most; send fewer")
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _refuse(f"holds the key {twice[:60]!r} twice in one object; send it once")
    return value


def _no_number(name: str) -> NoReturn:
    raise _refuse(f"holds {name}, which is no JSON number; leave the field out or send a number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _refuse(f"holds the number {digits[:24]}, which no float can hold; send a smaller one")
    return number


def _check(value: Any, limits: ServeLimits) -> None:
    """Level by level, without recursion: depth, the number of objects and lists, and text that has no UTF-8."""
    level, depth, parts = [value], 0, 0
    while level:
        inner: list[Any] = []
        before = parts
        for node in level:
            if isinstance(node, str):
                try:
                    node.encode()
                except UnicodeEncodeError:
                    raise _refuse("holds half of a surrogate pair (\\ud800 to \\udfff alone), which no text contains; remove it") from None
            elif isinstance(node, dict):
                parts += 1
                inner += node
                inner += node.values()
            elif isinstance(node, list):
                parts += 1
                inner += node
        depth += parts > before
        if depth > limits.max_json_depth:
            raise _too_deep(limits)
        if parts > limits.max_json_parts:
            raise _refuse(f"holds more than max_json_parts={limits.max_json_parts} objects and lists; send less, or raise --max-json-parts")
        level = inner


def _too_deep(limits: ServeLimits) -> ApiError:
    return _refuse(f"is nested deeper than max_json_depth={limits.max_json_depth}; flatten it, or raise --max-json-depth")


def _refuse(what: str) -> ApiError:
    return ApiError(400, f"body: {what}", "body", "invalid_json")
