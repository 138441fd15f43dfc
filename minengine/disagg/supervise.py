"""Worker processes: started, listened to, watched, started again.

    starting ── Ready ──▶ up ── silent for worker_timeout_s ──▶ sick ── heard again ──▶ up
        ▲                  │                                      │ silent for SICK_S more: killed
        └── after a pause ─┴─── its process ended ◀───────────────┘
    gone: it has ended MAX_STARTS times in a row before it was up

Where a worker's process runs and how it is reached is a launcher's part (launch.py); all else is the same on this machine and on others.

Everything that is told to the listener is told under `lock`, one thing at a time.
"""
from __future__ import annotations

import logging
import signal
import time
from threading import Condition, Event, RLock, Thread
from typing import Any, Callable, Protocol, Sequence

from ..config import ConfigError
from .launch import STOP_S, Launcher, LocalLauncher, WorkerProcess
from .messages import Failed, Ping, Pong, Ready, Start, StartFailed, Stop

__all__ = ["Listener", "Supervisor", "Worker"]

log = logging.getLogger("minengine.cluster")

SICK_S = 60.0  # a stopped process may be in somebody's debugger, for so long
MAX_STARTS = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
STABLE_S = 60.0  # up for so long, a worker's earlier ends are forgotten


class Listener(Protocol):
    """Who is told; all calls come under the supervisor's lock."""

    def worker_up(self, worker: Worker) -> None: ...
    def worker_down(self, worker: Worker, why: str) -> None: ...
    def worker_sick(self, worker: Worker) -> None: ...
    def worker_well(self, worker: Worker) -> None: ...
    def worker_said(self, worker: Worker, message: Any) -> None: ...
    def looked_after(self) -> None: ...  # now and then


