"""Who gets a request: a prefill worker and a decoder, chosen by what each has cached and how much each has to do.

What they cost is in `costs`; which of them can be asked at all is decided here: a process that ended, a worker that keeps failing (`breaker`) and
a decoder that is full get nothing.

A router talks to nobody and reads no clock of its own: the cluster's front drives it, and the simulator the same one in virtual time.
Not thread-safe; its caller serialises.
"""
from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import Any, Callable, Iterable, Literal

from ..kv.events import KVEvent, Snapshot
from .breaker import Breaker, State
from .costs import RouterOptions, choose, decode_cost, prefill_cost
from .kv_index import KVIndex, Overlap
from .route import NoPlace, NoWorker, Role, Route, RouteRequest, WorkerSpec
from .sessions import Sessions

__all__ = ["POLICIES", "NoPlace", "NoWorker", "Route", "RouteRequest", "Router", "RouterOptions", "WorkerSpec"]

POLICIES = ("random", "round_robin", "kv_aware")


@dataclass
class _Worker:
    spec: WorkerSpec
    breaker: Breaker
    up: bool = True
    prefilling: dict[str, int] = field(default_factory=dict)  # request -> blocks of it that are still to be computed
    held: dict[str, int] = field(default_factory=dict)  # request -> its blocks; one place each
    prefill_blocks: int = 0  # sums of the two
    decode_blocks: int = 0
    recent: float = 0.0
    num_routed: int = 0

    def takes(self, role: Role) -> bool:
        return self.spec.role in (role, "both")

    @property
    def available(self) -> bool:
        return self.up and self.breaker.lets_through

    @property
    def has_place(self) -> bool:
        return len(self.held) < self.spec.places


@dataclass
class _Held:
    route: Route
    blocks: int
    until_s: float
    prefilled: bool = False


