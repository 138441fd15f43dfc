"""A worker's loop while a step is computed: with load_admission="event" a request comes in at once, else after the step."""
import os
import threading
from multiprocessing import Pipe

import pytest

from minengine.engine_args import EngineArgs
from minengine.disagg.messages import Abort, AddRequest, Ping, Pong, Report, Start, Stop
from minengine.disagg.worker import WorkerLoop
from minengine.prompt import Prompt
from minengine.request import SamplingParams, Timeline

PATIENCE_S = 60.0


class Front:
    """A loop with its two threads in this process. The model computes one step each time that it is told to `go_on`, until it is `free`."""

    def __init__(self, admission, monkeypatch):
        monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))  # the loop's end is not this program's
        self.wire, theirs = Pipe()
        self.loop = WorkerLoop(theirs)
        self.loop.start(Start(name="w", role="both", args=EngineArgs(model="glm-mini", device="cpu", dtype="float32", num_gpu_blocks_override=16, load_admission=admission)))
        self.computing, self.go_on, self.free = threading.Semaphore(0), threading.Semaphore(0), False
        self.execute, self.loop.engine.runner.execute = self.loop.engine.runner.execute, self._gated
        self.deltas = {}
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._run)]
        self.failed = None
        for thread in self.threads:
            thread.start()

    def _read(self):
        try:
            self.loop.read()
        except SystemExit:
            pass

    def _run(self):
        try:
            self.loop.run()
        except BaseException as error:
            self.failed = error

    def _gated(self, step):
        self.computing.release()
        assert self.free or self.go_on.acquire(timeout=PATIENCE_S)
        return self.execute(step)

    def send(self, *messages):
        """Returns when the reading thread has seen them all."""
        for message in messages:
            self.wire.send(message)
        self.wire.send(Ping(7))
        while not isinstance(self.receive(), Pong):
            pass

    def add(self, key, max_tokens=4):
        self.send(AddRequest(key=key, prompt=Prompt(None, [20, 21, 22], None), params=SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True),
                             cache_salt=None, timeline=Timeline()))

    def receive(self):
        assert self.wire.poll(PATIENCE_S), self.failed
        message = self.wire.recv()
        if isinstance(message, Report):
            for delta in message.deltas:
                self.deltas.setdefault(delta.key, []).append(delta)
        return message

    def finish(self, *keys):
        self.free = True
        self.go_on.release()
        while not all(self.deltas.get(key, ()) and self.deltas[key][-1].finish_reason for key in keys):
            self.receive()

    def close(self):
        self.free = True
        self.go_on.release(100)
        self.wire.send(Stop())
        self.threads[1].join(PATIENCE_S)
        self.wire.close()
        self.threads[0].join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.fixture
def front(request, monkeypatch):
    front = Front(request.param, monkeypatch)
    yield front
    front.close()


both = pytest.mark.parametrize("front", ["poll", "event"], indirect=True)


@both
def test_with_event_a_request_comes_in_during_a_step(front, request):
    admission = front.loop.engine.args.load_admission
    front.add("first")
    assert front.computing.acquire(timeout=PATIENCE_S)
    front.add("second")
    assert ("second" in front.loop.engine.requests) == (admission == "event")
    front.finish("first", "second")
    for key in ("first", "second"):
        assert sum(len(delta.token_ids) for delta in front.deltas[key]) == 4 and front.deltas[key][-1].finish_reason == "length"
    assert not front.loop.engine.requests and front.loop.engine.num_free_blocks == 16 and front.failed is None


@both
def test_an_abort_during_a_step_ends_one_request_and_no_other(front):
    for key in ("gone", "stays"):
        front.add(key, max_tokens=6)
    assert front.computing.acquire(timeout=PATIENCE_S)
    front.add("late", max_tokens=6)
    front.send(Abort("gone"), Abort("late"), Abort("never was"))
    front.finish("stays")
    assert sum(len(delta.token_ids) for delta in front.deltas["stays"]) == 6
    assert all(delta.finish_reason in (None, "abort") for delta in front.deltas.get("gone", ()))
    assert "late" not in front.deltas
    front.loop.engine.scheduler.check()
    assert not front.loop.engine.requests and front.loop.engine.num_free_blocks == 16 and front.failed is None


@pytest.mark.parametrize("front", ["event"], indirect=True)
def test_what_goes_wrong_with_a_message_ends_the_worker_and_is_said(front, monkeypatch):
    front.loop.engine.add_request = lambda *args, **more: 1 / 0
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    front.wire.send(AddRequest(key="r", prompt=Prompt(None, [20], None), params=SamplingParams(seed=0), cache_salt=None, timeline=Timeline()))
    front.threads[1].join(PATIENCE_S)
    assert isinstance(front.failed, ZeroDivisionError)
