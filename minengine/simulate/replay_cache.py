"""Real sessions replayed against caches: how many of their blocks are found, on the device or in a tier below, and by which routing.

The engine's own `BlockPool` is each worker's cache and the cluster's own `Router` routes, fed by the pools' events. Nothing is computed, so
this tells hit rates and shares of the work, no times: a request holds its blocks for as long as its trace recorded (`api_time_s`; not at all
where that is missing), and its prompt's blocks can be found from its start on. A request that finds no room waits for the worker's others.
Output tokens take room, but the traces give no ids for them: what a model wrote counts when it first comes back inside a prompt.
"""
from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Callable, Iterable, Sequence

from ..disagg.router import Router, RouteRequest, RouterOptions, WorkerSpec
from ..kv.blocks import BlockPool
from ..kv.events import EventLog
from ..workload.traces import Session, TraceRequest
from .clock import VirtualClock

__all__ = ["CacheReplay", "Chains", "num_unique_blocks", "replay_cache"]


@dataclass
class CacheReplay:
    """What a replay came to. Blocks are the prompts' full ones."""

    blocks: int = 0  # asked for, of all requests
    device_hits: int = 0
    host_hits: int = 0
    requests: list[int] = field(default_factory=list)  # of each worker
    asked: list[int] = field(default_factory=list)  # of each worker: blocks of its prompts
    computed: list[int] = field(default_factory=list)  # of each worker: blocks found nowhere
    waited: int = 0  # requests that found no room at first
    most_in_flight: int = 0

    @property
    def device_hit_rate(self) -> float:
        return self.device_hits / self.blocks

    @property
    def hit_rate(self) -> float:
        """Device and host together."""
        return (self.device_hits + self.host_hits) / self.blocks

    def max_over_mean(self, load: str) -> float:
        """The busiest worker's `requests`, `asked` or `computed` over the mean of all."""
        per_worker = getattr(self, load)
        return max(per_worker) / (sum(per_worker) / len(per_worker))


def num_unique_blocks(sessions: Iterable[Session], chains: Chains | None = None) -> int:
    """Blocks with different contents or different pasts: the room that a cache needs to keep everything."""
    chains = Chains() if chains is None else chains
    return len({h for session in sessions for agent in session.agents for request in agent for h in chains.hashes(session.id, request)})


def replay_cache(sessions: Sequence[Session], policy: str = "kv_aware", *, workers: int = 4, blocks_each: int | None = None, host_blocks: int = 0,
                 sticky: bool | None = None, seed: int = 0, start_within_s: float = 600.0, gap_cap_s: float = 300.0, by_agent: bool = False,
                 options: RouterOptions | None = None, chains: Chains | None = None) -> CacheReplay:
    """Replay sessions once, each from a moment drawn by `seed` within `start_within_s`; each agent goes on when its last request has ended.

    Args:
        policy: the router's.
        blocks_each: room of each worker; None keeps everything.
        host_blocks: room of a tier that all workers share, below their devices; what is computed is stored there too, least recently used goes.
        sticky: whether a session stays on one worker; None leaves it to the policy.
        gap_cap_s: an agent that pauses longer than this goes on after it.
        by_agent: a session's subagents are sessions of their own for the router.
        chains: the prompts' hashes from an earlier replay of the same sessions, which then need not be made again.

    Raises:
        ValueError: no sessions, or a request that does not fit into `blocks_each`.
    """
    if not sessions:
        raise ValueError("sessions: is empty; give at least one")
    chains = Chains() if chains is None else chains
    agents = [agent for session in sessions for agent in session.agents if agent]
    longest = max(_room(request) for agent in agents for request in agent)
    if blocks_each is None:  # every block once, and every agent with a request of no use to others: nobody waits, nothing is evicted
        blocks_each = num_unique_blocks(sessions, chains) + sum(max(map(_room, agent)) for agent in agents)
    if longest > blocks_each:
        raise ValueError(f"blocks_each={blocks_each}: a request of these sessions takes {longest}; give at least that")
    return _Replay(sessions, policy, workers, blocks_each, host_blocks, sticky, seed, start_within_s, gap_cap_s, by_agent, options or RouterOptions(),
                   chains).run()


