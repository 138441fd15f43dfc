"""Every way to say no, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

    ApiError            raised by the server's own code: a status, a sentence, the field
    RequestError        a bad value that the engine or a check found: 400, `param` is the sentence's leading field name
    validation errors   pydantic's: 400, `param` is the dotted path in the body; FastAPI's own 422 never leaves this server
    EngineOverloaded    429 with Retry-After; EngineDraining and EngineDead: 503
    anything else       500, which says nothing of its cause to a client

The sentence is always `field=value: what is wrong; remedy`.
"""
from __future__ import annotations

import math
import re
from typing import Any, Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ..async_llm import EngineDead, EngineDraining, EngineOverloaded
from ..request import RequestError
from .validation import first_error

__all__ = ["ERROR_RESPONSES", "ApiError", "ErrorResponse", "api_error", "error_response", "install_handlers"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_FIELD = re.compile(r"([A-Za-z_][\w.$-]*)(?==|:)")  # of a schema's keywords some begin with $


class ApiError(HTTPException):
    """An answer that is an error. `param` is the dotted path of the field at fault, `code` a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer; streams send the same as an event once their status is out."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "A field is missing, unknown or holds a bad value; `param` names it",
        401: "The API key is missing or wrong",
        403: "The Host header is not a name of this machine",
        404: "No such model or path",
        405: "The path exists and does not take this method",
        408: "The body's next part did not come in time",
        413: "The body is larger than the server takes",
        415: "The body's Content-Type is not application/json",
        429: "The queue is full; try again after Retry-After seconds",
        500: "A fault of the server",
        503: "The server is draining or its engine has ended",
    }.items()
}


def api_error(error: Exception) -> ApiError:
    """What a client is told of any exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        field = _FIELD.match(str(error))
        return ApiError(400, str(error), field[1] if field else None)
    if isinstance(error, (RequestValidationError, ValidationError)):
        param, message = first_error(error)
        return ApiError(400, message, param)
    if isinstance(error, HTTPException):
        return _http_error(error)
    if isinstance(error, EngineOverloaded):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))})
    if isinstance(error, EngineDraining):
        return ApiError(503, str(error), code="draining", headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, "the server failed at this request and has logged where; it is not the request's fault", code="internal_error")


def error_response(error: Exception) -> JSONResponse:
    told = api_error(error)
    return JSONResponse(told.body(), told.status, told.headers)


def install_handlers(app: FastAPI) -> None:
    """Every exception that reaches the app goes through `error_response`; unexpected ones belong to the outermost middleware."""
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (HTTPException, RequestError, RequestValidationError, ValidationError, EngineOverloaded, EngineDraining, EngineDead):
        app.add_exception_handler(kind, answer)


def _http_error(error: HTTPException) -> ApiError:
    """Starlette's own: an unknown path, a known one with the wrong method, a body that cannot be read."""
    told = {404: "path: no such endpoint; see /openapi.json for those there are",
            405: "method: this path does not take it; see the Allow header"}.get(error.status_code, f"request: {error.detail}; mend it and send it again")
    return ApiError(error.status_code, told, headers=error.headers)
