"""How one server runs, and the flags that say so. Imports no web framework: the command line is built before one is known to be there."""
from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..engine_args import EngineArgs
from ..disagg.plan import TRANSFERS, ClusterArgs
from ..disagg.router import POLICIES
from ..flags import add_flags
from .limits import ServeLimits

__all__ = ["SERVE_PACKAGES", "ServeArgs", "add_serve_flags", "serve_args"]

SERVE_PACKAGES = ("fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "prometheus_client")  # of the extra `serve`

TOOL_CALL_PARSERS = ("glm", "llama")

SERVER_HELP = {
    "host": "address to listen on; anything but loopback can be reached by others: give --api-key-file, and put a proxy in front that bounds slow clients",
    "port": "0 takes a free one",
    "served_model_name": "the name that clients ask for (default: the model's, of a directory its last part)",
    "api_key_file": "one key a line, a line that begins with # is a comment; every endpoint but /, /health and /ping asks for one (default: no keys)",
    "max_num_waiting": "requests in the queue beyond which new ones get 429",
    "tool_call_parser": "how the model writes tool calls (default: glm for GLM models, else llama)",
    "tool_grammar": "hold tool calls to their schemas while they are generated; without it a required or named call is only a wish, and so is strict",
    "chat_template": "a jinja2 file that replaces the model's own (default: the model's own)",
    "drain_timeout_s": "after SIGTERM or SIGINT, how long running requests may still take",
}
CLUSTER_HELP = {
    "prefill": "worker processes that only read prompts; their KV moves to those that write the answers. --num-threads is split evenly among all workers",
    "decode": "worker processes that write the answers, and with --prefill 0 read the prompts too; 0: the engine runs in the server's own process",
    "router_policy": "who gets a request: by what each worker has cached and has to do, or by neither",
    "worker_timeout_s": "seconds of silence after which a worker's requests go on elsewhere",
    "prefill_args": 'options of the prefill workers alone, as JSON: {"block_size": 256} (default: none)',
    "decode_args": "the same of those that write the answers (default: none)",
    "prefill_topology": "ranks of each prefill worker: TP2, TEP2, DEP2, TP2+DCP2 (default: as --topology)",
    "decode_topology": "the same of those that write the answers; the two may differ, each decode rank fetches what it keeps (default: as --topology)",
    "transfer": "how KV moves: nixl, shm (a copy through shared memory), or auto: NIXL where it is there",
    "cluster": "whose nodes the workers run on: a Ray cluster's ray://HOST:PORT or HOST:PORT, or auto, the one of this machine (default: this machine, without Ray)",
}
LIMITS_HELP = {
    "max_body_bytes": "of a request",
    "max_json_depth": "levels of objects and lists in a body",
    "max_json_parts": "objects and lists in a body; a message with a tool call has five",
    "max_prompt_chars": "of a prompt or a conversation",
    "max_prompts": "of one /v1/completions request",
    "max_messages": "of a conversation",
    "max_tools": "of a request",
    "max_schema_bytes": "of one JSON schema",
    "max_schema_depth": "levels of one JSON schema",
    "max_schema_count": "minItems, maxLength and their kin in a schema added up, and any repeat in a regex",
    "max_regex_chars": "of one regular expression",
    "max_grammar_chars": "of one grammar or list of choices",
    "max_choices": "of structured_outputs.choice",
    "max_n": "choices of one request",
    "max_stop": "stop strings of a request",
    "max_stop_chars": "of all stop strings of a request",
    "max_top_logprobs": "log-probabilities a token",
    "max_id_chars": "of cache_salt, user and X-Session-Id",
}


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """
    Attributes:
        served_model_name: what clients ask for; None: the model's name, of a directory its last part.
        api_key_file: None: no key is asked for.
        tool_call_parser: "glm" or "llama"; None: by the model's architecture.
        tool_grammar: off only to show what happens without one.
        decode: 0: the engine is in this process; else the fields of `ClusterArgs`, the two dicts as JSON.
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
    prefill: int = 0
    decode: int = 0
    router_policy: str = "kv_aware"
    worker_timeout_s: float = 5.0
    prefill_args: str | None = None
    decode_args: str | None = None
    prefill_topology: str | None = None
    decode_topology: str | None = None
    transfer: str = "auto"
    cluster: str | None = None

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
        demand(self.decode >= 0, "decode", "use 0 (the engine in this process) or a number of workers")
        demand(self.decode > 0 or not self.prefill, "prefill", "needs decode=1 or more: somebody has to write the answers")
        if self.engine.kv_transfer != "pull" and not self.decode:
            raise ConfigError(f"kv_transfer={self.engine.kv_transfer!r}: is for workers, and there are none; use prefill=1 and decode=1 or more, or leave it out")
        for f in fields(self):
            if f.name in CLUSTER_HELP and f.name != "decode":
                demand(self.decode > 0 or getattr(self, f.name) == f.default, f.name, "is for workers, and there are none; use decode=1 or more, or leave it out")
        self.cluster_args  # what is wrong with it is said now

    @property
    def cluster_args(self) -> ClusterArgs | None:
        """The workers; None: the engine is in this process."""
        if not self.decode:
            return None
        return ClusterArgs(prefill=self.prefill, decode=self.decode, router_policy=self.router_policy, worker_timeout_s=self.worker_timeout_s,
                           prefill_args=self._dict("prefill_args"), decode_args=self._dict("decode_args"), transfer=self.transfer,
                           prefill_topology=self.prefill_topology, decode_topology=self.decode_topology,
                           cluster=self.cluster)

    def _dict(self, name: str) -> dict[str, Any] | None:
        text = getattr(self, name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r}: is no JSON ({error}); use an object of engine options") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={text!r}: use an object of engine options")
        return value

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.engine.model)
        return path.resolve().name if path.exists() else self.engine.model


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ServeArgs and of ServeLimits; the engine's are the caller's."""
    add_flags(parser.add_argument_group("server"), ServeArgs, SERVER_HELP, {"tool_call_parser": TOOL_CALL_PARSERS})
    add_flags(parser.add_argument_group("workers", "prefill and decode in processes of their own"), ServeArgs, CLUSTER_HELP,
              {"router_policy": POLICIES, "transfer": TRANSFERS})
    add_flags(parser.add_argument_group("limits", "the most that a request may have"), ServeLimits, LIMITS_HELP)


def serve_args(namespace: argparse.Namespace, engine: EngineArgs) -> ServeArgs:
    """What the flags of `add_serve_flags` came to."""
    limits = ServeLimits(**{f.name: getattr(namespace, f.name) for f in fields(ServeLimits)})
    own = {f.name: getattr(namespace, f.name) for f in fields(ServeArgs) if f.name not in ("engine", "limits")}
    return ServeArgs(engine=engine, limits=limits, **own)
