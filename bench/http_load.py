"""Load for a server in another process: requests over plain sockets, so that the client costs little and counts in nobody's figures."""
from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any, Iterator

import psutil

from .harness import ROOT

__all__ = ["Server", "serve", "stream_all"]

READY_S = 60


class Server:
    """A `minengine serve` process, as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

    @property
    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    @property
    def rss_bytes(self) -> int:
        return self._process.memory_info().rss


@contextmanager
def serve(model: str, *flags: str) -> Iterator[Server]:
    """Serve `model` on a free loopback port until the block ends."""
    command = [sys.executable, "-m", "minengine.cli", "serve", "--model", model, "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()  # it prints its address when it is ready, and ends if it cannot be
        if "http://" not in line:
            raise RuntimeError(f"{' '.join(command)} did not start; it printed {line!r}")
        yield Server(process, int(line.split("http://")[1].split()[0].rpartition(":")[2]))
    finally:
        process.terminate()
        process.wait(READY_S)


def _request(method: str, path: str, body: Any = None) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


async def open_stream(port: int, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and leave its answer to be read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("POST", path, body))
    await writer.drain()
    return reader, writer


async def get(port: int, path: str) -> bytes:
    """The body of a small answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("GET", path))
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    writer.close()
    return body


async def _stream(port: int, path: str, body: Any) -> tuple[int, int]:
    """Tokens of one streamed answer, and the events they came in; raises unless it ended well."""
    reader, writer = await open_stream(port, path, body)
    text = bytearray()
    while b"data: [DONE]" not in text[-80:]:
        chunk = await reader.read(65536)
        if not chunk:
            raise RuntimeError(f"the answer broke off after {len(text)} bytes: {bytes(text[-300:])!r}")
        text += chunk
    writer.close()
    usage = next(json.loads(line[6:])["usage"] for line in reversed(bytes(text).split(b"\n")) if line.startswith(b"data: {") and b'"usage"' in line)
    return usage["completion_tokens"], text.count(b"data: {")


def stream_all(server: Server, path: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve all requests at once; the server's CPU seconds, the elapsed ones and the tokens."""
    async def together() -> list[tuple[int, int]]:
        return await asyncio.gather(*(_stream(server.port, path, body) for body in bodies))

    cpu_s, start = server.cpu_s, time.perf_counter()
    counts = asyncio.run(together())
    elapsed_s, cpu_s = time.perf_counter() - start, server.cpu_s - cpu_s
    return {"tokens": sum(tokens for tokens, _ in counts), "events": sum(events for _, events in counts), "elapsed_s": elapsed_s, "cpu_s": cpu_s}