class Worker:
    """A place for one process after the other.

    Attributes:
        state: "starting", "up", "sick", "stopped" (between two processes) or "gone".
        ready: what its last process said of itself.
        restarts: processes started after the first.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.name, self.role = start.name, start.role
        self.state = "stopped"
        self.process: WorkerProcess | None = None
        self.ready: Ready | None = None
        self.restarts = -1
        self.last_words: str | None = None
        self.failures = 0  # ends in a row
        self.since_s = self.start_at_s = 0.0
        self.ping = 0  # number of the last one
        self.ping_s: float | None = None  # when it was sent, while nothing has been heard since

    def send(self, message: Any) -> None:
        """Nothing, if there is no process."""
        if self.process is not None:
            self.process.send(message)


class Supervisor:
    """
    Args:
        launcher: starts the processes, and is closed when they have been stopped; processes of this machine by default.
        worker_timeout_s: silence after which a worker counts as sick.
        start_timeout_s: a process that is not ready by then is killed.
    """

    def __init__(self, starts: Sequence[Start], listener: Listener, *, lock: RLock, launcher: Launcher | None = None, worker_timeout_s: float = 5.0,
                 start_timeout_s: float = 600.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.workers = {start.name: Worker(start) for start in starts}
        self.lock = lock
        self.worker_timeout_s, self.start_timeout_s = worker_timeout_s, start_timeout_s
        self._listener, self._clock = listener, clock
        self._launcher = launcher or LocalLauncher()
        self._interval_s = min(1.0, worker_timeout_s / 4)
        self._wake = Event()
        self._changed = Condition(lock)
        self._starting = True  # the first time: then a failure is the caller's, and nothing is tried again
        self._error: str | None = None
        self._stopping = False
        # Processes are made by this thread, which is there as long as they are: on Linux they end with the THREAD that made them.
        self._thread = Thread(target=self._run, name="supervisor", daemon=True)

    def begin(self) -> None:
        """Start the processes; `wait` for them."""
        self._thread.start()

    def wait(self) -> None:
        """Return when all workers are up.

        Raises:
            ConfigError: one failed; none is left then.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or all(worker.state == "up" for worker in self.workers.values()))
                self._starting = False
            if self._error is not None:
                raise ConfigError(self._error)
        except BaseException:  # Ctrl-C as well
            self.stop(at_once=True)
            raise

    def stop(self, *, at_once: bool = False) -> None:
        """End all processes, after their present step unless `at_once`, and return when they have ended. Twice is harmless."""
        with self.lock:
            self._stopping = True
            processes = [worker.process for worker in self.workers.values() if worker.process is not None]
        for process in processes:
            process.kill() if at_once else process.send(Stop())
        self._wake.set()
        until_s = self._clock() + STOP_S
        for process in processes:
            if not process.wait(max(0.0, until_s - self._clock())):
                process.kill()
                process.wait()
        if self._thread.ident is not None:
            self._thread.join()
        with self.lock:
            for worker in self.workers.values():
                worker.state, worker.process = "stopped", None
        self._launcher.close()

    # --- the supervisor's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        last_s = self._clock()
        while True:
            with self.lock:
                if self._stopping:
                    break
                now_s = self._clock()
                overslept = now_s - last_s > 3 * self._interval_s  # this process was stopped itself: nobody's silence counts
                last_s = now_s
                for worker in self.workers.values():
                    self._look_after(worker, now_s, overslept)
                self._listener.looked_after()
                pauses = [worker.start_at_s - now_s for worker in self.workers.values() if worker.state == "stopped"]
            self._wake.wait(max(0.0, min([self._interval_s, *pauses])))
            self._wake.clear()
        for worker in self.workers.values():  # what they made must not outlive them because this thread was quicker
            if worker.process is not None:
                worker.process.wait()

    def _look_after(self, worker: Worker, now_s: float, overslept: bool) -> None:
        if worker.state == "stopped" and now_s >= worker.start_at_s:
            self._spawn(worker, now_s)
        elif worker.state == "starting" and now_s - worker.since_s > self.start_timeout_s:
            worker.last_words = f"was not ready after {self.start_timeout_s:g} s"
            worker.process.kill()
        elif worker.state == "up" and worker.ping_s is None:
            self._ping(worker, now_s)
        elif worker.state == "up" and overslept:
            worker.ping_s = now_s
        elif worker.state == "up" and now_s - worker.ping_s > self.worker_timeout_s:
            worker.state, worker.since_s = "sick", now_s
            log.warning("worker %s (%s) has not answered for %.1f s: its requests go on elsewhere", worker.name, worker.process.about, self.worker_timeout_s)
            self._listener.worker_sick(worker)
        elif worker.state == "sick" and now_s - worker.since_s > SICK_S:
            worker.last_words = f"has not answered for {now_s - worker.ping_s:.0f} s"
            worker.process.kill()

    def _spawn(self, worker: Worker, now_s: float) -> None:
        worker.state, worker.since_s, worker.last_words = "starting", now_s, None
        try:
            worker.process = self._launcher.launch(worker.start, self._heard, self._ended)
            worker.restarts += 1
        except OSError as error:
            self._down(worker, f"cannot be started ({error})", now_s)

    def _ping(self, worker: Worker, now_s: float) -> None:
        worker.ping += 1
        worker.ping_s = now_s
        worker.process.send(Ping(worker.ping))

    # --- the reading threads ------------------------------------------------------------------------------------

    def _find(self, process: WorkerProcess) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.process is process), None)

    def _heard(self, process: WorkerProcess, message: Any) -> None:
        with self.lock:
            worker = self._find(process)
            if worker is None or self._stopping:
                return
            worker.ping_s = None
            if worker.state == "sick":
                worker.state, worker.since_s = "up", self._clock()
                log.warning("worker %s (%s) answers again", worker.name, process.about)
                self._listener.worker_well(worker)
            if isinstance(message, Pong):
                return
            if isinstance(message, (StartFailed, Failed)):
                worker.last_words = message.message
            elif isinstance(message, Ready):
                worker.state, worker.ready, worker.since_s = "up", message, self._clock()
                if worker.restarts:
                    log.warning("worker %s is up again, as %s", worker.name, process.about)
                self._listener.worker_up(worker)
                self._changed.notify_all()
            else:
                self._listener.worker_said(worker, message)

    def _ended(self, process: WorkerProcess, code: int | str) -> None:
        with self.lock:
            worker = self._find(process)
            if worker is None:
                return
            now_s = self._clock()
            if worker.state in ("up", "sick") and now_s - worker.since_s > STABLE_S:
                worker.failures = 0
            if not self._stopping:
                self._down(worker, worker.last_words or _end(code, worker.state), now_s)
            self._wake.set()

    def _down(self, worker: Worker, why: str, now_s: float) -> None:
        about = worker.process.about if worker.process is not None else "no process"
        worker.process, worker.ping_s = None, None
        worker.failures += 1
        if self._starting:
            worker.state = "gone"
            self._error = self._error or f"worker {worker.name}: {why}"
            self._changed.notify_all()
            return
        worker.state = "gone" if worker.failures > MAX_STARTS else "stopped"
        log.warning("worker %s (%s) %s; %s", worker.name, about, why, "it is not started again" if worker.state == "gone" else "another is started")
        worker.start_at_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (worker.failures - 1))
        self._listener.worker_down(worker, why)


def _end(code: int | str, state: str) -> str:
    if isinstance(code, str):
        return code
    if code >= 0:
        return f"ended by itself with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
    hint = ", perhaps for want of memory: ask for less (kv_cache_memory_bytes) or fewer workers" if name == "SIGKILL" and state == "starting" else ""
    return f"was ended by {name}{hint}"
