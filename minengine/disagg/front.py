"""Workers behind the face of one engine: `AsyncCluster` has what `AsyncLLM` has, and its engines are elsewhere.

A request's way, prefill and decode apart:

    front    reads the prompt, fixes the seed, has the router choose       ─ AddRequest(hold) ─▶   prefill worker
    prefill  computes the prompt, samples the first token, keeps the rows  ─ Report, HeldRequest ▶ front
    front    hands the request over with the token it has                  ─ AddRequest(resume, source) ─▶ decoder
    decoder  reads the rows from the prefill worker, goes on               ─ Report ─▶             front

With kv_transfer="push_layers" the decoder is asked first, to keep room (AddRequest with a `Reserve`, answered by Reserved), and the prefill worker
writes each layer's rows there while it computes; the hand-over is then a word (Resumed).

A request that is handed over and one whose worker died are the same thing: a request whose first n output tokens are given. So a worker may
end or fall silent at any moment; what it had goes on elsewhere, no token lost and none twice.

All state changes under one lock: requests come from the loop's thread, news from a thread a worker, and the supervisor has its own. None of
them waits for anything while it has the lock.
"""
from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from random import Random
from threading import RLock
from typing import TYPE_CHECKING, Any, Mapping

from ..engine_args import EngineArgs
from ..kv.blocks import block_hashes
from ..prompt import read_prompt
from ..request import RequestError, SamplingParams
from ..streams import EngineStats
from .dispatch import Dispatcher, Read
from .flight import Flight
from .launch import open_launcher
from .messages import Connect, Disconnect, Refused, Report, Reserved, SnapshotPlease, SnapshotTaken, WorkerStats
from .plan import ClusterArgs, check_fit, plan
from .router import Router, WorkerSpec
from .supervise import Supervisor, Worker

if TYPE_CHECKING:
    from ..grammar import GrammarBackend

