"""A worker: an engine in a process of its own, told what to do over a socket pair.

    python -m minengine.disagg.worker FD PARENT_PID        started by supervise.py, by nobody else

    reading thread    messages into the inbox; answers pings itself, so that a long step is no silence; the front's end is the worker's.
                      With load_admission="event" it acts on what concerns requests and peers itself, also while a step is computed
    main thread       between two steps takes the inbox; steps while there is work, sleeps while there is none; one Report a step
    compiling thread  grammars, for requests that wait for theirs (started by the first)
"""
from __future__ import annotations

import ctypes
import logging
import os
import pickle
import secrets
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import ConfigError
from ..kv.events import EventLog
from ..request import OutputKind, RequestError, RequestOutput
from .messages import (Abort, AddRequest, Connect, Delta, Disconnect, Failed, HeldRequest, Ping, Pong, Ready, Refused, Release, Renew, Report, Reserved, Resumed,
                       SnapshotPlease, SnapshotTaken, Start, StartFailed, Stop, WorkerStats)

if TYPE_CHECKING:
    from ..engine import LLMEngine
    from .agents import Agent
    from .connector import WorkerConnector

__all__ = ["WorkerLoop", "main"]

PR_SET_PDEATHSIG = 1
AT_ONCE = (AddRequest, Abort, Resumed, Release, Renew, Connect, Disconnect)  # all that must keep their order among each other


