"""`minengine serve` in a process of its own, on a free loopback port, for as long as a run lasts."""
from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Iterator, Sequence

from .client import Client, NoAnswer

__all__ = ["own_server"]

START_S = 180.0
STOP_S = 20.0


@contextlib.contextmanager
def own_server(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start the server, wait until it lists its model, give its base URL, and end it.

    Raises:
        NoAnswer: it ended before it answered, or did not answer in time; its last words are in the message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "minengine.cli", "serve", "--model", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, url: str, log) -> None:
    client, deadline = Client(url, timeout_s=5.0), time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoAnswer(f"the server ended with code {process.returncode} before it answered: {_last_words(log)}")
        try:
            client.models()
            return
        except NoAnswer:
            time.sleep(0.2)
    raise NoAnswer(f"the server did not answer within {START_S:g} s: {_last_words(log)}")


def _last_words(log) -> str:
    log.seek(0)
    return log.read().decode("utf-8", "replace").strip()[-500:] or "it said nothing"
