"""A thread that looks after what is under way: often, seldom, or at once when somebody wakes it."""
from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, Callable

from ..config import ConfigError
from .agents import TransferError

__all__ = ["IOThread", "guarded"]

log = logging.getLogger(__name__)


def guarded(what: Callable[[], Any]) -> None:
    """An error in one thing must not end the thread that all others need."""
    try:
        what()
    except (TransferError, ConfigError) as error:
        log.warning("%s", error)
    except Exception:
        log.exception("the KV I/O thread goes on after an error that it does not know")


class IOThread:
    """
    Args:
        turn: one look at everything; called with no lock held.
        pause_s: seconds until the next look; called with `cond` held.

    Attributes:
        cond: guards what the thread shares with others; never held while `turn` calls out.
    """

    def __init__(self, turn: Callable[[], None], pause_s: Callable[[], float]) -> None:
        self.cond = threading.Condition()
        self._turn, self._pause_s = turn, pause_s
        self.todo: deque[Callable[[], Any]] = deque()
        self._woken = self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-io", daemon=True)
        self._thread.start()

    def do(self, what: Callable[[], Any]) -> None:
        """Have the thread do this before its next look."""
        with self.cond:
            self.todo.append(what)
            self.wake()

    def wake(self) -> None:
        """With `cond`: the next look is now."""
        self._woken = True
        self.cond.notify_all()

    def close(self, timeout_s: float) -> None:
        with self.cond:
            self._closing = True
            self.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self.cond:
                if not self._woken:
                    self.cond.wait(self._pause_s())
                self._woken = False
                if self._closing:
                    return
            while self.todo:
                guarded(self.todo.popleft())
            guarded(self._turn)
