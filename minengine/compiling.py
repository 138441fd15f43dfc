"""Grammars are compiled one after the other, in a thread of their own that nobody waits for at the end.

Not in asyncio's pool: a few grammars that take seconds would fill it, tokenizing would wait for them, and asyncio.run() ends only when
the last thread of that pool has.
"""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

__all__ = ["Compiling"]


class Compiling:
    """
    Args:
        compile: called in the thread, with one argument; what it returns or raises is the outcome of `run`.
    """

    def __init__(self, compile: Callable[[Any], Any]) -> None:
        self._compile = compile
        self._jobs: SimpleQueue[tuple[Any, asyncio.Future[Any]]] = SimpleQueue()
        self._open: set[asyncio.Future[Any]] = set()
        self._closed: Exception | None = None
        self._thread: Thread | None = None  # started by the first job

    async def run(self, params: Any) -> Any:
        """Wait for one's turn and the outcome. Cancelled before its turn, a job is dropped; after, it ends and nobody hears of it."""
        if self._closed is not None:
            raise self._closed
        outcome = asyncio.get_running_loop().create_future()
        self._jobs.put((params, outcome))
        if self._thread is None:
            self._thread = Thread(target=self._work, name="compiling", daemon=True)
            self._thread.start()
        self._open.add(outcome)
        try:
            return await outcome
        finally:
            self._open.discard(outcome)

    def close(self, error: Exception) -> None:
        """Give up: `error` is the outcome of all jobs from now on, also of those that are there. Call on the loop's thread."""
        self._closed = error
        for outcome in self._open:
            if not outcome.done():
                outcome.set_exception(error)

    def _work(self) -> None:
        while True:
            params, outcome = self._jobs.get()
            if outcome.done():
                continue
            try:
                result = self._compile(params)
            except BaseException as error:  # whatever it is, the next job has its turn
                self._tell(outcome, outcome.set_exception, error)
            else:
                self._tell(outcome, outcome.set_result, result)

    @staticmethod
    def _tell(outcome: asyncio.Future[Any], set_outcome: Callable[[Any], None], value: Any) -> None:
        try:
            outcome.get_loop().call_soon_threadsafe(lambda: None if outcome.done() else set_outcome(value))
        except RuntimeError:  # the loop was closed and took its coroutines with it
            pass