class Router:
    """Routes requests over workers. A request holds a place on its decoder from `route` until it has ended or its lease has run out."""

    def __init__(self, policy: str = "kv_aware", workers: Iterable[WorkerSpec] = (), *, block_size: int, clock: Callable[[], float],
                 seed: int = 0, options: RouterOptions = RouterOptions(), index: KVIndex | None = None) -> None:
        """
        Args:
            block_size: tokens that one of a request's hashes stands for.
            index: says what the workers have cached; None: one that learns it from their events (`apply`).

        Raises:
            ValueError: an unknown policy, a name that is there twice, or no worker for a role.
        """
        if policy not in POLICIES:
            raise ValueError(f"router_policy={policy!r}: use one of {', '.join(POLICIES)}")
        self.policy, self.block_size, self.options, self._clock = policy, block_size, options, clock
        self.sticky = policy == "kv_aware" if options.sticky is None else options.sticky
        self.index = KVIndex() if index is None else index
        self._random = Random(seed)
        self._workers: dict[str, _Worker] = {}
        for spec in workers:
            if spec.name in self._workers:
                raise ValueError(f"workers: {spec.name!r} is there twice")
            breaker = Breaker(clock, options.failure_threshold, options.failure_window_s, options.cool_off_s, options.max_cool_off_s)
            self._workers[spec.name] = _Worker(spec, breaker)
            self.index.add(spec.name, spec.machine)
        roles = {spec.role for spec in (worker.spec for worker in self._workers.values())}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ValueError(f"workers: have the roles {', '.join(sorted(roles)) or 'of nobody'}; give engines that do both, or prefill and decode workers")
        self.together = roles == {"both"}
        self._held: OrderedDict[str, _Held] = OrderedDict()  # in order of their leases' ends
        self._lapsed: list[str] = []
        self._sessions = Sessions(clock, options.session_idle_s)
        self._turn = {"prefill": 0, "decode": 0}
        self.counters = dict.fromkeys(("routed", "sticky", "diverted", "moved", "trials", "lapsed", "resyncs"), 0)

    # --- a request's way ----------------------------------------------------------------------------------

    def route(self, request: RouteRequest) -> Route:
        """Choose the workers of a request and take its place.

        Raises:
            ValueError: the request holds a place already.
            NoWorker: none of a role it needs is up. NoPlace: all decoders that are up are full. Neither changes anything.
        """
        self._lapse()
        if request.request_id in self._held:
            raise ValueError(f"request {request.request_id!r} holds a place already; end it before it is routed again")
        overlaps = self._overlaps(request)
        blocks = -(-request.num_tokens // self.block_size)
        decode = self._pick_decoder(request, blocks, overlaps)
        prefill = decode if self.together else self._pick("prefill", self._candidates("prefill", request.exclude), blocks, overlaps)
        missing = max(0, blocks - overlaps[prefill.spec.name].total)
        trials = [worker.breaker.sent(request.request_id) for worker in {id(w): w for w in (prefill, decode)}.values()]
        route = Route(request.request_id, prefill.spec.name, decode.spec.name, overlaps[prefill.spec.name], any(trials))
        prefill.prefilling[request.request_id] = missing
        prefill.prefill_blocks += missing
        decode.held[request.request_id] = blocks
        decode.decode_blocks += blocks
        self._charge(prefill, missing + self.options.request_weight)
        if decode is not prefill:
            self._charge(decode, self.options.transfer_scale * (blocks - overlaps[decode.spec.name].device) + self.options.request_weight)
        self._held[request.request_id] = _Held(route, blocks, self._clock() + self.options.lease_s)
        for worker in {id(w): w for w in (prefill, decode)}.values():
            worker.num_routed += 1
        self.counters["routed"] += 1
        self.counters["trials"] += route.trial
        return route

    def prefilled(self, request_id: str) -> bool:
        """Its first token is there: nothing of it is left to prefill, and the prefill worker has proved itself."""
        held = self._renew(request_id)
        if held and not held.prefilled:
            held.prefilled = True
            self._prefill_over(held)
            self._workers[held.route.prefill].breaker.succeeded(request_id)
        return held is not None

    def progressed(self, request_id: str, num_tokens: int | None = None) -> bool:
        """Its decoder sent a token: the place is held for another `lease_s`. `num_tokens` says how long the request is now."""
        held = self._renew(request_id)
        if held:
            decode = self._workers[held.route.decode]
            decode.breaker.succeeded(request_id)
            if num_tokens is not None:
                blocks = -(-num_tokens // self.block_size)
                decode.decode_blocks += blocks - decode.held[request_id]
                decode.held[request_id] = blocks
        return held is not None

    def finished(self, request_id: str) -> bool:
        """It ended as it should, on both workers. False: it holds no place (any more)."""
        held = self._end(request_id)
        if held:
            for name in {held.route.prefill, held.route.decode}:
                self._workers[name].breaker.succeeded(request_id)
        return held is not None

    def cancelled(self, request_id: str) -> bool:
        """Its client left, or the request was wrong: that says nothing of a worker."""
        held = self._end(request_id)
        if held:
            for name in {held.route.prefill, held.route.decode}:
                self._workers[name].breaker.dropped(request_id)
        return held is not None

    def failed(self, request_id: str, worker: str | None = None) -> bool:
        """`worker` (default: its decoder) failed it; it can be routed again."""
        if worker is not None and worker not in self._workers:
            raise KeyError(worker)
        held = self._end(request_id)
        if held:
            bad = worker or held.route.decode
            for name in {held.route.prefill, held.route.decode}:
                if name != bad:
                    self._workers[name].breaker.dropped(request_id)
            self._workers[bad].breaker.failed(request_id)
        return held is not None

    def expired(self) -> list[str]:
        """Requests whose lease ran out since the last call; their places are back. A trial of which nothing was heard has failed."""
        self._lapse()
        lapsed, self._lapsed = self._lapsed, []
        return lapsed

    # --- a worker's life ----------------------------------------------------------------------------------

    def worker_down(self, name: str) -> list[str]:
        """Its process ended: it gets nothing until `worker_up`, and its cache is gone.

        Returns:
            the requests that had something to do there; they hold no place now and can be routed again.
        """
        worker = self._workers[name]
        if worker.up:
            worker.up = False
            worker.breaker.failed()
        self.index.restart(name)
        return self._evict(worker)

    def worker_up(self, name: str) -> None:
        """It was started again, with an empty cache; its events count from 1. If it has failed too often it waits for its trial."""
        worker = self._workers[name]
        if not worker.up:
            worker.up = True
            worker.breaker.well()
            self.index.restart(name)

    def worker_sick(self, name: str) -> list[str]:
        """It does not answer, and may come back with all that it had: it gets nothing until `worker_well`. Returns as `worker_down`."""
        worker = self._workers[name]
        worker.breaker.sick()
        return self._evict(worker)

    def worker_well(self, name: str) -> None:
        """It answers again: it may have its trial."""
        self._workers[name].breaker.well()

    def available(self, name: str) -> bool:
        return self._workers[name].available

    def state(self, name: str) -> Literal["down"] | State:
        worker = self._workers[name]
        return worker.breaker.state if worker.up else "down"

    # --- cache events -------------------------------------------------------------------------------------

    def apply(self, worker: str, events: Iterable[KVEvent]) -> bool:
        """Take in what a worker's cache did. False: a number is missing; ask the worker for a snapshot and `resync`."""
        return self.index.apply(worker, events)

    def needs_resync(self, worker: str) -> bool:
        return self.index.needs_resync(worker)

    def resync(self, worker: str, snapshot: Snapshot) -> None:
        self.counters["resyncs"] += 1
        self.index.resync(worker, snapshot)

    def stats(self) -> dict[str, Any]:
        """JSON-ready: what it knows and has done."""
        self._lapse()
        return {"policy": self.policy, "sticky": self.sticky, "sessions": len(self._sessions), "places": len(self._held), "counters": dict(self.counters),
                "workers": {name: {"role": worker.spec.role, "state": self.state(name), "places": len(worker.held), "of_places": worker.spec.places,
                                   "prefill_blocks": worker.prefill_blocks, "decode_blocks": worker.decode_blocks, "routed": worker.num_routed,
                                   "known_blocks": self.index.known(name), "needs_resync": self.index.needs_resync(name)}
                            for name, worker in self._workers.items()}}

    def check(self) -> None:
        """Raise AssertionError unless the places, the queued work and their sums are those of the requests that are held."""
        for name, worker in self._workers.items():
            assert worker.held.keys() == {r for r, held in self._held.items() if held.route.decode == name}, f"{name}: places leaked"
            queued = {r for r, held in self._held.items() if held.route.prefill == name and not held.prefilled}
            assert worker.prefilling.keys() == queued, f"{name}: work leaked"
            assert worker.decode_blocks == sum(worker.held.values()) and worker.prefill_blocks == sum(worker.prefilling.values()), f"{name}: sums are off"
            assert len(worker.held) <= worker.spec.places, f"{name}: more requests than places"
            trial = worker.breaker.trial
            assert trial is None or trial in self._held, f"{name}: its trial {trial} holds no place"

    # --- choosing -----------------------------------------------------------------------------------------

    def _overlaps(self, request: RouteRequest) -> dict[str, Overlap]:
        if self.policy != "kv_aware" or not request.hashes:
            return dict.fromkeys(self._workers, Overlap())
        return self.index.overlaps(request.hashes, self._workers)

    def _candidates(self, role: Role, exclude: frozenset[str]) -> list[_Worker]:
        able = [worker for worker in self._workers.values() if worker.takes(role) and worker.available]
        if not able:
            waits = [worker.breaker.retry_after_s for worker in self._workers.values() if worker.takes(role) and worker.up]
            raise NoWorker("engine" if self.together else f"{role} worker", min((wait for wait in waits if wait is not None), default=None))
        return [worker for worker in able if worker.spec.name not in exclude] or able

    def _pick_decoder(self, request: RouteRequest, blocks: int, overlaps: dict[str, Overlap]) -> _Worker:
        if not self.together:
            self._candidates("prefill", request.exclude)  # none: refused before anything is changed
        candidates = self._candidates("decode", request.exclude)
        free = [worker for worker in candidates if worker.has_place] or [
            worker for worker in self._candidates("decode", frozenset()) if worker.has_place]
        if not free:
            raise NoPlace(f"all {len(candidates)} decoders that are up are full; a request that ends makes room")
        if not self.sticky or request.session_id is None:
            return self._pick("decode", free, blocks, overlaps)
        bound = self._sessions.decoder_of(request.session_id)
        keeps = self._keeper(bound, request, free, overlaps)
        if keeps is not None:
            self.counters["sticky"] += 1
            chosen = keeps
        else:
            chosen = self._pick("decode", free, blocks, overlaps)
            if bound is not None and self._workers[bound].available and bound not in request.exclude:
                self.counters["diverted"] += 1  # it is full, or has nothing of this prompt: this once the session goes elsewhere
            else:
                self.counters["moved"] += bound is not None
                bound = chosen.spec.name
        self._sessions.bind(request.session_id, bound)
        return chosen

    def _keeper(self, bound: str | None, request: RouteRequest, free: list[_Worker], overlaps: dict[str, Overlap]) -> _Worker | None:
        """Where a session stays: on its decoder. An engine that prefills too must still have half of the prompt, else whichever has: what is
        to be computed anew (a subagent's prompt, a compacted one, one that was evicted) may as well be computed where there is less to do.
        """
        able = {worker.spec.name: worker for worker in free}
        if not self.together or not request.hashes or self.policy != "kv_aware" or bound is None:
            return able.get(bound)
        holder = max(able, key=lambda name: (overlaps[name].device, name == bound))
        return able[holder] if 2 * overlaps[holder].device >= len(request.hashes) else None

    def _pick(self, role: Role, candidates: list[_Worker], blocks: int, overlaps: dict[str, Overlap]) -> _Worker:
        on_trial = [worker for worker in candidates if worker.breaker.needs_trial]
        if on_trial:
            return on_trial[0]  # its cost would never win it a request while the others do well
        if self.policy == "random":
            return candidates[self._random.randrange(len(candidates))]
        if self.policy == "round_robin":
            names = list(self._workers)
            n = len(names)
            chosen = min(candidates, key=lambda worker: (names.index(worker.spec.name) - self._turn[role]) % n)
            self._turn[role] = (names.index(chosen.spec.name) + 1) % n
            return chosen
        idlest = min(worker.prefill_blocks for worker in candidates)
        costs = [self._cost(role, worker, blocks, overlaps[worker.spec.name], idlest) for worker in candidates]
        return candidates[choose(costs, self.options.temperature, self._random)]

    def _cost(self, role: Role, worker: _Worker, blocks: int, overlap: Overlap, idlest: int) -> float:
        num_requests = len(worker.held.keys() | worker.prefilling.keys())
        if role == "decode" and not self.together:
            return decode_cost(self.options, blocks, overlap, worker.decode_blocks, num_requests, worker.recent)
        stays = blocks if self.together else 0
        return prefill_cost(self.options, blocks, overlap, worker.prefill_blocks, worker.prefill_blocks - idlest, worker.decode_blocks + stays,
                            num_requests, worker.recent)

    def _charge(self, worker: _Worker, blocks: float) -> None:
        keep = math.exp(-1 / self.options.recent_requests)
        for other in self._workers.values():
            if other.spec.role == worker.spec.role:
                other.recent *= keep
        worker.recent += blocks

    # --- places -------------------------------------------------------------------------------------------

    def _renew(self, request_id: str) -> _Held | None:
        self._lapse()
        held = self._held.get(request_id)
        if held:
            held.until_s = self._clock() + self.options.lease_s
            self._held.move_to_end(request_id)
        return held

    def _lapse(self) -> None:
        now_s = self._clock()
        while self._held:
            first, held = next(iter(self._held.items()))
            if held.until_s > now_s:
                break
            self._end(first)
            for name in {held.route.prefill, held.route.decode}:
                if self._workers[name].breaker.trial == first:
                    self._workers[name].breaker.failed(first)
            self._lapsed.append(first)
            self.counters["lapsed"] += 1

    def _end(self, request_id: str) -> _Held | None:
        held = self._held.pop(request_id, None)
        if held:
            decode = self._workers[held.route.decode]
            decode.decode_blocks -= decode.held.pop(request_id)
            self._prefill_over(held)
        return held

    def _prefill_over(self, held: _Held) -> None:
        prefill = self._workers[held.route.prefill]
        prefill.prefill_blocks -= prefill.prefilling.pop(held.route.request_id, 0)

    def _evict(self, worker: _Worker) -> list[str]:
        gone = [request_id for request_id in self._held if request_id in worker.held or request_id in worker.prefilling]
        for request_id in gone:
            held = self._end(request_id)
            for name in {held.route.prefill, held.route.decode}:
                self._workers[name].breaker.dropped(request_id)
        return gone
