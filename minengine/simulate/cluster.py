"""A deployment under load in virtual time: the engine's scheduler, loads, router and prefixes; made up are the times alone.

    result = simulate(Deployment(prefill="DEP8", decode="TP4", decoders=4), sessions, concurrency=66, duration_s=3600)
    result.metrics["e2e_tok_s_user"]

A request's way, prefill and decode apart, as in the cluster (disagg/front.py): routed; computed by a prefill engine, which keeps its blocks; handed
over with its first token; its rows fetched by a decoder, as far as that has not kept them itself since an earlier turn; decoded to its end. What
a model writes takes room, but traces have no ids for it: it is never found by a later prompt. Nothing fails here, so no lease runs out.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

from ..arithmetic.copies import topology
from ..config import ConfigError
from ..disagg.router import NoPlace, RouteRequest, RouterOptions, WorkerSpec
from ..workload.closed_loop import ClosedLoop, Turn
from ..workload.report import Slo
from ..workload.traces import Session
from .agenda import SECOND, Agenda
from .deployment import Deployment
from .engines import Engine, Watch
from .flights import Flight
from .gaps import Gaps
from .limits import check_run
from .nodes import NodePool
from .paths import Cutter
from .requests import SimRequest
from .result import Result
from .routing import PoolIndex, SimRouter
from .stretch import StretchScheduler
from .wire import Shape, Tier, Wire, token_bytes
from .work import Costs, picoseconds

__all__ = ["Cluster", "simulate"]

MOST_REFUSED = 10_000  # in a row from the beginning: sessions of one request each would be refused without end, and without that time passes


def simulate(deployment: Deployment, sessions: Iterable[Session], *, concurrency: int = 66, duration_s: float = 3600.0, seed: int = 0, gap_cap_s: float = 300.0,
             warm_s: float = 0.0, slo: Slo | None = None, costs: Callable[[str, str], Costs] | None = None, stretch: bool = True, watch: Watch | None = None,
             progress: Callable[[float], None] | None = None, **loop: Any) -> Result:
    """Replay sessions in a closed loop for `duration_s`; what is under way then is served to its end, and counts only where it began to.

    Args:
        sessions, concurrency, gap_cap_s: as `ClosedLoop` takes them, and `loop` with its other options.
        warm_s: at the beginning, left out of the metrics.
        slo: for the goodput.
        costs: of engines, by their topology and role ("prefill", "decode", "both"); None: as the deployment's machine has them.
        stretch: advance decode steps in which nothing changes in one go. The result is the same, and is there sooner.
        watch: told of each step or stretch: (engine, start and end in picoseconds, each rank's work in the first step, steps).
        progress: told now and then which share of the time is over.

    Raises:
        ConfigError: a setting that is not possible. AssertionError: a request, a token or a block got lost, which is a fault of the simulator.
    """
    if not isinstance(deployment, Deployment):
        raise ConfigError(f"deployment={deployment!r}: use a Deployment; Deployment.of makes one of a mapping")
    if isinstance(sessions, (str, bytes, Mapping)) or not isinstance(sessions, Iterable):
        raise ConfigError(f"sessions={sessions!r}: use Sessions, as `workload.opening.open_sessions` gives them")
    check_run({"concurrency": concurrency, "duration_s": duration_s, "seed": seed, "gap_cap_s": gap_cap_s, "warm_s": warm_s, "slo": slo, **loop})
    cutter = Cutter(deployment.block_size)
    turns = ClosedLoop(cutter.tapped(sessions), concurrency=concurrency, gap_cap_s=gap_cap_s, seed=seed, **loop)
    cluster = Cluster(deployment, turns, cutter, picoseconds(duration_s), seed=seed, costs=costs or deployment.costs, stretch=stretch, watch=watch)
    cluster.run(picoseconds(warm_s), progress)
    return cluster.result(duration_s, warm_s, slo)


class Cluster:
    def __init__(self, deployment: Deployment, loop: ClosedLoop, cutter: Cutter, end: int, *, seed: int, costs: Callable[[str, str], Costs], stretch: bool,
                 watch: Watch | None) -> None:
        self.deployment, self.loop, self.cutter, self.end = deployment, loop, cutter, end
        self.agenda, self.gaps = Agenda(), Gaps()
        self.engines: dict[str, Engine] = {}
        self.flights: list[Flight] = []
        self.parked: deque[Flight] = deque()  # that wait for a place
        self.under_way = 0
        self.seen = Gaps()  # of the time of the metrics, when that is over
        self._cold = loop.cold()
        self._digest, self._lines = sha256(), []
        self._hand_over: dict[str, int] = {}  # how long it takes, by prefill engine
        d = deployment
        whole = token_bytes(d.model, d.kv_cache_dtype) if d.host_tier_bytes else 0
        self.tier = Tier(d.host_tier_bytes, d.block_size, whole * d.block_size) if whole else None
        if d.topology is not None:
            roles = [("both", "engine", d.topology, d.engines)]
        else:
            roles = [("prefill", "prefill", d.prefill, d.prefills), ("decode", "decode", d.decode, d.decoders)]
        specs = []
        for role, kind, name, number in roles:
            shape, own = topology(name), costs(name, role)
            pool_blocks = self._pool_blocks(kind, name, role)
            for i in range(number):
                self._add_engine(f"{kind}-{i}", role, name, own, pool_blocks, stretch, watch)
                specs.append(WorkerSpec(f"{kind}-{i}", role, 2 * d.max_num_seqs * shape.data, "here"))
                self._hand_over[f"{kind}-{i}"] = max(1, own.hand_over_ps)
        tiered = [spec.name for spec in specs if spec.role != "decode"]
        options = RouterOptions(**{**d.router_options, "lease_s": float("inf")})
        self.router = SimRouter(d.router_policy, specs, block_size=d.block_size, clock=self.agenda.seconds, seed=seed, options=options,
                                index=PoolIndex(self.engines, self.tier, tiered), lengths=self._tell_lengths)

    def _pool_blocks(self, kind: str, ranks: str, role: str) -> int:
        """Of one rank."""
        blocks = self.deployment.tokens_cached(ranks, role) // self.deployment.block_size
        if not blocks:
            raise ConfigError(f"{'prefill_' * (role == 'prefill')}cached_tokens: the pool of one rank of {kind}-0 holds less than a block of "
                              f"{self.deployment.block_size} tokens; use more")
        return blocks

    def _add_engine(self, name: str, role: str, ranks: str, costs: Costs, pool_blocks: int, stretch: bool, watch: Watch | None) -> None:
        d = self.deployment
        schedulers, wires = [], []
        for _ in range(topology(ranks).data):
            wire = None
            if role == "decode":
                wire = Wire(self.agenda, costs, Shape(d.prefill, d.decode, d.model, d.kv_cache_dtype, d.kv_cache_layout, d.block_size), None, self._arrived)
            elif self.tier is not None:
                wire = Wire(self.agenda, costs, None, self.tier, self._arrived)
            schedulers.append(StretchScheduler(NodePool(pool_blocks, d.block_size), max_num_batched_tokens=d.budget(role), max_num_seqs=d.max_num_seqs,
                                               long_prefill_token_threshold=d.long_prefill_token_threshold, connector=wire, load_admission=d.load_admission))
            wires.append(wire)
        engine = Engine(len(self.engines), name, self.agenda, costs, schedulers, self, self.gaps, decodes=role != "prefill",
                        event=d.load_admission == "event", stretch=stretch, watch=watch)
        for wire, scheduler in zip(wires, schedulers):
            if wire is not None:
                wire.engine, wire.scheduler = engine, scheduler
        self.engines[name] = engine

    # --- time --------------------------------------------------------------------------------------------------

    def run(self, warm: int, progress: Callable[[float], None] | None = None) -> None:
        self.agenda.news(warm, self._window, True)
        self.agenda.news(self.end, self._window, False)
        for delay_s, turn in self.loop.begin():
            self._begins(0, delay_s, turn)
        self._next_cold()
        shown = 0
        while self.agenda.next():
            if progress is not None and self.agenda.now >= shown:
                progress(min(1.0, self.agenda.now / self.end))
                shown = self.agenda.now + self.end // 200
        self._check()

    def _window(self, begins: bool) -> None:
        """The time of the metrics begins, or is over."""
        for engine in self.engines.values():
            engine.settle()
        if begins:
            self.gaps.counts.clear()
        else:
            self.seen = self.gaps.copy()

    def _begins(self, now: int, delay_s: float, turn: Turn) -> None:
        when = now + picoseconds(delay_s)
        if when < self.end:  # nobody waits for what would begin later
            self.agenda.news(when, self._arrives, turn)

    def _next_cold(self) -> None:
        at_s, turn = next(self._cold, (None, None))
        if turn is not None:
            self._begins(0, at_s, turn)

    # --- a request's way ---------------------------------------------------------------------------------------

    def _arrives(self, turn: Turn) -> None:
        if turn.cold:
            self._next_cold()
        flight = Flight.of(len(self.flights), turn, self.agenda.now, *self.cutter.runs(turn.session, turn.request, turn.cold))
        self.flights.append(flight)
        self.under_way += 1
        self._note("arrives", flight)
        need = -(-turn.request.input_tokens // self.deployment.block_size)
        room = min(engine.schedulers[0].pool.num_blocks for engine in self.engines.values())
        if need > room:  # as the front says
            flight.error = f"prompt: {turn.request.input_tokens} tokens need {need} blocks and the smallest pool has {room}"
            flight.ended = self.agenda.now
            if len(self.flights) == MOST_REFUSED and all(one.error is not None for one in self.flights):
                raise ConfigError(f"{flight.error}; and so with all {MOST_REFUSED:,} requests so far: use larger pools (prefill_cached_tokens, cached_tokens)")
            self.agenda.news(self.agenda.now + 1, self._follow, flight)
            return
        self.parked.append(flight)
        self._dispatch()

    def _dispatch(self) -> None:
        while self.parked and self._send_off(self.parked[0]):
            self.parked.popleft()

    def _send_off(self, flight: Flight) -> bool:
        turn, now = flight.turn, self.agenda.now
        try:
            route = self.router.route(RouteRequest(request_id=f"{flight.number}", num_tokens=turn.request.input_tokens,
                                                   hashes=flight.chain(self.deployment.block_size), session_id=turn.session))
        except NoPlace:
            return False
        flight.prefill, flight.decode, flight.timeline.routed_s = route.prefill, route.decode, now
        self._note(f"to {route.prefill} {route.decode}", flight)
        engine = self.engines[route.prefill]
        engine.tell(engine.add, flight.new_request(hold=route.prefill != route.decode and flight.output_tokens > 1))
        return True

    def first_token(self, request: SimRequest) -> None:
        flight = request.flight
        self._note("first token", flight)
        self.router.prefilled(request.request_id)
        flight.cached, flight.given, flight.loaded, flight.computed = request.num_cached_tokens, request.base, request.loaded, request.computed
        if request.hold:
            self.agenda.news(self.agenda.now + self._hand_over[flight.prefill], self._hand_over_to, flight)

    def _hand_over_to(self, flight: Flight) -> None:
        engine = self.engines[flight.decode]
        engine.tell(engine.add, flight.new_request(source=flight.request, resumed=1))

    def _arrived(self, request: SimRequest) -> None:
        """Its rows are on its decoder; the prefill engine need not keep them."""
        self._note("transferred", request.flight)
        engine = self.engines[request.flight.prefill]
        engine.tell(engine.release, request.source)

    def ended(self, request: SimRequest) -> None:
        flight = request.flight
        flight.ended, flight.error, flight.request = self.agenda.now, request.error, None
        flight.runs = flight.ends = ()  # the pools keep those that are cached
        self._note(f"ended {request.finish_reason}", flight)
        self.router.finished(request.request_id)
        self.agenda.news(self.agenda.now + 1, self._follow, flight)

    def _follow(self, flight: Flight) -> None:
        """What its end, a moment ago, sets free."""
        self.under_way -= 1
        ended = self.loop.sessions_ended
        for delay_s, turn in self.loop.ended(flight.turn):
            self._begins(self.agenda.now, delay_s, turn)
        if self.loop.sessions_ended > ended:
            self.cutter.forget(flight.turn.session)
        self._dispatch()

    def _tell_lengths(self) -> None:
        for name, engine in self.engines.items():
            if engine.decodes:
                engine.settle()
                for scheduler in engine.schedulers:
                    for request in scheduler.running:
                        self.router.progressed(request.request_id, request.num_tokens)

    # --- what it came to ---------------------------------------------------------------------------------------

    def _note(self, what: str, flight: Flight) -> None:
        self._lines.append(f"{self.agenda.now} {what} {flight.number}\n")
        if len(self._lines) >= 4096:
            self._digest.update("".join(self._lines).encode())
            self._lines.clear()

    def _check(self) -> None:
        """Raise AssertionError unless all that came in has gone out."""
        assert not self.parked and not self.under_way, f"{self.under_way} requests are under way and nothing happens any more"
        self.router.check()
        assert not self.router.stats()["places"], "places of the router leaked"
        for engine in self.engines.values():
            for scheduler in engine.schedulers:
                scheduler.check()
                scheduler.pool.check([])
            assert not any(engine.loads), f"{engine.name}: requests leaked"
        if self.tier is not None:
            self.tier.pool.check([])

    def result(self, duration_s: float, warm_s: float, slo: Slo | None) -> Result:
        for name, engine in self.engines.items():
            self._lines.append(f"{name} {engine.counts.steps} {engine.counts.dummies} {engine.counts.busy_ps} {engine.counts.tokens}\n")
        self._digest.update("".join(self._lines).encode())
        self._lines.clear()
        return Result.of(self, duration_s, warm_s, slo, self._digest.hexdigest())
