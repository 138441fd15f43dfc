"""An engine of one or several data ranks in virtual time: who is told what when, and steps that all ranks take together.

Each rank has a scheduler and a pool of its own. A step lasts as long as its slowest rank takes; a rank with nothing to compute takes a dummy
forward, and is counted. News reach a scheduler between two steps (load_admission="poll") or at once ("event").
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..parallel.prefixes import LEAST, SLACK, Prefixes
from ..request import Request, Status
from ..schedule import Step
from .agenda import Agenda
from .gaps import WIDTH, Gaps
from .nodes import Chain, Run
from .requests import SimRequest
from .stretch import Span, StretchScheduler, leader
from .work import NOTHING, Costs, Work, attended

__all__ = ["Engine", "EngineCounts", "Listener", "RunPrefixes", "work_of"]


class Listener(Protocol):
    """Who is told of what an engine has done, at the end of the step that did it."""

    def first_token(self, request: SimRequest) -> None: ...

    def ended(self, request: SimRequest) -> None: ...


Watch = Callable[[str, int, int, Sequence[Work], int], None]  # engine, start and end in picoseconds, each rank's work in the first step, steps


@dataclass
class EngineCounts:
    steps: int = 0
    dummies: int = 0  # forwards of ranks that had nothing to compute, in steps of others
    busy_ps: int = 0
    tokens: int = 0  # of answers
    prefill_tokens: int = 0
    preemptions: int = 0
    events: int = 0  # steps and stretches


class RunPrefixes(Prefixes):
    """`Prefixes` over runs: a run counts as many blocks as it has, and is remembered or forgotten whole."""

    def __init__(self, most: int = LEAST) -> None:
        super().__init__(most)
        self._rank_of: OrderedDict[Run, int] = OrderedDict()  # type: ignore[assignment]
        self._blocks = 0

    def choose(self, hashes: Chain, loads: Sequence[int]) -> int:
        known, last = 0, None
        for run, start, stop in hashes.pieces():
            if run not in self._rank_of:
                break
            known, last = known + stop - start, run
        least = min(loads)
        if last is not None and 2 * known >= len(hashes) and loads[self._rank_of[last]] <= least + SLACK:
            return self._rank_of[last]
        return loads.index(least)

    def given(self, hashes: Chain, rank: int) -> None:
        for run, _, _ in reversed(list(hashes.pieces())):
            self._blocks += 0 if run in self._rank_of else run.length
            self._rank_of[run] = rank
            self._rank_of.move_to_end(run)
        while self._blocks > self.most:
            run, _ = self._rank_of.popitem(last=False)
            self._blocks -= run.length


def work_of(step: Step, index_topk: int | None) -> Work:
    """Count a rank's step, before `update` books it."""
    context = rows = 0
    for request in step.decodes:
        length = request.num_computed_tokens + 1
        context += length
        rows += length if index_topk is None else min(length, index_topk)
    tokens = pairs = prefill_rows = 0
    for request, n in step.prefills:
        tokens += n
        pairs += attended(request.num_computed_tokens, n, None)
        prefill_rows += attended(request.num_computed_tokens, n, index_topk)
    return Work(len(step.decodes), context, rows, tokens, pairs, prefill_rows, len(step.sampled()))


