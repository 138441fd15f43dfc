"""A worker: an engine in a process of its own, told what to do over a socket pair.

    python -m minengine.disagg.worker FD PARENT_PID        started by supervise.py, by nobody else

    reading thread    messages into the inbox; answers pings itself, so that a long step is no silence; the front's end is the worker's
    main thread       between two steps takes the inbox; steps while there is work, sleeps while there is none; one Report a step
    compiling thread  grammars, for requests that wait for theirs (started by the first)
"""
from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import ConfigError
from ..kv.events import EventLog
from ..request import OutputKind, RequestError, RequestOutput
from .messages import (Abort, AddRequest, Connect, Delta, Disconnect, Failed, Ping, Pong, Ready, Refused, Release, Report, SnapshotPlease, SnapshotTaken,
                       Start, StartFailed, Stop, WorkerStats)

if TYPE_CHECKING:
    from ..engine import LLMEngine

__all__ = ["WorkerLoop", "main"]

IDLE_S = 0.001  # between two looks at what nobody wakes this loop for: a finished load under load_admission="poll", a pool that others fill
PR_SET_PDEATHSIG = 1


class WorkerLoop:
    """What a worker does with its messages. `send` puts one on the wire; any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, Lock()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.engine: LLMEngine | None = None
        self.events = EventLog()
        self.stopping = False
        self._told: WorkerStats | None = None
        self._compiling: dict[str, AddRequest] = {}  # requests that wait for their grammar
        self._grammars: SimpleQueue[AddRequest] | None = None

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def read(self) -> None:
        """The reading thread."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Ping):
                    self.send(Pong(message.number))
                else:
                    self.inbox.put(message)
        except (EOFError, OSError):
            os._exit(0)  # the front has ended, and whatever is under way here is for nobody

    def wake(self) -> None:
        """Let the main thread look again; for any thread."""
        self.inbox.put(None)

    # --- the main thread ----------------------------------------------------------------------------------------

    def start(self, start: Start) -> Ready:
        """
        Raises:
            ConfigError: the engine cannot run as asked.
        """
        from ..engine import LLMEngine
        from ..kv.fingerprint import model_fingerprint

        import torch

        self.engine = engine = LLMEngine(start.args)
        engine.pool.events = self.events
        return Ready(pid=os.getpid(), config=engine.config, fingerprint=model_fingerprint(engine.model), max_model_len=engine.max_model_len,
                     num_threads=torch.get_num_threads(), num_blocks=engine.pool.num_blocks, layout=engine.kv.kv_layout,
                     kv_cache_dtype=engine.kv.kv_cache_dtype)

    def run(self) -> None:
        """Until Stop."""
        scheduler = self.engine.scheduler
        while True:
            busy = bool(scheduler.running or scheduler.waiting)
            self._take(0.0 if busy else None)
            if self.stopping:
                return
            outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
            self._report(outputs)
            if not outputs and not scheduler.running:  # what waits cannot be admitted yet
                self._take(IDLE_S)

    def _take(self, timeout_s: float | None) -> None:
        """Handle what is in the inbox; wait for the first message so long (None: until there is one)."""
        try:
            self._handle(self.inbox.get(timeout=timeout_s) if timeout_s != 0.0 else self.inbox.get_nowait())
            while not self.stopping:
                self._handle(self.inbox.get_nowait())
        except Empty:
            pass

    def _handle(self, message: Any) -> None:
        match message:
            case None | Connect() | Disconnect():
                pass
            case AddRequest():
                self._add(message)
            case Abort(key):
                self._compiling.pop(key, None)
                self.engine.abort_request(key)
            case _Compiled():
                if self._compiling.pop(message.message.key, None) is not None:
                    self._add(message.message, compiled=True)
            case Release(key):
                pass
            case SnapshotPlease():
                self.send(SnapshotTaken(self.events.snapshot()))
            case Stop():
                self.stopping = True

    def _add(self, message: AddRequest, *, compiled: bool = False) -> None:
        if message.params.structured_outputs is not None and not compiled:
            self._compile(message)
            return
        more = {name: value for name in ("resume", "hold", "source") if (value := getattr(message, name))}
        try:
            request = self.engine.add_request(message.key, message.prompt, message.params, cache_salt=message.cache_salt,
                                              output_kind=OutputKind.DELTA, arrival_s=message.timeline.arrival_s, **more)
        except RequestError as error:
            self.send(Refused(message.key, str(error)))
            return
        request.timeline.routed_s = message.timeline.routed_s

    def _compile(self, message: AddRequest) -> None:
        """Add the request once its grammar is there. The front has seen it compile, so it takes a bounded time; steps go on meanwhile."""
        if self._grammars is None:
            self._grammars = SimpleQueue()
            Thread(target=self._compile_all, name="compiling", daemon=True).start()
        self._compiling[message.key] = message
        self._grammars.put(message)

    def _compile_all(self) -> None:
        while True:
            message = self._grammars.get()
            if message.key in self._compiling:
                try:
                    self.inbox.put(_Compiled(message, self.engine.grammars.compile(message.params.structured_outputs)))
                except RequestError as error:
                    self._compiling.pop(message.key, None)
                    self.send(Refused(message.key, str(error)))

    # --- what is told -------------------------------------------------------------------------------------------

    def _report(self, outputs: list[RequestOutput]) -> None:
        stats, events = self._stats(), self.events.take()
        if outputs or events or stats != self._told:
            self._told = stats
            self.send(Report([_delta(output) for output in outputs], [], events, stats))

    def _stats(self) -> WorkerStats:
        scheduler, pool, times = self.engine.scheduler, self.engine.pool, self.engine.times
        return WorkerStats(len(scheduler.running), len(scheduler.waiting), pool.num_free_blocks, times.steps, times.jump_forward_tokens)


class _Compiled(NamedTuple):
    """A request whose grammar is there, and stays there for as long as somebody has it."""

    message: AddRequest
    grammar: Any


def _delta(output: RequestOutput) -> Delta:
    completion, times = output.outputs[0], output.metrics
    n = len(completion.token_ids)
    whole = output.finished or len(times.token_s) == n
    return Delta(output.request_id, completion.text, completion.token_ids, times.token_s[len(times.token_s) - n:], output.num_cached_tokens,
                 completion.finish_reason, completion.stop_reason, completion.logprobs, times if whole else None, output.error)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent: an end of the pipe is noticed only when Python gets to run."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        os._exit(0)


def main(fd: int, parent: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with(parent)
    connection = Connection(fd)
    loop = WorkerLoop(connection)
    start: Start = connection.recv()
    Thread(target=loop.read, name="reads", daemon=True).start()
    try:
        loop.send(loop.start(start))
    except ConfigError as error:
        loop.send(StartFailed(str(error)))
        return 2
    except (MemoryError, RuntimeError, OSError) as error:
        loop.send(StartFailed(f"the engine could not be started ({type(error).__name__}: {error})"))
        return 2
    try:
        loop.run()
    except BaseException as error:  # the front says what it was, and starts another
        loop.send(Failed(f"stopped with {type(error).__name__}: {error}"))
        raise
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # at once: nothing here is to be saved, and no thread is waited for
