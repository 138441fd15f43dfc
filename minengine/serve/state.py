"""What all endpoints share."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cached_property

from ..config import GlmConfig
from ..streams import AsyncFront
from .args import ServeArgs
from .errors import ApiError
from .limits import ServeLimits
from .metrics import ServerMetrics
from .prompts import ChatPrompts

__all__ = ["ServerState"]


@dataclass
class ServerState:
    """Endpoints find it at `request.app.state.server`."""

    engine: AsyncFront
    args: ServeArgs
    limits: ServeLimits
    metrics: ServerMetrics
    started_s: float = field(default_factory=time.time)  # seconds since 1970
    draining: bool = False  # SIGTERM has come: no new requests

    @property
    def model_name(self) -> str:
        return self.args.model_name

    @cached_property
    def prompts(self) -> ChatPrompts:
        """How this model's prompts are made from messages."""
        tool_format = self.args.tool_call_parser or ("glm" if isinstance(self.engine.model_config, GlmConfig) else "llama")
        return ChatPrompts(self.engine.tokenizer, tool_format, self.args.chat_template, self.limits)

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is the one served; None, as in a request without a model, is."""
        if model not in (None, self.model_name):
            raise ApiError(404, f"model={model[:80]!r}: is not served here; use {self.model_name!r}", "model", "model_not_found")

    def check_serving(self) -> None:
        """Raise a 503 while the server drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: it finishes what it has; send the request to another one", code="draining",
                           headers={"Retry-After": str(max(1, math.ceil(self.args.drain_timeout_s))), "Connection": "close"})
