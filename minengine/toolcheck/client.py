"""A small HTTP client for OpenAI-compatible servers, from the standard library: one connection a request, answers read to the end.

It sends what a case says, byte for byte, which a helpful client would not.
"""
from __future__ import annotations

import http.client
import json
import ssl
import time
from typing import Any, Iterator, Mapping
from urllib.parse import SplitResult, urlsplit

from .wire import Answer, from_stream, from_whole, refused

__all__ = ["Client", "NoAnswer", "Refused"]

BUSY_TRIES = 5  # a server that says 429 is asked again, so many times in all
BUSY_WAIT_S = 10.0  # at most, whatever Retry-After says


class NoAnswer(Exception):
    """The server did not answer: no connection, a broken one, or none of it within the time. The message is one sentence."""


class Refused(Exception):
    """The server answered, but not with what was asked for. The message is one sentence."""

    def __init__(self, status: int, text: str) -> None:
        try:
            found = json.loads(text)
            text = found.get("error", found)["message"]  # OpenAI's shape, or vLLM's older one
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        super().__init__(f"the server answers {status}: {str(text)[:300]}")
        self.status = status


class Client:
    """Speaks to `base_url`, with or without its `/v1`; safe to share between threads.

    Args:
        timeout_s: for one answer, from the request to its end.

    Raises:
        ValueError: base_url is no http(s) address, or timeout_s is not above 0.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 120.0):
        parts = urlsplit(base_url if "://" in base_url else "http://" + base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _port_holds(parts):
            raise ValueError(f"base_url={base_url}: is no address; use one like http://127.0.0.1:8000/v1")
        if not timeout_s > 0:
            raise ValueError(f"timeout={timeout_s}: use a number of seconds above 0")
        self.base_url, self.timeout_s = base_url, timeout_s
        self._parts, self._path = parts, parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}

    def models(self) -> list[str]:
        """The names that the server lists.

        Raises:
            NoAnswer: it does not answer, refuses, or lists none.
        """
        status, text = self._whole("GET", "/models", None)
        try:
            names = [model["id"] for model in json.loads(text)["data"]] if status == 200 else []
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(f"base_url={self.base_url}: {self._path}/models is no list of models: {text[:100]!r}") from error
        if status in (401, 403):
            raise NoAnswer(f"base_url={self.base_url}: refuses with {status}; give a key with --api-key-file")
        if not names:
            raise NoAnswer(f"base_url={self.base_url}: {self._path}/models answers {status} and lists no model; give an OpenAI-compatible base URL")
        return names

    def chat(self, body: Any) -> Answer:
        """The answer to one request for a chat completion; a str is sent as it is.

        Raises:
            NoAnswer: see the class.
        """
        data = (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).encode()
        deadline = time.monotonic() + self.timeout_s
        for _ in range(BUSY_TRIES):
            with self._open("POST", "/chat/completions", data, deadline) as (response, connection):
                if response.status == 429:
                    wait = response.getheader("Retry-After") or "1"
                    response.read()
                elif response.status != 200:
                    return refused(response.status, response.read().decode("utf-8", "replace"))
                elif "text/event-stream" in (response.getheader("Content-Type") or ""):
                    return from_stream(_events(response, connection, deadline))
                else:
                    return from_whole(response.read().decode("utf-8", "replace"))
            time.sleep(min(float(wait) if wait.isdigit() else 1.0, BUSY_WAIT_S))
        raise NoAnswer(f"the server is busy: {BUSY_TRIES} answers of 429; use a smaller --concurrency")

    def events(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Iterator[str]:
        """The data of each event of one streamed answer, as it comes; `[DONE]` is not among them. Closing the iterator closes the connection.

        Raises:
            Refused: the server answers with something else than 200, or with no stream.
            NoAnswer: see the class.
        """
        data = json.dumps(body, ensure_ascii=False).encode()
        deadline = time.monotonic() + self.timeout_s
        with self._open("POST", path, data, deadline, headers) as (response, connection):
            if response.status != 200 or "text/event-stream" not in (response.getheader("Content-Type") or ""):
                raise Refused(response.status, response.read().decode("utf-8", "replace"))
            for event in _events(response, connection, deadline):
                if event == "[DONE]":
                    return
                yield event

    def _whole(self, method: str, path: str, data: bytes | None) -> tuple[int, str]:
        with self._open(method, path, data, time.monotonic() + self.timeout_s) as (response, _):
            return response.status, response.read().decode("utf-8", "replace")

    def _open(self, method: str, path: str, data: bytes | None, deadline: float, headers: Mapping[str, str] | None = None) -> _Exchange:
        return _Exchange(self, method, path, data, deadline, headers or {})


class _Exchange:
    """One request and its open response; closes the connection, and turns what the network raises into NoAnswer."""

    def __init__(self, client: Client, method: str, path: str, data: bytes | None, deadline: float, headers: Mapping[str, str]):
        self.client, self.request, self.deadline = client, (method, client._path + path, data, {**client._headers, **headers}), deadline

    def __enter__(self) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        parts = self.client._parts
        left = max(self.deadline - time.monotonic(), 0.001)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        more = {"context": ssl.create_default_context()} if parts.scheme == "https" else {}
        self.connection = kind(parts.hostname, parts.port, timeout=left, **more)
        try:
            self.connection.request(*self.request)
            return self.connection.getresponse(), self.connection
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.connection.close()
        if isinstance(error, TimeoutError):
            raise NoAnswer(f"no whole answer within {self.client.timeout_s:g} s; use a larger --timeout or a smaller --concurrency") from error
        if isinstance(error, (OSError, http.client.HTTPException)):
            what = f"{type(error).__name__}: {error}"
            raise NoAnswer(f"base_url={self.client.base_url}: the connection failed ({what}); see that the server runs") from error


def _port_holds(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:  # no number, or more than 65535
        return False


def _events(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> Iterator[str]:
    """The data of each server-sent event."""
    data: list[str] = []
    for raw in response:
        if time.monotonic() > deadline:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)
