"""One engine over ranks that have requests of their own and share the experts: DEP. All take the same number of steps, together.

A rank is a whole engine: scheduler, cache, sampler. Rank 0 hands each new request to one of them. A step of rank 0's is a step of all: each takes
one forward, with whatever its scheduler chose or as a dummy, and the experts' exchanges hold them together layer by layer. While no rank has a
request, nobody steps, and the other ranks' processes sleep.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..engine_args import EngineArgs
from ..kv.blocks import block_hashes
from ..prompt import Prompt
from ..request import OutputKind, Request, RequestError, RequestOutput, Resume, SamplingParams, Status
from .comm import Parallel
from .engine import RankEngine
from .first import FirstEngine
from .group import Group, Member
from .prefixes import LEAST, Prefixes

__all__ = ["DataEngine"]


class News(NamedTuple):
    """What another rank learns at the beginning of a step."""

    added: list[tuple[str, Prompt, SamplingParams, dict[str, Any]]]
    aborted: list[str]


class Report(NamedTuple):
    """What a rank tells at the end of one."""

    outputs: list[RequestOutput]  # their prompts' token ids left out: rank 0 has them
    refused: list[tuple[str, str]]  # request ids, and why
    num_running: int
    num_waiting: int
    held: list[tuple[str, Any]]  # request ids of those whose blocks are kept for another engine from now on, and where they lie
    idle: bool  # the next step has nothing to compute here, until something changes


class DataEngine(FirstEngine):
    """Rank 0 of the group: an engine with requests of its own, and the front of the others.

    What can be seen of `pool`, `scheduler`, `kv` and `times` is rank 0's.

    Attributes:
        hands_over: the other ranks have connectors, so that they too can take what comes from another engine, and hold what goes to one.
    """

    hands_over = False

    def __init__(self, args: EngineArgs, group: Group, parallel: Parallel, **options: Any) -> None:
        super().__init__(args, group, parallel, **options)
        self._rank_of: dict[str, int] = {}  # of unfinished requests that are not on this one
        self._news = [News([], []) for _ in range(group.size)]  # by rank; rank 0 needs none
        self._told = [Report([], [], 0, 0, [], True)] * group.size
        self._held: list[tuple[str, Any]] = []
        self._woken = False
        self._prefixes = Prefixes(max(LEAST, group.size * self.pool.num_blocks))  # as many as can be cached

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: str | Sequence[int] | Mapping[str, Any] | Prompt, params: SamplingParams | None = None, *,
                    data_parallel_rank: int | None = None, cache_salt: str | None = None, output_kind: OutputKind = OutputKind.FINAL_ONLY,
                    arrival_s: float | None = None, seed: int | None = None, hold: bool = False, source: Any = None, resume: Resume | None = None) -> Request:
        """`LLMEngine.add_request` on one of the ranks.

        Args:
            data_parallel_rank: which one; None: the one that has cached most of the prompt, if that is known and it is not much busier, else
                the one with the fewest unfinished requests.
            hold, source: for rank 0, unless `hands_over`.
        """
        size = self.group.size
        if data_parallel_rank is not None and not (isinstance(data_parallel_rank, int) and 0 <= data_parallel_rank < size):
            raise RequestError(f"data_parallel_rank={data_parallel_rank!r}: use 0 to {size - 1}, or None")
        prompt = prompt if isinstance(prompt, Prompt) else self.read_prompt(prompt)
        with self.lock:
            if data_parallel_rank is None and not self.hands_over and (hold or source is not None):
                data_parallel_rank = 0
            rank = self._rank_for(prompt, prompt.cache_salt if cache_salt is None else cache_salt, data_parallel_rank)
            handed_over = {"resume": resume, "hold": hold, "source": source}
            if rank == 0:
                return super().add_request(request_id, prompt, params, cache_salt=cache_salt, output_kind=output_kind, arrival_s=arrival_s, seed=seed,
                                           **handed_over)
            # A draw of rank 0's, wherever a request goes: its tokens do not depend on that. And it is made here too, so that what is wrong is said now.
            seed = self._seeds.getrandbits(64) if seed is None else seed
            request = self._new_request(request_id, prompt, params, cache_salt, output_kind, arrival_s, seed, **handed_over)
            self._refuse_known(request_id)
            self.scheduler.check_fits(request)
            if request.params.structured_outputs is not None:
                self.grammars.compile(request.params.structured_outputs)
            read = Prompt(request.prompt, request.prompt_token_ids, request.cache_salt)
            own = {"output_kind": output_kind, "arrival_s": request.timeline.arrival_s, "seed": seed, **handed_over}
            self._news[rank].added.append((request_id, read, request.params, own))
            self.requests[request_id], self._rank_of[request_id] = request, rank
            self.idle = False
        return request

    def _rank_for(self, prompt: Prompt, salt: str | None, asked: int | None) -> int:
        known = self.args.enable_prefix_caching and (salt is None or isinstance(salt, str))  # else the request is refused
        hashes = block_hashes(prompt.token_ids, self.args.block_size, salt) if known else []
        loads = [len(self.requests) - len(self._rank_of)] + [0] * (self.group.size - 1)
        for rank in self._rank_of.values():
            loads[rank] += 1
        rank = self._prefixes.choose(hashes, loads) if asked is None else asked
        self._prefixes.given(hashes, rank)
        return rank

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """As `LLMEngine`'s; on another rank a request ends with the next step, which returns its output."""
        with self.lock:
            rank = self._rank_of.get(request_id)
            if rank is None:
                return super().abort_request(request_id)
            self._news[rank].aborted.append(request_id)
            self.idle = False
            return None

    def has_unfinished_requests(self) -> bool:
        return super().has_unfinished_requests() or bool(self._rank_of)

    def take_held(self) -> list[tuple[str, Any]]:
        """Requests of other ranks that are held since the last call, and where their blocks lie. Their connectors see to them from here on."""
        held, self._held = self._held, []
        return held

    def wake(self) -> None:
        """Something has changed on another rank: it may have something to compute. For any thread."""
        with self.lock:
            self._woken, self.idle = True, False

    # --- one iteration ------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step of every rank, if one of them has a request."""
        with self.lock:
            if not self.has_unfinished_requests():
                self.idle = True
                return []
            news, self._news = self._news, [News([], []) for _ in range(self.group.size)]
            over = {request_id for one in news for request_id in one.aborted}
            computes = super().has_unfinished_requests() or not self._rank_of.keys() <= over
            self._woken = False
            if not computes:
                self.idle = True
        with self.group.watched():
            self.group.ask(step, *((one, computes) for one in news[1:]))
            outputs = self.lockstep() if computes else []
            reports = self.group.results()
            with self.lock:
                self._told[1:] = reports
                for report in reports:
                    outputs += self._taken(report)
                news_wait = any(one.added or one.aborted for one in self._news)
                # Whoever only waits for blocks from elsewhere has nothing to compute; who has brought them says so by `wake`.
                self.idle &= not (self._woken or news_wait) and all(report.idle for report in reports)
                self.idle |= not self.has_unfinished_requests()
        return outputs

    def _taken(self, report: Report) -> list[RequestOutput]:
        """Another rank's outputs."""
        outputs = []
        for output in report.outputs:
            request = self.requests.get(output.request_id)
            if request is not None:  # else it is held there, and was given up
                output.metrics.routed_s = request.timeline.routed_s
                outputs.append(replace(output, prompt_token_ids=request.prompt_token_ids))
        for request_id, error in report.refused:
            request = self.requests[request_id]
            request.status, request.finish_reason, request.error = Status.FINISHED, "error", error
            outputs.append(self._output(request))
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id], self._rank_of[output.request_id]
        for request_id, source in report.held:
            del self.requests[request_id], self._rank_of[request_id]
            self._held.append((request_id, source))
        return outputs

    # --- what can be seen from outside --------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return super().num_running + sum(report.num_running for report in self._told)

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + sum(report.num_waiting for report in self._told) + sum(len(news.added) for news in self._news)

    def reset_prefix_cache(self) -> None:
        self._prefixes.forget()
        self.group.call(reset_prefix_cache)


# --- what the other ranks run ------------------------------------------------------------------------------------


def step(member: Member, news: News, computes: bool) -> Report:
    """The news, then one step."""
    engine: RankEngine = member.engine
    refused, outputs = [], []
    for request_id, prompt, params, own in news.added:
        try:
            engine.add_request(request_id, prompt, params, **own)
        except RequestError as error:
            refused.append((request_id, str(error)))
    for request_id in news.aborted:
        output = engine.abort_request(request_id)
        if output is not None:
            outputs.append(output)
    if member.transfers is not None:
        member.transfers.poll()
    if computes:
        outputs += engine.lockstep()
    held = member.transfers.hold(outputs) if member.transfers is not None else []
    waiting = engine.num_waiting + len(engine.scheduler.loading) + len(engine.scheduler.ready)
    return Report([replace(output, prompt_token_ids=[]) for output in outputs], refused, engine.num_running, waiting, held, engine.idle)


def reset_prefix_cache(member: Member) -> None:
    member.engine.pool.reset_prefix_cache()
