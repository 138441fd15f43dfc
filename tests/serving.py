"""A whole server for tests: the real app under uvicorn, in a thread of this process, on a free loopback port."""
import asyncio
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Iterator

import httpx
import torch
import uvicorn

from minengine.async_llm import AsyncLLM
from minengine.config import model_config
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.model.decoder import Decoder
from minengine.serve.app import create_app
from minengine.serve.args import ServeArgs
from minengine.tokenizer import load_tokenizer
from tiny_models import LLAMA, RandomWeights

ENGINE = dict(max_model_len=2048, block_size=16, max_num_seqs=32, max_num_batched_tokens=512, num_gpu_blocks_override=512, num_threads=1)


@dataclass
class Server:
    """
    Attributes:
        base_url: "http://127.0.0.1:PORT", without /v1.
        engine: the `AsyncLLM` that it serves; `engine.stats()` may be read from any thread.
    """

    base_url: str
    engine: AsyncLLM

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=120, **options)

    def post(self, path: str, body: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body)

    def wait_until(self, true: Callable[[Any], bool], timeout_s: float = 60) -> None:
        """Ask the server for its health, again and again, until its statistics are as wanted."""
        with self.http() as client:
            for _ in range(int(timeout_s * 1000)):
                if true(self.engine.stats()):
                    return
                client.get("/health")  # about a millisecond in which the server's loop turns
        raise AssertionError(f"not so after {timeout_s} s of asking: {self.engine.stats()}")

@lru_cache
def loaded(model: str) -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once for all servers of a test run."""
    engine = LLMEngine(EngineArgs(model=model, **{**ENGINE, "num_gpu_blocks_override": 1, "max_model_len": 16}))
    return engine.model, engine.tokenizer


@lru_cache
def random_model(layers: int = 1, max_model_len: int = 4096) -> dict[str, Any]:
    """Options of `server`: a tiny model with random weights behind smollm2's real vocabulary and chat template. It writes what no sensible
    model would, and most of the time is the server's."""
    config = model_config({**LLAMA, "vocab_size": 49152, "num_hidden_layers": layers, "max_position_embeddings": max_model_len, "eos_token_id": [2, 0]})
    return {"weights": Decoder(config, RandomWeights(config, torch.float32, "cpu")), "tokenizer": load_tokenizer("smollm2"), "max_model_len": max_model_len}


@contextmanager
def server(model: str = "smollm2", *, serve: dict[str, Any] | None = None, max_num_waiting: int = 1024, tokenizer: Any = None,
           weights: Any = None, **engine_options: Any) -> Iterator[Server]:
    """Serve `model` until the block ends. `serve` holds fields of `ServeArgs`, `engine_options` of `EngineArgs`;
    `weights` and `tokenizer` stand in for the model's own."""
    args = EngineArgs(model=model, **{**ENGINE, **engine_options})
    weights, own_tokenizer = (weights, None) if weights is not None else loaded(model)
    engine = AsyncLLM(LLMEngine(args, model=weights, tokenizer=tokenizer or own_tokenizer), max_num_waiting=max_num_waiting)
    app = create_app(engine, ServeArgs(engine=args, max_num_waiting=max_num_waiting, **(serve or {})))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it listens before the server runs, so nobody has to wait for it
        running = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning", timeout_graceful_shutdown=5))

        def serve_until_told() -> None:
            running.run(sockets=[listening])
            asyncio.run(engine.shutdown())  # here, for the test's own thread may be running a loop: a browser's driver does

        thread = threading.Thread(target=serve_until_told, name="uvicorn")
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", engine)
        finally:
            running.should_exit = True
            thread.join()
