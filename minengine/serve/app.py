"""The application: the endpoints, what stands before them, and the document that describes them."""
from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from .. import __version__
from ..streams import AsyncFront
from .args import ServeArgs
from .auth import ApiKeys
from .errors import ERROR_RESPONSES, install_handlers
from .gate import NO_KEY, Gate
from .metrics import ServerMetrics
from .state import ServerState

from . import chat, completions, routes  # after ServerState, which they share with this module

__all__ = ["ServeArgs", "ServerState", "create_app"]


def create_app(engine: AsyncFront, args: ServeArgs) -> FastAPI:
    """The server of one engine; `app.state.server` is its ServerState.

    Raises:
        ConfigError: a file that `args` names cannot be used.
    """
    keys = None if args.api_key_file is None else ApiKeys(args.api_key_file)
    state = ServerState(engine, args, args.limits, ServerMetrics(engine, args.model_name))
    # FastAPI's own pages for the document load scripts from elsewhere; the document itself stays.
    app = FastAPI(title="minengine", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=ERROR_RESPONSES)
    app.state.server = state
    state.prompts  # reads the chat template now, not at the first request
    app.add_middleware(Gate, state=state, keys=keys)
    install_handlers(app)
    for part in (chat, completions, routes):
        app.include_router(part.router)
    _describe(app, with_keys=keys is not None)
    return app


def _describe(app: FastAPI, *, with_keys: bool) -> None:
    """Make /openapi.json tell what is so: a body that does not validate gets 400, never FastAPI's 422; errors are
    JSON everywhere; keys are asked for if there are any."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = build()
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    answers = operation["responses"]
                    answers.pop("422", None)
                    for status in ERROR_RESPONSES:  # FastAPI gives an endpoint's errors the media type of its success
                        answers[str(status)]["content"] = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
                    if with_keys and path not in NO_KEY:
                        operation["security"] = [{"key": []}]
            for name in ("ValidationError", "HTTPValidationError"):
                document["components"]["schemas"].pop(name, None)
            if with_keys:
                document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return app.openapi_schema

    app.openapi = openapi
