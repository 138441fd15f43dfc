"""Two workers in one process: real engines with tiny models, real transfer agents, and a front that is a few lines of a test."""
import contextlib
import itertools
import threading
import time

import torch

from minengine.engine_args import EngineArgs
from minengine.disagg.agents import TransferError
from minengine.disagg.connector import WorkerConnector
from minengine.disagg.source import Reserve
from minengine.disagg.transfer import open_agent
from minengine.engine import LLMEngine
from minengine.request import OutputKind, Resume, SamplingParams, Status
from tiny_models import tiny_model

torch.set_num_threads(1)  # a second thread only slows models this small

OPTIONS = dict(block_size=16, num_gpu_blocks_override=24, max_num_batched_tokens=64, max_num_seqs=8)
PATIENCE_S = 30.0  # what a test waits for something that comes at once
names = itertools.count()


class Worker:
    """One engine, its agent and its connector; `woken` is set by the connector's wake()."""

    def __init__(self, kind, role, agent="nixl", wrap=lambda agent: agent, timeout_s=PATIENCE_S, tier=None, clock=time.perf_counter, **options):
        self.agent = wrap(open_agent(f"{role}{next(names)}", agent))
        lease_s = 30.0 if clock is not time.perf_counter else 10 * PATIENCE_S  # where time goes by, no test may pass because a lease ran out
        self.engine = LLMEngine(EngineArgs(**{**OPTIONS, "kv_lease_s": lease_s, **options}), model=tiny_model(kind), storage=self.agent.allocate, clock=clock)
        self.woken, self.reserved, self.outputs = threading.Event(), [], {}
        self.connector = WorkerConnector(self.engine, self.agent, wake=self.woken.set, kv_transfer_timeout_s=timeout_s, fingerprint=kind,
                                         tier=tier and tier(self.engine), on_reserved=lambda *given: (self.reserved.append(given), self.woken.set()))

    @property
    def scheduler(self):
        return self.engine.scheduler

    def add(self, name, ids, max_tokens=8, **more):
        params = more.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return self.engine.add_request(name, ids, params, output_kind=OutputKind.DELTA, **more)

    def turn(self):
        """One round of a worker's loop: what has landed is handed over, then a step; the invariants hold after both."""
        self.connector.poll()
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        with self.engine.lock:
            self.scheduler.check()
        for out in outputs:
            self.outputs.setdefault(out.request_id, []).append(out)
        return outputs

    def until(self, done, turn=True):
        """Take turns until `done()`; sleeps between two of them only while there is nothing to compute."""
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end, f"it does not come: {self.scheduler.running=} {self.scheduler.waiting=} {self.scheduler.loading=}"
            self.woken.clear()
            if not (turn and self.turn()) and not done():
                self.woken.wait(0.01)

    def tokens(self, name):
        return [token for out in self.outputs.get(name, []) for token in out.outputs[0].token_ids]

    def finished(self, name):
        return bool(self.outputs.get(name)) and self.outputs[name][-1].finished

    def clean(self, quarantined=0):
        """Everything was given back."""
        self.until(lambda: self.connector.idle, turn=False)
        with self.engine.lock:
            self.scheduler.check()
            assert not self.scheduler.loads.storing and not self.scheduler.held and not self.scheduler.loading
            assert len(self.scheduler.loads.quarantine) == quarantined
            assert quarantined or self.engine.num_free_blocks == self.engine.pool.num_blocks

    def close(self):
        self.connector.close()
        self.agent.close()


@contextlib.contextmanager
def workers(kind="llama", prefill=None, decode=None, **both):
    """(prefill worker, decode worker)."""
    p = Worker(kind, "p", **{**both, **(prefill or {})})
    d = Worker(kind, "d", **{**both, **(decode or {})})
    try:
        yield p, d
    finally:
        p.close()
        d.close()


def prefilled(p, name, ids, **more):
    """Compute a prompt on a prefill worker and lease its rows: (source, the request's first token as a Resume)."""
    p.add(name, ids, hold=True, **more)
    p.until(lambda: name in p.scheduler.held or p.finished(name))
    assert not p.finished(name)
    return p.connector.hold(name), so_far(p, name)


def so_far(worker, name):
    outs = worker.outputs[name]
    return Resume(output_token_ids=tuple(worker.tokens(name)), sent_chars=sum(len(out.outputs[0].text) for out in outs), timeline=outs[0].metrics,
                  num_cached_tokens=outs[0].num_cached_tokens)


def pulled(p, d, name, ids, **more):
    """All tokens of a request that is prefilled on `p` and goes on on `d`."""
    source, resume = prefilled(p, name, ids, **more)
    d.add(name, ids, resume=resume, source=source, **more)
    d.until(lambda: d.finished(name))
    return p.tokens(name) + d.tokens(name)


def pushed(p, d, name, ids, **more):
    """The same with rows that `p` writes to `d` while it computes them."""
    d.add(name, ids, source=Reserve(p.connector.facts), **more)
    d.until(lambda: d.reserved, turn=True)
    assert p.connector.push_to(*d.reserved.pop())
    p.add(name, ids, hold=True, **more)
    p.until(lambda: name in p.scheduler.held)
    assert p.connector.hold(name) is None
    assert d.connector.resume(name, so_far(p, name))
    d.until(lambda: d.finished(name))
    return p.tokens(name) + d.tokens(name)
