"""The application: what all endpoints share, and what stands between them and the network."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .args import ServeArgs
from .errors import ApiError
from .limits import ServeLimits

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from .metrics import ServerMetrics

__all__ = ["ServeArgs", "ServerState"]


@dataclass
class ServerState:
    """What endpoints find at `request.app.state.server`."""

    engine: AsyncLLM
    args: ServeArgs
    limits: ServeLimits
    metrics: ServerMetrics
    started_s: float = field(default_factory=time.time)  # seconds since 1970
    draining: bool = False  # SIGTERM has come: no new requests

    @property
    def model_name(self) -> str:
        return self.args.model_name

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is the one served; None, as in a request without a model, is."""
        if model not in (None, self.model_name):
            raise ApiError(404, f"model={model[:80]!r}: is not served here; use {self.model_name!r}", "model", "model_not_found")
