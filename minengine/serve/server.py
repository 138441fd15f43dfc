"""`minengine serve`: a socket, an engine, and uvicorn between them; and an end that cuts nobody off."""
from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ..config import ConfigError
from ..streams import AsyncFront
from .app import create_app
from .args import ServeArgs
from .auth import ApiKeys, is_loopback
from .state import ServerState

if TYPE_CHECKING:
    from ..disagg.front import WorkerInfo

__all__ = ["ServeArgs", "longest", "run"]

IDLE_CONNECTION_S = 75  # longer than clients keep theirs in a pool, so that it is they who close
LAST_BYTES_S = 5  # for answers that have ended, and clients that read slowly, once the engine has nothing left
OPEN_FILES = 65536  # a stream is a file; many systems give 1,024 unless asked


def run(args: ServeArgs) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        ConfigError: the address is taken or is none of this machine's, or the engine or a file of `args` cannot be used.
    """
    logging.basicConfig(format="minengine: %(message)s")
    if args.api_key_file is not None:
        ApiKeys(args.api_key_file)  # read now too: what is wrong with it, or with the address, is found before a model is loaded
    with _bind(args.host, args.port) as listening:
        engine = _engine(args)
        app = create_app(engine, args)
        _allow_many_files()
        if args.api_key_file is None and not is_loopback(args.host):
            print(f"minengine: host={args.host!r} can be reached by others and no key is asked for; give --api-key-file", file=sys.stderr)
        # Warnings of uvicorn's are about what clients send that is no HTTP, or an upgrade; its errors are about this server.
        config = uvicorn.Config(app, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none", proxy_headers=False, server_header=False,
                                timeout_keep_alive=IDLE_CONNECTION_S, timeout_graceful_shutdown=LAST_BYTES_S)
        _Server(config, app.state.server).run(sockets=[listening])
    return 0


class _Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM or SIGINT first lets the engine finish: meanwhile it goes on listening, answers new requests with
    503 and says so at /health. A second signal ends the process at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.state.draining:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            self.state.engine.kill()
            signal.raise_signal(sig)
        self.state.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.state.draining and self._drain is None:
            self._drain = asyncio.create_task(self._finish())
        return await super().on_tick(counter)

    async def _finish(self) -> None:
        stats = self.state.engine.stats()
        _say(f"draining: {stats.num_running + stats.num_waiting} requests have {self.state.args.drain_timeout_s:g} s to finish; "
             "a second signal ends them at once")
        if not await self.state.engine.drain(self.state.args.drain_timeout_s):
            _say("drain_timeout_s is over: what was left has been aborted")
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        state = self.state
        host, port = sockets[0].getsockname()[:2]
        engine = state.engine.engine_args
        _say(f"{state.model_name} on http://{f'[{host}]' if ':' in host else host}:{port} "
             f"({longest(state.engine)}, {engine.max_num_seqs} requests at once, {state.args.max_num_waiting} waiting)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self.state.engine.shutdown()


def _engine(args: ServeArgs) -> AsyncFront:
    if args.cluster_args is None:
        from ..async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(args.engine, max_num_waiting=args.max_num_waiting)
    from ..disagg.front import AsyncCluster

    engine = AsyncCluster(args.engine, args.cluster_args, max_num_waiting=args.max_num_waiting)
    for worker in engine.workers:
        _say(f"worker {worker.name}: process {worker.pid}{f' on {worker.node}' if worker.node else ''}, {_threads(worker)}, {worker.num_blocks} blocks "
             f"of {worker.block_size} tokens as {worker.kv_cache_dtype} {worker.kv_cache_layout}" + (f", KV by {worker.transfer}" if worker.transfer else ""))
    return engine


def _threads(worker: WorkerInfo) -> str:
    """How many, and of how many ranks each."""
    return f"{worker.num_threads} threads" + (f" a rank of {worker.topology}" if worker.num_ranks > 1 else "")


def longest(engine: AsyncFront) -> str:
    """How long a request may be, and why not longer where the model has more positions and nobody asked for fewer."""
    length, positions, args = engine.max_model_len, engine.model_config.max_position_embeddings, engine.engine_args
    if args.max_model_len is not None or length == positions:
        return f"{length} tokens"
    flag = "--kv-cache-memory-bytes" if args.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
    return f"{length} tokens, the whole cache, of the model's {positions}: {flag} raises it"


def _say(what: str) -> None:
    print(f"minengine: {what}", flush=True)


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # of "localhost", 127.0.0.1
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={host!r}: is no address of this machine ({error}); use 127.0.0.1, 0.0.0.0 or one of its own") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(f"port={port}: cannot be listened on at {host} ({error.strerror}); use another --port, or 0 for a free one") from error
    return listening


def _allow_many_files() -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
