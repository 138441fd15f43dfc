"""One iteration, one decision, one token budget. Pure Python; drives the real engine and the simulator.

    schedule()  decodes first (one token each), then answers that were appended to, then open prefills, then requests whose content has
                landed, then new ones, until the budget is spent
    update()    tokens came back: advance, append, offer full blocks to the prefix cache, finish
    append()    tokens that need no sampling, because a grammar leaves no choice: the request is behind by several, and catches up

Requests come, load, land, are held and go in queues.py.

Invariants:
  - a request that can decode is in every step, and so is one whose answer has begun (max_num_batched_tokens >= max_num_seqs)
  - a running request holds the blocks of all tokens it has; only a decode can need one more
  - a block is offered to the prefix cache after the step that computed it, never while it is in flight
  - the oldest running request is never preempted for a younger one, so somebody always gets through
  - blocks are given to those who wait in the order of the queue: a load that can start takes none from a request that came before it
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Sequence

from .kv.blocks import BlockPool
from .loading import cached_prefix, take_blocks
from .queues import Queues
from .request import Request, Status

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


class Scheduler(Queues):
    """The queues, and who moves on in a step.

    Args:
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: requests that run at once.
        long_prefill_token_threshold: tokens of one prompt in a step; 0 for no limit.
        queues: see `Queues`.
    """

    def __init__(self, pool: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int, long_prefill_token_threshold: int = 0,
                 **queues: Any) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}: decodes would starve")
        super().__init__(pool, max_num_seqs, **queues)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold

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
        for request, reason in ended:
            self._end(request, reason)
        held = [request for request in sampled if request.hold and not request.finished] if self._hands_over else []
        for request in held:
            request.status = Status.HELD
            self.held[request.request_id] = request
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