def _room(request: TraceRequest) -> int:
    return -(-(request.input_tokens + request.output_tokens) // request.block_size)


class Chains:
    """Hashes of prompts' blocks, chained as an engine's are; a number for each new chain does for one process. Remembers every prompt asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], bytes] = {}
        self._known: dict[tuple[str, int], tuple[TraceRequest, list[bytes]]] = {}  # by identity, kept alive with it: prompts are long

    def hashes(self, session: str, request: TraceRequest) -> list[bytes]:
        known = self._known.get((session, id(request)))
        if known is not None:
            return known[1]
        parent: object = session
        chain = []
        for hash_id in request.hash_ids[:request.input_tokens // request.block_size]:
            h = self._numbers.get((parent, hash_id))
            if h is None:
                h = self._numbers[parent, hash_id] = len(self._numbers).to_bytes(8, "big")
            chain.append(h)
            parent = h
        self._known[session, id(request)] = request, chain
        return chain


class _HostTier:
    """Hashes in order of use. Every worker's log says what happens to a block it told of, as each looks at the shared folder by itself."""

    def __init__(self, num_blocks: int, logs: Sequence[EventLog]) -> None:
        self.num_blocks, self.logs = num_blocks, logs
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def run(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))

    def use(self, hashes: Sequence[bytes], log: EventLog | None) -> None:
        """Stored or loaded. The prompt's first block is used last, so that prefixes live longest, as in the pool."""
        for h in reversed(hashes):
            if log is not None and h not in self.blocks:
                log.stored(h, medium="host")
            self.blocks[h] = None
            self.blocks.move_to_end(h)
        while len(self.blocks) > self.num_blocks:
            gone, _ = self.blocks.popitem(last=False)
            for each in self.logs:
                each.removed(gone, "host")


class _Worker:
    def __init__(self, name: str, num_blocks: int, block_size: int, tells: bool) -> None:
        self.name = name
        self.pool = BlockPool(num_blocks, block_size)
        self.log = self.pool.events = EventLog() if tells else None
        self.waiting: deque[tuple[_Turn, float]] = deque()  # requests without room, since when


@dataclass
class _Turn:
    """One request of one agent."""

    agent: list[TraceRequest]
    number: int
    session: str
    router_session: str
    request_id: str = ""
    worker: _Worker | None = None
    hashes: list[bytes] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    @property
    def request(self) -> TraceRequest:
        return self.agent[self.number]


