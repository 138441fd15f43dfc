"""Where every request stands, which blocks that takes, and how it gets there from outside a step. Pure Python.

    WAITING ─ start_load ─▶ LOADING ─ landed ─▶ READY ─▶ RUNNING ─▶ FINISHED        without a connector: WAITING ─▶ RUNNING ─▶ FINISHED
    WAITING ◀─────────── load_failed ┘       WAITING ◀─ preempted ┴─▶ HELD ─ release ─▶ FINISHED

Everything but RUNNING may change while a step is computed: what the step reads and writes belongs to running requests alone.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from .kv.blocks import BlockPool, root_hash
from .kv.connector import KVConnector
from .loading import Found, Loads
from .request import Request, RequestError, Status

__all__ = ["Queues"]


class Queues:
    """
    Args:
        max_num_seqs: requests that run at once; as many may be loading or ready.
        connector: brings and takes blocks; None: the pool is all there is.
        load_admission: when a load starts: "poll", as schedule() walks the queue; "event", as soon as there are blocks for it.
        kv_load_failure_policy: what becomes of a request whose load failed: "recompute", or "fail".
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, connector: KVConnector | None = None, load_admission: str = "poll",
                 kv_load_failure_policy: str = "recompute") -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.connector = connector
        self.load_admission, self.kv_load_failure_policy = load_admission, kv_load_failure_policy
        self.loads = Loads(pool, connector)
        self.waiting: deque[Request] = deque()
        self.loading = self.loads.loading  # by request_id
        self.ready: deque[Request] = deque()  # in order of landing
        self.running: list[Request] = []  # in order of admission
        self.held: dict[str, Request] = {}  # by request_id
        self._hands_over = False  # some request was to be held
        self._unloadable: list[Request] = []  # ended since the last step
        self.now_s = 0.0  # handed in by whoever calls; stamps what ends in between

    # --- in and out -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its prompt can never fit the pool.
        """
        self.check_fits(request)
        self._hands_over |= request.hold
        self.waiting.append(request)
        self._start_loads()

    def check_fits(self, request: Request) -> None:
        """
        Raises:
            RequestError: its prompt can never fit the pool.
        """
        need = self.pool.blocks_for(request.num_tokens)
        if need > self.pool.num_blocks:
            raise RequestError(f"prompt: {request.num_tokens} tokens need {need} blocks of {self.pool.block_size} and the pool has "
                               f"{self.pool.num_blocks}; shorten the prompt or enlarge the pool (kv_cache_memory_bytes)")

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give its blocks back. Twice is harmless. If it runs, call between steps."""
        self.finish(request, "abort")

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside update(): an abort, a stop string, an error."""
        if request.finished:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.READY:
            self.ready.remove(request)
        elif request.status is Status.HELD:
            del self.held[request.request_id]
        elif self.loads.finish(request) and not self.connector.cancel(request):
            self.loads.isolate(request)
        self._end(request, reason)
        self._start_loads()

    def release(self, request_id: str) -> Request | None:
        """Give back the blocks of a request that was held; they stay cached. None if none by that id is held: twice is harmless."""
        request = self.held.get(request_id)
        if request is not None:
            self.finish(request, "handed_over")
        return request

    @property
    def has_unfinished(self) -> bool:
        """There is something that a step computes, now or later: what is held is not, what is loading is."""
        return bool(self.running or self.waiting or self.loading or self.ready or self._unloadable)

    # --- loads ----------------------------------------------------------------------------------------------

    def start_load(self, request: Request) -> bool:
        """Let the connector bring what a waiting request can have from elsewhere; False if that is nothing, or there is no room now."""
        found = self.loads.find(request)
        return found is not None and self._load(request, found)

    def _load(self, request: Request, found: Found, spare: int = 0) -> bool:
        """WAITING -> LOADING, if that leaves `spare` blocks and a block for each request that may soon need one: what has been loaded should not
        be the first to be preempted."""
        others = len(self.running) + len(self.loading) + len(self.ready)
        if len(self.loading) + len(self.ready) >= self.max_num_seqs or not self.loads.start(request, found, spare + others):
            return False
        self.waiting.remove(request)
        request.status = Status.LOADING
        return True

    def _start_loads(self) -> None:
        """With load_admission="event": blocks may have come free, or a request has come. Who waits for a place to compute keeps his claim."""
        if self.connector is None or self.load_admission != "event":
            return
        claimed = 0
        for request in list(islice(self.waiting, self.max_num_seqs)):
            found = self.loads.find(request)
            if found is None:
                claimed += self.pool.blocks_for(request.num_tokens)
            elif not self._load(request, found, claimed):
                break

    def landed(self, request: Request, num_blocks: int, now_s: float = 0.0) -> None:
        """The first `num_blocks` of the blocks that were to be loaded have their content; what follows them is computed here."""
        if not self.loads.finish(request):
            self.settled(request)
            return
        self.now_s = request.timeline.landed_s = now_s
        here = request.num_hashed_blocks * self.pool.block_size
        request.num_computed_tokens = min(here + num_blocks * self.pool.block_size, request.num_tokens - 1)
        if request.source is None and request.timeline.admitted_s is None:
            request.num_loaded_tokens = request.num_computed_tokens - here
        if self.pool.enable_prefix_caching:
            self._offer_blocks(request, store=request.source is not None)  # a tier's blocks are there already
        request.source = None
        request.status = Status.READY
        self.ready.append(request)

    def load_failed(self, request: Request, now_s: float = 0.0, *, error: str = "", settled: bool = True) -> None:
        """A load came to nothing: the request is computed here, and not loaded again, or ends (`kv_load_failure_policy`). Without `settled` its
        blocks may still be written to, until settled() is called."""
        if not self.loads.finish(request):
            if settled:
                self.settled(request)
            return
        self.now_s = now_s
        if not settled:
            self.loads.isolate(request)
        request.source, request.may_load = None, False
        if self.kv_load_failure_policy == "fail":
            request.error = f"the request's KV cache could not be loaded ({error or 'the transfer failed'}); send the request again"
            self._end(request, "error")
            self._unloadable.append(request)
        else:
            self._give_back(request)
            request.num_computed_tokens = 0
            request.status = Status.WAITING
            self.waiting.appendleft(request)
        self._start_loads()

    def settled(self, request: Request) -> None:
        """Nothing writes any more to the blocks that this request had when its load was cancelled or failed; twice is harmless."""
        self.loads.settled(request)
        self._start_loads()

    def borrow(self, block_ids: Sequence[int]) -> None:
        """Keep these held blocks for the connector, which reads them or lets others do so; it gives them back by `stored`."""
        self.loads.borrow(block_ids)

    def stored(self, block_ids: Sequence[int]) -> None:
        """Blocks that the connector was asked to store are copied, or will not be; and what it borrowed."""
        self.loads.stored(block_ids)
        self._start_loads()

    # --- blocks ---------------------------------------------------------------------------------------------

    def _extend(self, request: Request, num_blocks: int) -> None:
        request.block_ids += self.pool.allocate(num_blocks, request.block_ids[-1])
        request.capacity += num_blocks * self.pool.block_size

    def _offer_blocks(self, request: Request, store: bool = True) -> None:
        """Make the blocks that are now full findable, and offer them to the connector."""
        first, full = request.num_hashed_blocks, request.num_computed_tokens // self.pool.block_size
        if full > first:
            chain = request.hashes(full, self.pool.block_size)
            self.pool.offer(request.block_ids, chain, first, root_hash(request.cache_salt))
            request.num_hashed_blocks = full
            if store and self.connector is not None:
                self.loads.store(chain[first:], request.block_ids[first:full])

    def _end(self, request: Request, reason: str) -> None:
        self._give_back(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.timeline.finished_s = self.now_s

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids, request.capacity, request.num_hashed_blocks = [], 0, 0

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold between steps."""
        holders = [*self.running, *self.ready, *self.held.values()]
        self.pool.check([*(request.block_ids for request in holders), *self.loads.tables()])
        for request in (*holders, *self.loading.values()):
            assert 0 <= request.num_computed_tokens < request.num_tokens <= request.max_num_tokens, request
            assert request.capacity == len(request.block_ids) * self.pool.block_size, request
            assert len(request.timeline.token_s) == request.num_tokens - request.num_prompt_tokens, request
        for request in self.running:
            lacks = request.num_tokens - request.num_computed_tokens
            assert request.num_tokens - (lacks == 1) <= request.capacity, request
        for request in self.waiting:
            assert not request.block_ids and not request.num_computed_tokens, request
        for status, requests in ((Status.RUNNING, self.running), (Status.READY, self.ready), (Status.WAITING, self.waiting),
                                 (Status.HELD, self.held.values()), (Status.LOADING, self.loading.values())):
            assert all(request.status is status for request in requests), (status, requests)
        assert len(self.running) <= self.max_num_seqs