class WorkerLoop:
    """What a worker does with its messages. `send` puts one on the wire; any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, Lock()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.engine: LLMEngine | None = None
        self.events = EventLog()
        self.stopping = False
        self._at_once = False  # messages of these kinds do not wait for the end of a step
        self._acting = RLock()  # for whoever acts on a message or reports: what a step has done is told before it is changed
        self.connector: WorkerConnector | None = None
        self._agent: Agent | None = None
        self._told: WorkerStats | None = None
        self._compiling: dict[str, AddRequest] = {}  # requests that wait for their grammar
        self._grammars: SimpleQueue[AddRequest] | None = None
        self._names: dict[str, str] = {}  # the front's keys of requests that have changed theirs, by the engine's
        self._keys: dict[str, str] = {}  # and back

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def read(self) -> None:
        """The reading thread."""
        while True:
            try:
                message = self._connection.recv()
                if isinstance(message, Ping):
                    self.send(Pong(message.number))
                    continue
            except (EOFError, OSError):
                os._exit(0)  # the front has ended, and whatever is under way here is for nobody
            if not self._at_once or not isinstance(message, AT_ONCE):
                self.inbox.put(message)
                continue
            try:
                self._handle(message)
            except BaseException as error:
                self.inbox.put(error)  # the main thread ends with it
                raise
            self.wake()

    def wake(self) -> None:
        """Let the main thread look again; for any thread."""
        self.inbox.put(None)

    # --- the main thread ----------------------------------------------------------------------------------------

    def start(self, start: Start) -> Ready:
        """
        Raises:
            ConfigError: the engine cannot run as asked.
        """
        import torch

        from ..kv.fingerprint import model_fingerprint
        from ..machine import device_named
        from ..parallel.opening import open_engine
        from .opening import open_connector, open_group_connector, weights_fingerprint

        args, storage, before = start.args, None, None
        several = args.ranks.gpus > 1
        if start.transfer is not None:
            from .transfer import open_agent

            # Two starts of a worker are two agents: what peers know of the one is not true of the other.
            self._agent = open_agent(f"{start.name}-{os.getpid()}-{secrets.token_hex(4)}", start.transfer)
            storage = partial(self._agent.allocate, device=str(device_named(args.device)))
            if several:
                from .rank_io import open_rank_agent

                before = open_rank_agent, start.name, self._agent.kind
        self.engine = engine = open_engine(args, before=before, storage=storage)
        if args.ranks.data == 1:  # what other ranks have of their own is not told
            engine.pool.events = self.events
        engine.on_lost(lambda: self.inbox.put(_RankLost()))
        fingerprint = model_fingerprint(engine.model) if start.alone else weights_fingerprint(engine)
        if several and self._agent is not None:
            self.connector = open_group_connector(engine, self._agent, wake=self.wake, fingerprint=fingerprint)
        else:
            self.connector = open_connector(engine, self._agent, wake=self.wake, fingerprint=fingerprint,
                                            on_reserved=lambda key, target: self.send(Reserved(key, target)))
        self._at_once = args.load_admission == "event"
        return Ready(pid=os.getpid(), config=engine.config, fingerprint=fingerprint, max_model_len=engine.max_model_len,
                     num_threads=torch.get_num_threads(), num_blocks=engine.pool.num_blocks, layout=engine.kv.kv_layout,
                     kv_cache_dtype=engine.kv.kv_cache_dtype, pools=self.connector.pools if self._agent is not None else (),
                     about_transfer=self._agent.describe() if self._agent is not None else "")

    def run(self) -> None:
        """Until Stop."""
        engine, connector = self.engine, self.connector
        while True:
            self._take(wait=engine.idle)
            if self.stopping:
                break
            if connector is not None:
                connector.poll()
            self._report([] if engine.idle else engine.step())
        if connector is not None:
            connector.close()
        if self._agent is not None:
            self._agent.close()
            if engine.args.ranks.gpus > 1:
                from .rank_io import close_rank

                engine.group.call(close_rank)
        engine.close()

    def _take(self, *, wait: bool) -> None:
        try:
            while not self.stopping:
                self._handle(self.inbox.get(block=wait))
                wait = False
        except Empty:
            pass

    def _handle(self, message: Any) -> None:
        with self._acting:
            self._act_on(message)

    def _act_on(self, message: Any) -> None:
        match message:
            case None:
                pass
            case BaseException():
                raise message
            case _RankLost():
                self.engine.check()
            case AddRequest():
                self._add(message)
            case Abort(key):
                self._abort(key)
            case _Compiled():
                if self._compiling.pop(message.message.key, None) is not None:
                    self._add(message.message, compiled=True)
            case Resumed():
                self._resume(message.key, message.request)
            case Release(key):
                if self.connector is not None:
                    self.connector.release(key)
                self.engine.release_request(key)
            case Renew(key):
                self.connector.renew(key)
            case Connect(facts):
                if self.connector is not None:
                    self.connector.connect(facts)
            case Disconnect(agent):
                if self.connector is not None:
                    self.connector.peer_gone(agent)
            case SnapshotPlease():
                self.send(SnapshotTaken(self.events.snapshot()))
            case Stop():
                self.stopping = True

    def _add(self, message: AddRequest, *, compiled: bool = False) -> None:
        if message.params.structured_outputs is not None and not compiled:
            self._compile(message)
            return
        if message.target is not None:
            self.connector.push_to(message.key, message.target)  # if its decoder has called that off already, it is told where the rows are, later
        try:
            request = self.engine.add_request(message.key, message.prompt, message.params, cache_salt=message.cache_salt, output_kind=OutputKind.DELTA,
                                              arrival_s=message.timeline.arrival_s, resume=message.resume, hold=message.hold, source=message.source)
        except RequestError as error:
            if message.target is not None:
                self.connector.release(message.key)
            self.send(Refused(message.key, str(error)))
            return
        request.timeline.routed_s = message.timeline.routed_s

    def _resume(self, key: str, message: AddRequest) -> None:
        """Go on under another key with a request whose rows are written here, or with a new one if they are not waited for any more."""
        if key in self.engine.requests and self.connector.resume(key, message.resume):
            self._names[key], self._keys[message.key] = message.key, key
        else:
            self._abort(key)
            self._add(message)

    def _abort(self, key: str) -> None:
        key = self._keys.get(key, key)
        self._compiling.pop(key, None)
        if self.connector is not None:
            self.connector.release(key)
        self.engine.abort_request(key)

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
        with self._acting:
            self._tell(outputs)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        held = [self._held(output.request_id) for output in outputs if self.engine.held(output.request_id) is not None]
        if self.engine.args.ranks.data > 1:
            held += [HeldRequest(*one) for one in self.engine.take_held()]
        stats, events = self._stats(), self.events.take()
        if outputs or events or stats != self._told:
            self._told = stats
            self.send(Report([_delta(output, self._names.get(output.request_id, output.request_id)) for output in outputs], held, events, stats))
        for output in outputs:
            if output.finished and (name := self._names.pop(output.request_id, None)) is not None:
                del self._keys[name]

    def _held(self, key: str) -> HeldRequest:
        from .leases import OutOfLeases

        try:
            return HeldRequest(key, self.connector.hold(key))
        except OutOfLeases:  # its decoder computes it
            self.engine.release_request(key)
            return HeldRequest(key, None)

    def _stats(self) -> WorkerStats:
        engine, connector, times = self.engine, self.connector, self.engine.times
        waiting = engine.num_waiting + len(engine.scheduler.loading) + len(engine.scheduler.ready)
        free = engine.num_free_blocks if connector is None else connector.num_free_blocks
        return WorkerStats(engine.num_running, waiting, free, times.steps, times.jump_forward_tokens, {} if connector is None else connector.counts())


class _RankLost(NamedTuple):
    """A rank of this worker's engine has ended."""


class _Compiled(NamedTuple):
    """A request whose grammar is there, and stays there for as long as somebody has it."""

    message: AddRequest
    grammar: Any


def _delta(output: RequestOutput, key: str) -> Delta:
    completion, times = output.outputs[0], output.metrics
    n = len(completion.token_ids)
    whole = output.finished or len(times.token_s) == n
    return Delta(key, completion.text, completion.token_ids, times.token_s[len(times.token_s) - n:], output.num_cached_tokens,
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
    logging.basicConfig(format=f"minengine {start.name}: %(message)s")
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