class _Replay:
    def __init__(self, sessions: Sequence[Session], policy: str, workers: int, blocks_each: int, host_blocks: int, sticky: bool | None, seed: int,
                 start_within_s: float, gap_cap_s: float, by_agent: bool, options: RouterOptions, chains: Chains) -> None:
        block_size = sessions[0].block_size
        self.clock, self.chains, self.gap_cap_s = VirtualClock(), chains, gap_cap_s
        self.workers = {f"w{i}": _Worker(f"w{i}", blocks_each, block_size, tells=policy == "kv_aware") for i in range(workers)}
        settings = {**vars(options), "lease_s": float("inf"), "session_idle_s": float("inf")}
        if sticky is not None:
            settings["sticky"] = sticky
        self.router = Router(policy, [WorkerSpec(name) for name in self.workers], block_size=block_size, clock=self.clock, seed=seed,
                             options=RouterOptions(**settings))
        self.host = _HostTier(host_blocks, [worker.log for worker in self.workers.values() if worker.log]) if host_blocks else None
        self.result = CacheReplay(requests=[0] * workers, asked=[0] * workers, computed=[0] * workers)
        self.events: list[tuple[float, int, Callable[[_Turn], None], _Turn]] = []
        self.order, self.in_flight = count(), 0
        rng = Random(seed)
        for session in sessions:
            at_s = rng.uniform(0.0, start_within_s)
            for i, agent in enumerate(session.agents):
                if agent:
                    start_s = at_s + min(agent[0].start_s, self._paused(session, agent[0]))
                    self.at(start_s, self.arrives, _Turn(agent, 0, session.id, f"{session.id}/{i}" if by_agent else session.id))

    def _paused(self, session: Session, first: TraceRequest) -> float:
        """When a subagent starts, with the session's own pauses before it cut as they are in the replay."""
        now_s = end_s = 0.0
        for request in session.agents[0]:
            if request.start_s > first.start_s:
                break
            now_s += min(max(0.0, request.start_s - end_s), self.gap_cap_s)
            end_s = request.start_s + (request.api_time_s or 0.0)
            now_s += request.api_time_s or 0.0
        return now_s + min(max(0.0, first.start_s - end_s), self.gap_cap_s)

    def at(self, time_s: float, what: Callable[[_Turn], None], turn: _Turn) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), what, turn))

    def run(self) -> CacheReplay:
        while self.events:
            time_s, _, what, turn = heapq.heappop(self.events)
            self.clock.advance(max(0.0, time_s - self.clock()))
            what(turn)
        for worker in self.workers.values():
            worker.pool.check([])
        self.router.check()
        return self.result

    def arrives(self, turn: _Turn) -> None:
        request = turn.request
        turn.request_id = f"{turn.session}-{next(self.order)}"
        turn.hashes = self.chains.hashes(turn.session, request)
        route = self.router.route(RouteRequest(request_id=turn.request_id, num_tokens=request.input_tokens, hashes=turn.hashes,
                                               session_id=turn.router_session))
        turn.worker = self.workers[route.prefill]
        self.in_flight += 1
        self.result.most_in_flight = max(self.result.most_in_flight, self.in_flight)
        turn.worker.waiting.append((turn, self.clock()))
        self.admit(turn.worker)

    def admit(self, worker: _Worker) -> None:
        """Those that wait, first come first served, while there is room."""
        while worker.waiting:
            turn, since_s = worker.waiting[0]
            request, pool = turn.request, worker.pool
            usable = turn.hashes[:(request.input_tokens - 1) // request.block_size]  # the last token is computed, always
            found = pool.find(usable)
            new = _room(request) - len(found)
            if len(found) + new > pool.num_free_blocks and new > pool.num_free_blocks - pool.num_idle(found):
                break
            worker.waiting.popleft()
            pool.share(found)
            turn.table = found + pool.allocate(new)
            loaded = self.host.run(usable[len(found):]) if self.host else 0
            for i in range(len(found), len(turn.hashes)):
                pool.register(turn.table[i], turn.hashes[i], turn.hashes[i - 1] if i else None)
            if self.host:
                self.host.use(turn.hashes[len(found):], worker.log)
            self.count(turn, len(found), loaded, waited=self.clock() > since_s)
            for name, each in self.workers.items():
                self.router.apply(name, each.log.take() if each.log else ())
            self.router.prefilled(turn.request_id)
            self.at(self.clock() + (request.api_time_s or 0.0), self.ends, turn)

    def count(self, turn: _Turn, found: int, loaded: int, waited: bool) -> None:
        result, i, blocks = self.result, int(turn.worker.name[1:]), len(turn.hashes)
        result.blocks += blocks
        result.device_hits += found
        result.host_hits += loaded
        result.requests[i] += 1
        result.asked[i] += blocks
        result.computed[i] += blocks - found - loaded
        result.waited += waited

    def ends(self, turn: _Turn) -> None:
        turn.worker.pool.release(turn.table)
        self.router.finished(turn.request_id)
        self.in_flight -= 1
        if turn.number + 1 < len(turn.agent):
            request, following = turn.request, turn.agent[turn.number + 1]
            gap_s = following.start_s - request.start_s - (request.api_time_s or 0.0)
            self.at(self.clock() + min(max(0.0, gap_s), self.gap_cap_s), self.arrives, _Turn(turn.agent, turn.number + 1, turn.session, turn.router_session))
        self.admit(turn.worker)