__all__ = ["AsyncCluster", "WorkerInfo"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it is now; what it said last."""

    name: str
    role: str  # "both", "prefill" or "decode"
    state: str  # "starting", "up", "sick", "stopped" or "gone"
    pid: int | None
    restarts: int
    num_threads: int
    kv_cache_layout: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    transfer: str  # how KV moves, "" where it does not
    transfers: Mapping[str, float]
    node: str = ""  # of a cluster; "" for this machine
    topology: str = "TP1"  # of its ranks, each of which has `num_threads` and a pool of `num_blocks`
    num_ranks: int = 1


class AsyncCluster(Dispatcher):
    """
    Args:
        args: of every worker, as far as `cluster` says nothing else of its role.

    Raises:
        ConfigError: a worker cannot run as asked, or two do not fit together; no process is left then.
    """

    def __init__(self, args: EngineArgs, cluster: ClusterArgs = ClusterArgs(), *, max_num_waiting: int = 1024) -> None:
        from ..tokenizer import load_tokenizer

        tokenizer = load_tokenizer(args.model)  # before any process is made: a name that is no model is found here
        launcher = open_launcher(cluster.cluster)
        try:
            starts = plan(args, cluster, launcher.shares)
        except BaseException:
            launcher.close()
            raise
        self.cluster_args = cluster
        self._lock = RLock()
        self._flights: dict[str, Flight] = {}
        self._keys: dict[str, Flight] = {}
        self._parked: deque[Flight] = deque()
        self._seeds = Random(args.seed)
        self._told: dict[str, WorkerStats] = {}
        self._before: dict[str, WorkerStats] = {}  # of processes that have ended, added up
        self.num_retries = 0
        decoders = [start for start in starts if start.role != "prefill"]
        self._block_size = starts[0].args.block_size  # the router counts in blocks of those who read prompts
        self._router = Router(cluster.router_policy, block_size=self._block_size, clock=time.perf_counter, seed=args.seed, workers=[
            # As many again as can run may wait there: an ended request is followed at once, and what is routed late is routed well.
            WorkerSpec(start.name, start.role, 2 * start.args.max_num_seqs * start.args.ranks.data, "here") for start in starts])
        self._supervisor = Supervisor(starts, self, lock=self._lock, launcher=launcher, worker_timeout_s=cluster.worker_timeout_s)
        self._workers = self._supervisor.workers
        self._ready = False
        self._supervisor.begin()
        self._supervisor.wait()
        try:
            with self._lock:
                ready = {name: worker.ready for name, worker in self._workers.items()}
                check_fit(ready)
                one = next(iter(ready.values()))
                self._grammars: GrammarBackend | None = None
                super().__init__(args=args, tokenizer=tokenizer, config=one.config, max_model_len=one.max_model_len,
                                 num_seqs=sum(start.args.max_num_seqs * start.args.ranks.data for start in decoders), max_num_waiting=max_num_waiting,
                                 clock=time.perf_counter, compile=self._compile)
                self._ready = True
                for worker in self._workers.values():
                    self._introduce(worker)
        except BaseException:
            self._supervisor.stop(at_once=True)
            raise

    # --- what a server asks -------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerInfo]:
        with self._lock:
            return [self._info(worker) for worker in self._workers.values()]

    def _info(self, worker: Worker) -> WorkerInfo:
        ready, stats, layout = worker.ready, self._told.get(worker.name, WorkerStats()), worker.ready.layout
        up = worker.state in ("up", "sick")
        return WorkerInfo(worker.name, worker.role, worker.state, worker.process.pid if worker.process else None, worker.restarts, ready.num_threads,
                          layout.order, ready.kv_cache_dtype, worker.start.args.block_size, ready.num_blocks, stats.num_free_blocks if up else 0,
                          stats.num_running if up else 0, stats.num_waiting if up else 0, ready.about_transfer, stats.transfers,
                          worker.process.node if worker.process else "", worker.start.args.ranks.name, worker.start.args.ranks.gpus)

    def stats(self) -> EngineStats:
        with self._lock:
            workers, counts = self.workers, self._counts
            blocks = sum(worker.num_blocks for worker in workers if worker.state == "up")
            free = sum(worker.num_free_blocks for worker in workers if worker.state == "up")
            every = [*self._told.values(), *self._before.values()]
            return EngineStats(self._num_running(), self._num_waiting(), 1 - free / blocks if blocks else 0.0, counts["prompt"], counts["cached"],
                               counts["generation"], counts["preemptions"], sum(stats.steps for stats in every),
                               sum(stats.jump_forward_tokens for stats in every), dict(self._finished))

    def router_stats(self) -> dict[str, Any]:
        with self._lock:
            return self._router.stats()

    def _num_running(self) -> int:
        running = sum(self._told[name].num_running for name, worker in self._workers.items() if worker.state == "up" and name in self._told)
        return min(running, len(self._flights))

    def _num_waiting(self) -> int:
        return len(self._flights) - self._num_running() + self._num_preparing

    async def shutdown(self) -> None:
        """End all workers after their present step; requests that are left see `EngineDead`."""
        self._draining = True
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """`shutdown` for a thread that has no loop."""
        self._supervisor.stop()
        with self._lock:
            if not self._over:
                self._end_all(self._error or "shut down")

    def kill(self) -> None:
        """End all workers now, and remove what they shared: this process is about to end as well."""
        from .shm import sweep

        self._supervisor.stop(at_once=True)
        sweep()

    # --- requests, on the loop's thread ---------------------------------------------------------------------------

    def _compile(self, params: Any) -> Any:
        if self._grammars is None:
            from ..grammar import GrammarBackend

            self._grammars = GrammarBackend(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)
        return self._grammars.compile(params)

    def _read(self, prompt: Any, params: SamplingParams, cache_salt: str | None) -> Read:
        read = read_prompt(prompt, self.tokenizer, self.model_config.vocab_size)
        salt = read.cache_salt if cache_salt is None else cache_salt
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt={salt!r}: use a string")
        for worker in self._workers.values():
            size, n = worker.start.args.block_size, len(read.token_ids)
            if n > worker.ready.num_blocks * size and n < self.max_model_len:
                raise RequestError(f"prompt: {n} tokens need {-(-n // size)} blocks of {size} and the pool of worker {worker.name} has "
                                   f"{worker.ready.num_blocks}; shorten the prompt or enlarge the pool (kv_cache_memory_bytes)")
        aware = self._router.policy == "kv_aware"
        return Read(read, salt, block_hashes(read.token_ids, self._block_size, salt) if aware else [])

    # --- news of workers (supervise.Listener) -------------------------------------------------------------------------

    def worker_up(self, worker: Worker) -> None:
        self._told[worker.name] = WorkerStats(num_free_blocks=worker.ready.num_blocks)
        if self._ready:
            self._router.worker_up(worker.name)
            self._introduce(worker)
            self._dispatch()

    def _introduce(self, worker: Worker) -> None:
        """Make a new process known to those that its KV goes to or comes from."""
        for other in self._workers.values():
            if other.role != worker.role and other.state in ("up", "sick"):
                for one, its in ((other, worker), (worker, other)):
                    for pool in its.ready.pools:
                        one.send(Connect(pool))

    def worker_down(self, worker: Worker, why: str) -> None:
        stats = self._told.pop(worker.name, WorkerStats())
        before = self._before.get(worker.name, WorkerStats())
        self._before[worker.name] = WorkerStats(steps=before.steps + stats.steps, jump_forward_tokens=before.jump_forward_tokens + stats.jump_forward_tokens)
        if not self._ready:
            return
        evicted = self._router.worker_down(worker.name)
        for other in self._workers.values():
            if other.role != worker.role and other.state in ("up", "sick"):
                for rank in (rank for pool in worker.ready.pools for rank in pool.ranks):
                    other.send(Disconnect(rank.agent))
        if all(each.state == "gone" for each in self._workers.values() if each.role != "prefill"):
            self._error = RuntimeError(f"worker {worker.name} {why}, and was not to be started again")
            self._end_all(self._error)
        else:
            self._retry(self._lost(worker.name, evicted), worker, why, died=True)

    def worker_sick(self, worker: Worker) -> None:
        evicted = self._router.worker_sick(worker.name)
        self._retry(self._lost(worker.name, evicted), worker, "does not answer", died=False)

    def worker_well(self, worker: Worker) -> None:
        self._router.worker_well(worker.name)
        self._dispatch()

    def looked_after(self) -> None:
        if self._ready:
            self._router.expired()
            self._renew_leases(self.clock())
            self._dispatch()  # a worker that failed may have its trial now

    def worker_said(self, worker: Worker, message: Any) -> None:
        match message:
            case Report():
                self._told[worker.name] = message.stats
                if message.events and worker.start.args.block_size == self._block_size and not self._router.apply(worker.name, message.events):
                    worker.send(SnapshotPlease())
                self._booked(worker, message.deltas)
                for held in message.held:
                    self._hand_over(worker, held)
            case Reserved(key, target):
                flight = self._keys.get(key)
                if flight is not None and flight.awaits is not None:
                    flight.reserved = (worker.name, key)
                    self._give(flight, flight.prefill, hold=True, target=target)
            case SnapshotTaken(snapshot):
                self._router.resync(worker.name, snapshot)
            case Refused(key, why):
                flight = self._keys.get(key)
                if flight is not None:
                    self._close_flight(flight, "cancelled")
                    if flight.token_ids:
                        self._publish([flight.end("error", self.clock(), why)])
                    else:
                        self._on_loops([(flight.request_id, RequestError(why))])
                    self._dispatch()
