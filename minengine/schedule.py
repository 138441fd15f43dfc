"""One iteration, one decision, one token budget. Pure Python; drives the real engine and the simulator.

    schedule()  decodes first (one token each), then answers that were appended to, then open prefills, then new requests, until the
                budget is spent
    update()    tokens came back: advance, append, offer full blocks to the prefix cache, finish
    append()    tokens that need no sampling, because a grammar leaves no choice: the request is behind by several, and catches up

Invariants:
  - a request that can decode is in every step, and so is one whose answer has begun (max_num_batched_tokens >= max_num_seqs)
  - a running request holds the blocks of all tokens it has; only a decode can need one more
  - a block is offered to the prefix cache after the step that computed it, never while it is in flight
  - the oldest running request is never preempted for a younger one, so somebody always gets through
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

from .kv.blocks import BlockPool, block_hash, root_hash
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
    failed: list[Request] = field(default_factory=list)  # outgrew the pool: finished here with an error

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.prefills)

    def sampled(self) -> list[Request]:
        """Requests whose next token this step yields: all decodes, and prefills that reach their last token."""
        return self.decodes + [r for r, n in self.prefills if r.num_computed_tokens + n == r.num_tokens]


class Scheduler:
    def __init__(self, pool: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int, long_prefill_token_threshold: int = 0) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}: decodes would starve")
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
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

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give its blocks back. Call between steps; twice is harmless."""
        self.finish(request, "abort")

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside update(): an abort, a stop string, an error."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.running.remove(request)
        if not request.finished:
            self._end(request, reason)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # --- the decision ---------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> Step:
        self.now_s = now_s
        step = Step()
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

        if not step.preempted:  # a request that just lost its blocks must not be overtaken
            while budget > 0 and self.waiting and len(running) < self.max_num_seqs and self._admit(self.waiting[0]):
                budget -= self._prefill(self.waiting.popleft(), budget, step)
        return step

    def _prefill(self, request: Request, budget: int, step: Step) -> int:
        """Give a request the next part of what it lacks; returns the tokens spent."""
        n = min(request.num_tokens - request.num_computed_tokens, budget)
        if self.long_prefill_token_threshold:
            n = min(n, self.long_prefill_token_threshold)
        if request.num_tokens - request.num_computed_tokens == 1:
            step.decodes.append(request)  # all but one token was cached: the same work as a decode
        else:
            step.prefills.append(Chunk(request, n))
        return n

    def _admit(self, request: Request) -> bool:
        """Move a waiting request to running with blocks for all its tokens, cached ones first; False if they do not fit now."""
        pool = self.pool
        hit: list[int] = []
        if pool.enable_prefix_caching:
            # Capped one token short: the last token is computed even if all is cached, for its logits.
            hit = pool.find(self._hashes(request, (request.num_tokens - 1) // pool.block_size))
        need = pool.blocks_for(request.num_tokens) - len(hit)
        if need > pool.num_free_blocks - pool.num_idle(hit):
            return False
        pool.share(hit)
        request.block_ids = hit + pool.allocate(need)
        request.capacity = len(request.block_ids) * pool.block_size
        request.num_computed_tokens = len(hit) * pool.block_size
        request.num_hashed_blocks = len(hit)
        if request.timeline.admitted_s is None:
            request.timeline.admitted_s = self.now_s
            request.num_cached_tokens = request.num_computed_tokens
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _grow(self, request: Request, step: Step) -> bool:
        """One more block for a decode, preempting the youngest running requests if need be; False if it lost its own place."""
        pool = self.pool
        while not pool.num_free_blocks:
            victim = self.running.pop()
            if victim is request and not self.running:  # alone, and still too large
                request.error = (f"the request grew to {request.num_tokens} tokens and the pool holds {pool.num_blocks} blocks of "
                                 f"{pool.block_size}; lower max_tokens or enlarge the pool (kv_cache_memory_bytes)")
                self._end(request, "error")
                step.failed.append(request)
                return False
            self._preempt(victim, step)
            if victim is request:
                return False
        request.block_ids += pool.allocate(1)
        request.capacity += pool.block_size
        return True

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
        ended = []
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
        if ended:
            for request, reason in ended:
                self._end(request, reason)
            self.running = [request for request in self.running if request.status is Status.RUNNING]
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
                request.block_ids += self.pool.allocate(missing)
                request.capacity += missing * self.pool.block_size

    def _offer_blocks(self, request: Request) -> None:
        """Make the blocks that are now fully computed findable."""
        full = request.num_computed_tokens // self.pool.block_size
        if full > request.num_hashed_blocks:
            hashes = self._hashes(request, full)
            for i in range(request.num_hashed_blocks, full):
                self.pool.register(request.block_ids[i], hashes[i])
            request.num_hashed_blocks = full

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hash chain of the first `num_blocks` full blocks, extended as needed and kept with the request."""
        chain, size = request.block_hashes, self.pool.block_size
        while len(chain) < num_blocks:
            parent = chain[-1] if chain else root_hash(request.cache_salt)
            start = len(chain) * size
            chain.append(block_hash(parent, request.token_ids[start: start + size]))
        return chain if len(chain) == num_blocks else chain[:num_blocks]

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
        self.pool.check(request.block_ids for request in self.running)
        for request in self.running:
            assert request.status is Status.RUNNING, request
            assert 0 <= request.num_computed_tokens < request.num_tokens <= request.max_num_tokens, request
            assert request.num_tokens - 1 <= request.capacity == len(request.block_ids) * self.pool.block_size, request
            lacks = request.num_tokens - request.num_computed_tokens
            assert lacks == 1 or request.num_tokens <= request.capacity, request
            assert len(request.timeline.token_s) == request.num_tokens - request.num_prompt_tokens, request
        for request in self.waiting:
            assert request.status is Status.WAITING and not request.block_ids and not request.num_computed_tokens, request
        assert len(self.running) <= self.max_num_seqs
