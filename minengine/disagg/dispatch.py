"""Who computes which request now: sent off, handed over, given up, begun again elsewhere.

Everything here is called with the lock; nothing waits.
"""
from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from threading import RLock
from typing import Any, Mapping, NamedTuple, Sequence

from ..prompt import Prompt
from ..request import RequestOutput, SamplingParams, Timeline
from ..streams import AsyncFront
from .flight import Flight
from .messages import Abort, AddRequest, Delta, HeldRequest, Release, Renew, Resumed
from .plan import ClusterArgs
from .router import NoPlace, NoWorker, Router, RouteRequest
from .source import Reserve
from .supervise import Worker

__all__ = ["Dispatcher", "Read"]

MAX_RENEWALS = 9  # of a lease, each after a third of it: rows wait for a decoder for four leases at most
MAX_DEATHS = 3  # a request whose workers have ended so often may be what ends them


class Read(NamedTuple):
    """A prompt that was read, and the hashes of its full blocks for the router."""

    prompt: Prompt
    cache_salt: str | None
    hashes: list[bytes]


class Dispatcher(AsyncFront):
    """Of an AsyncFront what deals with requests; workers and router are the subclass's."""

    cluster_args: ClusterArgs
    _lock: RLock
    _router: Router
    _workers: Mapping[str, Worker]
    _seeds: Random
    _flights: dict[str, Flight]  # unfinished requests
    _keys: dict[str, Flight]  # by the key under which a worker has them now
    _parked: deque[Flight]  # that wait for a worker, or for a place
    num_retries: int

    def _submit(self, request_id: str, read: Read, params: SamplingParams, cache_salt: str | None, session_id: str | None, arrival_s: float) -> None:
        with self._lock:
            # What is drawn depends on no worker, so that another can go on with it; as LLMEngine draws it.
            seed = self._seeds.getrandbits(64)
            params = replace(params, seed=seed) if params.seed is None else params
            flight = Flight(request_id, read.prompt, params, read.cache_salt, session_id, read.hashes, Timeline(arrival_s=arrival_s))
            self._flights[request_id] = flight
            self._parked.append(flight)
            self._dispatch()

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            flight = self._flights.get(request_id)
            if flight is not None:
                self._leave(flight)
                self._close_flight(flight, "cancelled")
                self._publish([flight.end("abort", self.clock())])
                self._dispatch()

    # --- who computes what -------------------------------------------------------

    def _dispatch(self) -> None:
        """Send off those that wait for a worker, the first first, as far as there are places."""
        while self._parked and (self._parked[0].request_id not in self._flights or self._send_off(self._parked[0])):
            self._parked.popleft()

    def _send_off(self, flight: Flight) -> bool:
        route = RouteRequest(request_id=flight.request_id, num_tokens=flight.num_tokens, hashes=flight.hashes, session_id=flight.session_id,
                             exclude=frozenset(flight.avoid))
        try:
            chosen = self._router.route(route)
            flight.prefill, flight.decode = chosen.prefill, chosen.decode
        except NoPlace:
            return False
        except NoWorker:
            alone = self._decoder_alone()
            if alone is None:
                return False
            flight.prefill = flight.decode = alone
        if flight.timeline.routed_s is None:
            flight.timeline.routed_s = self.clock()
        if flight.source is not None:
            source, flight.source = flight.source, None
            self._router.prefilled(flight.request_id)
            self._give(flight, flight.decode, source=source)
        elif flight.prefill == flight.decode or flight.params.max_tokens - len(flight.token_ids) == 1:
            self._give(flight, flight.prefill)  # its next token is its last: nothing is to be handed over
        elif self.engine_args.kv_transfer == "push_layers":
            self._give(flight, flight.decode, source=Reserve(self._workers[flight.prefill].ready.pools[0]))
            flight.awaits = flight.prefill
        else:
            self._give(flight, flight.prefill, hold=True)
        return True

    def _decoder_alone(self) -> str | None:
        """Without a prefill worker a decoder reads prompts too: the one that has the fewest requests."""
        if not self.cluster_args.prefill or any(self._router.available(name) for name, worker in self._workers.items() if worker.role == "prefill"):
            return None
        load = dict.fromkeys((name for name, worker in self._workers.items() if worker.role == "decode" and worker.state == "up"), 0)
        for flight in self._flights.values():
            if flight.worker in load:
                load[flight.worker] += 1
        return min(load, key=load.get, default=None)

    def _give(self, flight: Flight, name: str, *, resumes: str | None = None, **how: Any) -> None:
        """Send it to a worker, under a key of its own; `resumes`: the one that it had there."""
        flight.worker, flight.awaits = name, None
        self._keys[flight.new_key()] = flight
        timeline = Timeline(arrival_s=flight.timeline.arrival_s, routed_s=flight.timeline.routed_s)
        message = AddRequest(key=flight.key, prompt=flight.prompt, params=flight.params, cache_salt=flight.cache_salt, timeline=timeline,
                             resume=flight.resume, **how)
        self._workers[name].send(message if resumes is None else Resumed(resumes, message))

    def _leave(self, flight: Flight) -> None:
        """Whoever has it shall let go of it; what comes of it from now on is stale."""
        if flight.key is not None:
            self._keys.pop(flight.key, None)
            self._workers[flight.worker].send(Abort(flight.key))
            flight.worker = flight.key = flight.awaits = None
        self._let_go(flight)

    def _let_go(self, flight: Flight) -> None:
        """Nobody needs what is kept for it elsewhere."""
        if flight.held is not None:
            name, key = flight.held
            self._workers[name].send(Release(key))
        if flight.reserved is not None:
            name, key = flight.reserved
            self._keys.pop(key, None)
            self._workers[name].send(Abort(key))
        flight.held = flight.reserved = flight.source = None

    def _renew_leases(self, now_s: float) -> None:
        """What is held for a decoder that has not shown that it has it, perhaps because it is full, stays longer; but not for ever: a prefill
        worker whose blocks are all waiting computes nothing."""
        for flight in self._flights.values():
            if flight.held is not None and now_s >= flight.renew_s and flight.renewals < MAX_RENEWALS:
                name, key = flight.held
                flight.renewals += 1
                flight.renew_s = now_s + self._workers[name].start.args.kv_lease_s / 3
                self._workers[name].send(Renew(key))

    def _close_flight(self, flight: Flight, how: str) -> None:
        """`how` is the router's word for its end: "finished" or "cancelled"."""
        self._flights.pop(flight.request_id, None)
        if flight.key is not None:
            self._keys.pop(flight.key, None)
        self._let_go(flight)
        getattr(self._router, how)(flight.request_id)

    def _retry(self, flights: Sequence[Flight], worker: Worker, why: str, *, died: bool) -> None:
        """Go on elsewhere with what this worker had."""
        for flight in reversed(flights):
            flight.deaths += died and flight.worker == worker.name
            self._leave(flight)
            self._router.cancelled(flight.request_id)
            if flight.deaths >= MAX_DEATHS:
                self._close_flight(flight, "cancelled")
                self._publish([flight.end("error", self.clock(), f"the request was given up: {flight.deaths} workers ended while they computed it, "
                                                                 f"the last one {worker.name}, which {why}")])
                continue
            self.num_retries += 1
            flight.avoid = {worker.name}
            self._parked.appendleft(flight)  # the oldest first
        self._dispatch()

    def _lost(self, name: str, evicted: Sequence[str]) -> list[Flight]:
        """The requests that were there, or could not begin without it. Those that were to go there after their prefill find another decoder
        then."""
        for request_id in evicted:
            if request_id in self._flights:
                self._flights[request_id].decode = None
        for flight in self._flights.values():
            if flight.reserved is not None and flight.reserved[0] == name and flight.worker != name:
                self._keys.pop(flight.reserved[1], None)
                self._workers[name].send(Abort(flight.reserved[1]))
                flight.reserved = None
        return [flight for flight in self._flights.values() if name in (flight.worker, flight.awaits)]

    def _booked(self, worker: Worker, deltas: list[Delta]) -> None:
        outputs: list[RequestOutput] = []
        for delta in deltas:
            flight = self._keys.get(delta.key)
            if flight is None:
                continue
            flight.awaits = None
            if flight.key != delta.key:  # its decoder waited for rows that did not come, and has computed them itself
                flight.reserved = None
                self._keys.pop(flight.key, None)
                self._workers[flight.worker].send(Abort(flight.key))
                flight.worker, flight.key = worker.name, delta.key
            outputs.append(flight.take(delta))
            if delta.finish_reason is not None:
                self._close_flight(flight, "finished")
            elif len(flight.token_ids) == len(delta.token_ids):
                self._router.prefilled(flight.request_id)
            else:
                self._let_go(flight)  # its decoder has shown that it has the rows
                self._router.progressed(flight.request_id, flight.num_tokens)
        if outputs:
            self._publish(outputs)
        if self._parked and deltas:
            self._dispatch()

    def _hand_over(self, worker: Worker, held: HeldRequest) -> None:
        flight = self._keys.pop(held.key, None)
        if flight is None:
            worker.send(Release(held.key))
            return
        resumes, flight.reserved = flight.reserved, None
        flight.held = (worker.name, held.key)
        flight.renew_s, flight.renewals = self.clock() + worker.start.args.kv_lease_s / 3, 0
        if resumes is not None:
            self._keys.pop(resumes[1], None)
            self._give(flight, resumes[0], source=held.source, resumes=resumes[1])
        elif flight.decode is not None:
            self._give(flight, flight.decode, source=held.source)
        else:
            flight.worker = flight.key = None
            flight.source = held.source
            self._router.cancelled(flight.request_id)
            self._parked.appendleft(flight)
            self._dispatch()