class Engine:
    """
    Args:
        number: its place in the order of engines.
        decodes: it goes on with requests after their first token.
        event: news are acted on at once; else between steps.
        stretch: advance steps in which nothing changes in one go.
        watch: called at the end of each step or stretch.
    """

    def __init__(self, number: int, name: str, agenda: Agenda, costs: Costs, schedulers: Sequence[StretchScheduler], listener: Listener, gaps: Gaps, *,
                 decodes: bool = True, event: bool = False, stretch: bool = True, watch: Watch | None = None) -> None:
        self.number, self.name, self.agenda, self.costs, self.schedulers, self.listener = number, name, agenda, costs, schedulers, listener
        self.gaps, self.decodes, self.event, self.stretch, self.watch = gaps, decodes, event, stretch, watch
        self.counts = EngineCounts()
        self.prefixes = RunPrefixes(max(LEAST, sum(scheduler.pool.num_blocks for scheduler in schedulers)))  # as many as can be cached
        self.loads = [0] * len(schedulers)  # unfinished requests of each rank
        self._rank_of: dict[SimRequest, int] = {}
        self._steps: list[Step] | None = None  # that are being computed
        self._works: list[Work] = []
        self._span = Span(0, 0, 0, 0)
        self._done = 0  # steps of the span that are booked
        self._due: int | None = None  # when the next boundary is
        self._version = 0
        self._inbox: list[tuple[Callable[..., None], tuple]] = []

    # --- news --------------------------------------------------------------------------------------------------

    def tell(self, action: Callable[..., None], *args: object) -> None:
        """Something reaches the engine now; `action` is done when it may change what a scheduler sees."""
        if self._steps is None:
            action(*args)
            self._plan(self.agenda.now)
            return
        self.settle()
        if self._span.steps > self._done + 1:  # the step that is being computed is the last one that does not know
            self._span = self._span._replace(steps=self._done + 1)
            self._plan(self._span.end(self._done + 1))
        if self.event:
            action(*args)
        else:
            self._inbox.append((action, args))

    def _plan(self, when: int) -> None:
        if self._due != when:
            self._due = when
            self._version += 1
            self.agenda.boundary(when, self.number, self._version, self._boundary)

    def add(self, request: SimRequest) -> None:
        """A new request, for one of the ranks."""
        rank = 0
        if len(self.schedulers) > 1:
            pool = self.schedulers[0].pool
            prompt = request.hashes(request.num_prompt_tokens // pool.block_size, pool.block_size)
            rank = self.prefixes.choose(prompt, self.loads)
            self.prefixes.given(prompt, rank)
        self.loads[rank] += 1
        self._rank_of[request] = rank
        self.schedulers[rank].add(request)

    def release(self, request: SimRequest) -> None:
        """What was held of it is elsewhere now."""
        for scheduler in self.schedulers:
            if scheduler.release(request.request_id) is not None:
                return

    def settle(self) -> None:
        """Book the steps of a stretch that have ended before now, so that what is seen of the engine is what it is now."""
        if self._span.steps > self._done + 1:
            over = self._span.over(self.agenda.now)
            if over > self._done:
                self._advance(over)

    # --- steps -------------------------------------------------------------------------------------------------

    def _boundary(self, version: int) -> None:
        if version != self._version:
            return
        self._due = None
        if self._steps is not None:
            self._end_steps()
        inbox, self._inbox = self._inbox, []
        for action, args in inbox:
            action(*args)
        self._begin_steps()

    def _begin_steps(self) -> None:
        now = self.agenda.now
        while True:
            steps = [scheduler.schedule(now) for scheduler in self.schedulers]
            failed = [request for step in steps for request in step.failed]
            for step in steps:
                for request in step.preempted:
                    request.preempted()
                    self.counts.preemptions += 1
            for request in failed:
                self._leaves(request)
                self.listener.ended(request)
            if not failed or any(step.decodes or step.prefills for step in steps):
                break
        if not any(step.decodes or step.prefills for step in steps):
            return
        self._steps, self._done = steps, 0
        most = self.costs.index_topk
        works = [work_of(step, most) if step.decodes or step.prefills else NOTHING for step in steps]
        for step in steps:
            for request in step.decodes:
                request.works(1)
            for request, n in step.prefills:
                request.works(n)
        times = self.costs.rank_ps(works)
        span = Span(now, max(1, *times), 0, 1)
        if self.stretch:
            span = self._stretched(span, steps, works, times)
        self._span = span
        self._works = works
        self._plan(span.end(span.steps))

    def _stretched(self, span: Span, steps: Sequence[Step], works: Sequence[Work], times: Sequence[int]) -> Span:
        """How many steps nothing changes in, and how long they take."""
        most = min(scheduler.most_steps(step) for scheduler, step in zip(self.schedulers, steps))
        if most <= 1:
            return span
        topk, later = self.costs.index_topk, []
        for step, work in zip(steps, works):
            grow = work.decodes
            if topk is not None:
                below = [request.num_computed_tokens + 1 for request in step.decodes if request.num_computed_tokens + 1 < topk]
                grow = len(below)
                if below:
                    most = min(most, topk - max(below) + 1)  # then another function holds
            later.append(work._replace(context=work.context + work.decodes, attended=work.attended + grow))
        growth = [after - before for before, after in zip(times, self.costs.rank_ps(later))]
        slowest, steps_so = leader(times, growth)
        return Span(span.start, span.first, growth[slowest], min(most, steps_so)) if times[slowest] >= 1 and growth[slowest] >= 0 else span

    def _advance(self, done: int) -> None:
        """Book the stretch's steps up to number `done`, all but its last one at most."""
        span, first, now = self._span, self._done, self._span.end(done)
        decodes = [request for step in self._steps for request in step.decodes]
        start = first
        if not first:
            for request in decodes:
                self._gap(request, span.end(1))
            start = 1
        for length, count in span.equal(start, done, WIDTH):
            self.gaps.counts[length] += count * len(decodes)
        for scheduler, step in zip(self.schedulers, self._steps):
            scheduler.advance(step.decodes, done - first, now)
        self._count(self._steps, done - first, len(decodes))
        self._done = done

    def _end_steps(self) -> None:
        now, steps, span = self.agenda.now, self._steps, self._span
        if span.steps > self._done + 1:
            self._advance(span.steps - 1)
        self._steps = None
        sampled = [step.sampled() for step in steps]
        for requests in sampled:
            for request in requests:
                self._gap(request, now)
        self.counts.prefill_tokens += sum(n for step in steps for _, n in step.prefills)
        self._count(steps, 1, sum(map(len, sampled)))
        self.counts.events += 1
        self.counts.busy_ps += now - span.start
        ended: list[Request] = []
        for scheduler, step, requests in zip(self.schedulers, steps, sampled):
            if step.decodes or step.prefills:
                ended += scheduler.update(step, [0] * len(requests), now)
        for requests in sampled:
            for request in requests:
                if request.status is Status.HELD:
                    self._leaves(request)
                if len(request.timeline.token_s) == 1:
                    self.listener.first_token(request)
        for request in ended:
            self._leaves(request)
            self.listener.ended(request)
        if self.watch is not None:
            self.watch(self.name, span.start, now, self._works, span.steps)

    def _count(self, ranks: Sequence[Step], times: int, tokens: int) -> None:
        """Steps like this one, which yield `tokens` tokens each."""
        self.counts.steps += times
        self.counts.tokens += tokens * times
        self.counts.dummies += times * sum(not (step.decodes or step.prefills) for step in ranks)

    def _gap(self, request: SimRequest, now: int) -> None:
        stamps = request.timeline.token_s
        if stamps.count:
            self.gaps.add(now - stamps.last)

    def _leaves(self, request: SimRequest) -> None:
        """It is not among the rank's unfinished requests any more."""
        rank = self._rank_of.pop(request, None)
        if rank is not None:
            self.loads[rank] -= 1
            request.check()
