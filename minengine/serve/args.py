"""How one server runs, and the flags that say so. Imports no web framework: the command line is built before one is known to be there."""
from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..config import ConfigError, EngineArgs
from .limits import ServeLimits

__all__ = ["SERVE_PACKAGES", "ServeArgs", "add_serve_flags", "serve_args"]

SERVE_PACKAGES = ("fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "prometheus_client")  # of the extra `serve`

TOOL_CALL_PARSERS = ("glm", "llama")

_HELP = {
    "host": "address to listen on; anything but loopback can be reached by others",
    "port": "0 takes a free one",
    "served_model_name": "the name that clients ask for",
    "api_key_file": "a file with one key a line, # begins a comment; with it every endpoint but / and /health asks for a key",
    "max_num_waiting": "requests in the queue beyond which new ones get 429",
    "tool_call_parser": "how the model writes tool calls: " + " or ".join(TOOL_CALL_PARSERS),
    "tool_grammar": "hold tool calls to their schemas while they are generated",
    "chat_template": "a jinja2 file that replaces the model's own",
    "drain_timeout_s": "after SIGTERM, seconds that running requests may still take",
}


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """
    Attributes:
        served_model_name: what clients ask for; None: the model's name, of a directory its last part.
        api_key_file: None: no key is asked for.
        tool_call_parser: "glm" or "llama"; None: by the model's architecture.
        tool_grammar: off only to show what happens without one.
    """

    engine: EngineArgs = field(default_factory=EngineArgs)
    limits: ServeLimits = field(default_factory=ServeLimits)
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key_file: str | None = None
    max_num_waiting: int = 1024
    tool_call_parser: str | None = None
    tool_grammar: bool = True
    chat_template: str | None = None
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {remedy}")

        demand(0 <= self.port <= 65535, "port", "use 0 (a free one) to 65535")
        demand(self.max_num_waiting >= 1, "max_num_waiting", "use at least 1")
        demand(self.tool_call_parser in (None, *TOOL_CALL_PARSERS), "tool_call_parser", f"use {' or '.join(TOOL_CALL_PARSERS)}")
        demand(0 <= self.drain_timeout_s <= 86400, "drain_timeout_s", "use 0 to 86400 seconds")
        demand(self.served_model_name != "", "served_model_name", "use a name, or leave it out")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"chat_template={self.chat_template!r}: there is no such file; give the path of a jinja2 template")

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.engine.model)
        return path.resolve().name if path.exists() else self.engine.model


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ServeArgs and of ServeLimits; the engine's are the caller's."""
    for title, kind in (("server", ServeArgs), ("limits", ServeLimits)):
        group = parser.add_argument_group(title)
        for f in fields(kind):
            if f.name in ("engine", "limits"):
                continue
            flag, about = "--" + f.name.replace("_", "-"), _HELP.get(f.name)
            if isinstance(f.default, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=about)
            else:
                convert = {"int": int, "float": float}.get(str(f.type), str)
                group.add_argument(flag, type=convert, default=f.default, help="; ".join(filter(None, (about, f"default: {f.default}"))))


def serve_args(namespace: argparse.Namespace, engine: EngineArgs) -> ServeArgs:
    """What the flags of `add_serve_flags` came to."""
    limits = ServeLimits(**{f.name: getattr(namespace, f.name) for f in fields(ServeLimits)})
    own = {f.name: getattr(namespace, f.name) for f in fields(ServeArgs) if f.name not in ("engine", "limits")}
    return ServeArgs(engine=engine, limits=limits, **own)
