"""One iteration, one decision, one token budget. Pure Python; drives the real engine and the simulator.

    schedule()  decodes first (one token each), then answers that were appended to, then open prefills, then requests whose content has
                landed, then new ones, until the budget is spent
    update()    tokens came back: advance, append, offer full blocks to the prefix cache, finish
    append()    tokens that need no sampling, because a grammar leaves no choice: the request is behind by several, and catches up
    landed()    blocks that a connector was asked to load have their content (loading.py)
    release()   blocks that were held for a decoder have been read

    WAITING ─ start_load ─▶ LOADING ─ landed ─▶ READY ─▶ RUNNING ─▶ FINISHED        without a connector: WAITING ─▶ RUNNING ─▶ FINISHED
    WAITING ◀─────────── load_failed ┘       WAITING ◀─ preempted ┴─▶ HELD ─ release ─▶ FINISHED

Invariants:
  - a request that can decode is in every step, and so is one whose answer has begun (max_num_batched_tokens >= max_num_seqs)
  - a running request holds the blocks of all tokens it has; only a decode can need one more
  - a block is offered to the prefix cache after the step that computed it, never while it is in flight
  - the oldest running request is never preempted for a younger one, so somebody always gets through
  - blocks are given to those who wait in the order of the queue: a load that can start takes none from a request that came before it
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Sequence

from .kv.blocks import BlockPool, root_hash
from .kv.connector import KVConnector
from .loading import Found, Loads, cached_prefix, take_blocks
from .request import Request, RequestError, Status

__all__ = ["Chunk", "Scheduler", "Step"]


class Chunk(NamedTuple):
    """The next `num_tokens` tokens of a request that still has several to compute."""

    request: Request
    num_tokens: int


@dataclass(slots=True)
class Step:
    """What the next iteration computes. `sampled()` is the order in which update() wants the new tokens."""

    decodes: list[Request] = field(default_factory=list)  # exactly one token each
    prefills: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)  # finished here with an error: outgrew the pool, or could not be loaded

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.prefills)

    def sampled(self) -> list[Request]:
        """Requests whose next token this step yields: all decodes, and prefills that reach their last token."""
        return self.decodes + [r for r, n in self.prefills if r.num_computed_tokens + n == r.num_tokens]


class Scheduler:
    """
    Args:
        connector: brings and takes blocks; None: the pool is all there is.
        load_admission: when a load starts: "poll", as schedule() walks the queue; "event", as soon as there are blocks for it.
        kv_load_failure_policy: what becomes of a request whose load failed: "recompute", or "fail".
    """

    def __init__(self, pool: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int, long_prefill_token_threshold: int = 0,
                 connector: KVConnector | None = None, load_admission: str = "poll", kv_load_failure_policy: str = "recompute") -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}: decodes would starve")
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.connector = connector
        self.load_admission, self.kv_load_failure_policy = load_admission, kv_load_failure_policy
        self.loads = Loads(pool, connector)
        self.loading = self.loads.loading  # by request_id
        self.ready: deque[Request] = deque()  # in order of landing
        self.held: dict[str, Request] = {}
        self._unloadable: list[Request] = []  # ended since the last step
        self.now_s = 0.0  # handed in by schedule() and update(); stamps what ends in between

    # --- in and out -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its prompt can never fit the pool.
        """
        need = self.pool.blocks_for(request.num_tokens)
        if need > self.pool.num_blocks:
            raise RequestError(f"prompt: {request.num_tokens} tokens need {need} blocks of {self.pool.block_size} and the pool has "
                               f"{self.pool.num_blocks}; shorten the prompt or enlarge the pool (kv_cache_memory_bytes)")
        self.waiting.append(request)
        self._start_loads()

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

    # --- the decision ---------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> Step:
        self.now_s = now_s
        step = Step()
        if self._unloadable:
            step.failed, self._unloadable = self._unloadable, []
        decodes, answers, open_prefills = step.decodes, [], []
        running = self.running
        i = 0
        while i < len(running):  # not `for`: preemption shortens the list from its end
            request = running[i]
            if request.num_tokens - request.num_computed_tokens > 1:
                (answers if request.num_computed_tokens >= request.num_prompt_tokens else open_prefills).append(request)
            elif request.num_tokens <= request.capacity or self._grow(request, step):
                decodes.append(request)
            else:
                continue  # it gave up its own place: running[i] is the next one, or the end
            i += 1
        budget = self.max_num_batched_tokens - len(decodes)

        for i, request in enumerate(answers):  # each leaves one token for every other: an answer must not stand still
            budget -= self._prefill(request, budget - (len(answers) - i - 1), step)
        for request in open_prefills:
            if budget > 0:
                budget -= self._prefill(request, budget, step)

        while budget > 0 and self.ready and len(running) < self.max_num_seqs and self._has_room(self.ready[0]):
            budget -= self._prefill(self._run(self.ready.popleft()), budget, step)
        if not step.preempted:  # a request that just lost its blocks must not be overtaken
            while budget > 0 and self.waiting and len(running) < self.max_num_seqs:
                request = self.waiting[0]
                found = None if self.connector is None else self.loads.find(request)
                if found is not None:
                    if not self._load(request, found):
                        break
                elif take_blocks(self.pool, request, cached_prefix(self.pool, request)):
                    budget -= self._prefill(self._run(self.waiting.popleft()), budget, step)
                else:
                    break
        return step

    def _prefill(self, request: Request, budget: int, step: Step) -> int:
        """Give a request the next part of what it lacks; returns the tokens spent."""
        if request.timeline.prefill_start_s is None and request.num_computed_tokens < request.num_prompt_tokens:
            request.timeline.prefill_start_s = self.now_s
        n = min(request.num_tokens - request.num_computed_tokens, budget)
        if self.long_prefill_token_threshold:
            n = min(n, self.long_prefill_token_threshold)
        if request.num_tokens - request.num_computed_tokens == 1:
            step.decodes.append(request)  # all but one token was cached: the same work as a decode
        else:
            step.prefills.append(Chunk(request, n))
        return n

    def _run(self, request: Request) -> Request:
        timeline = request.timeline
        if timeline.admitted_s is None:
            timeline.admitted_s = self.now_s
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.num_resumed_tokens and timeline.decode_admitted_s is None:
            timeline.decode_admitted_s = self.now_s
        request.status = Status.RUNNING
        self.running.append(request)
        return request

    def _has_room(self, request: Request) -> bool:
        """A request that got its first token while it was loading may lack the block for it."""
        if request.num_tokens > request.capacity and self.pool.num_free_blocks:
            self._extend(request, 1)
        return request.num_tokens <= request.capacity

    def _grow(self, request: Request, step: Step) -> bool:
        """One more block for a decode, preempting the youngest requests if need be, those that do not run yet first; False if it lost its
        own place."""
        pool = self.pool
        while not pool.num_free_blocks:
            victim = self.ready.pop() if self.ready else self.running.pop()
            if victim is request and pool.blocks_for(request.num_tokens) > pool.num_blocks:
                request.error = (f"the request grew to {request.num_tokens} tokens and the pool holds {pool.num_blocks} blocks of "
                                 f"{pool.block_size}; lower max_tokens or enlarge the pool (kv_cache_memory_bytes)")
                self._end(request, "error")
                step.failed.append(request)
                return False
            self._preempt(victim, step)
            if victim is request:
                return False
        self._extend(request, 1)
        return True

    def _extend(self, request: Request, num_blocks: int) -> None:
        request.block_ids += self.pool.allocate(num_blocks, request.block_ids[-1])
        request.capacity += num_blocks * self.pool.block_size

    def _preempt(self, request: Request, step: Step) -> None:
        """Back to the head of the queue, to be recomputed; what stays cached will be found again."""
        self._give_back(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        request.timeline.num_preemptions += 1
        self.waiting.appendleft(request)
        step.preempted.append(request)

    # --- the result -----------------------------------------------------------------------------------------

    def update(self, step: Step, token_ids: Sequence[int | None], now_s: float = 0.0) -> list[Request]:
        """Book a step's outcome; `token_ids` belong to `step.sampled()`, in order; None stands for "no token is allowed", and ends its
        request with an error. Returns the requests that ended."""
        self.now_s = now_s
        sampled = step.sampled()
        if len(token_ids) != len(sampled):
            raise ValueError(f"{len(token_ids)} tokens for {len(sampled)} sampled requests")
        for request, n in step.prefills:
            request.num_computed_tokens += n
        for request in step.decodes:
            request.num_computed_tokens += 1
        size = self.pool.block_size
        if self.pool.enable_prefix_caching:
            for request, _ in step.prefills:
                self._offer_blocks(request)
            for request in step.decodes:
                if not request.num_computed_tokens % size:
                    self._offer_blocks(request)
        ended, held = [], []
        for request, token in zip(sampled, token_ids):
            if token is None:
                after = f"structured_outputs: after {request.num_tokens - request.num_prompt_tokens} tokens"
                if request.grammar is not None and request.grammar.overdrawn:
                    request.error = (f"{after} the grammar takes too long to follow, because it can read the same text in too many ways; write it "
                                     f"without ambiguity, [a-z]+ for example and not s ::= s s | [a-z]")
                else:
                    request.error = f"{after} no token of this model's vocabulary can go on as asked; ask for what it can spell, or use another model"
                ended.append((request, "error"))
                continue
            request.token_ids.append(token)
            request.num_tokens += 1
            request.timeline.token_s.append(now_s)
            if token in request.stop_ids:
                request.stop_reason = token
                ended.append((request, "stop"))
            elif request.num_tokens >= request.max_num_tokens:
                ended.append((request, "length"))
            elif request.hold:
                held.append(request)
        for request in held:
            request.status = Status.HELD
            self.held[request.request_id] = request
        for request, reason in ended:
            self._end(request, reason)
        if ended or held:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
            self._start_loads()
        return [request for request, _ in ended]

    def room(self, request: Request) -> int:
        """How many tokens `append` can take now: those that the request's blocks and the free ones hold, without its last, which is always
        sampled: it ends the request, or not."""
        if request.status is not Status.RUNNING:
            return 0
        held = request.capacity + self.pool.num_free_blocks * self.pool.block_size
        return max(0, min(held, request.max_num_tokens - 1) - request.num_tokens)

    def append(self, request: Request, token_ids: Sequence[int], now_s: float = 0.0) -> None:
        """Give a running request tokens that were not sampled, with blocks for them; call between steps. The next steps compute them, as
        many at once as the budget allows. Nobody is preempted for it.

        Raises:
            ValueError: there are more than `room` for; nothing is changed.
        """
        if len(token_ids) > self.room(request):
            raise ValueError(f"{len(token_ids)} tokens are appended to {request} and there is room for {self.room(request)}")
        if token_ids:
            request.token_ids += token_ids
            request.num_tokens += len(token_ids)
            request.timeline.token_s += [now_s] * len(token_ids)
            missing = self.pool.blocks_for(request.num_tokens) - len(request.block_ids)
            if missing > 0:
                self._extend(request, missing)

    def _offer_blocks(self, request: Request, store: bool = True) -> None:
        """Make the blocks that are now full findable, and offer them to the connector."""
        first, full = request.num_hashed_blocks, request.num_computed_tokens // self.pool.block_size
        if full > first:
            chain = request.hashes(full, self.pool.block_size)
            hashes, blocks = chain[first:], request.block_ids[first:full]
            parent = chain[first - 1] if first else root_hash(request.cache_salt)
            for block, h in zip(blocks, hashes):
                self.pool.register(block, h, parent)
                parent = h
            request.num_hashed_blocks = full
            if store and self.connector is not None:
                self.loads.store(hashes, blocks)

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
        loaded = (request.num_hashed_blocks + num_blocks) * self.pool.block_size
        request.num_computed_tokens = min(loaded, request.num_tokens - 1)
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

    # ----------------------------------------------------------------------------------------------------------

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
