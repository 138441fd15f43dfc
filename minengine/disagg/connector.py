"""A worker's KVConnector: everything that brings rows into its pool or takes them out, and the thread that sees to it.

    find, load, cancel, store     the scheduler asks, under the engine's lock: noted, never waited for
    poll                          the step loop, between steps: hands over what has landed (load_admission="poll")
    hold, push_to, release        a prefill worker: keep rows for a decoder, write them to it, let them go
    resume, fail                  a decoder that rows are pushed to: the front says how the prefill ended
    the I/O thread                moves rows; looks often while anything is under way, and hardly ever while nothing is

Order of locks: the engine's, then `_cond`. The agent is called with neither: a transfer may wait, a step must not.
"""
from __future__ import annotations

import logging
import secrets
from collections import deque
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Callable, Sequence

from ..config import ConfigError
from ..kv.fingerprint import model_fingerprint
from ..request import Request, RequestError, Resume
from .agents import Agent, TransferError
from .holds import Holds
from .io_thread import IOThread, guarded
from .kv_io import KVIO
from .links import Gone, Links, Met
from .loads import Load, Pull, Pushed, TierLoad
from .moved import TransferFacts, TransferTotals
from .pushes import Push, Pushes
from .source import KVSource, KVTarget, Notice, PoolFacts, RankFacts, Reserve, check_pools

__all__ = ["WorkerConnector"]

log = logging.getLogger(__name__)

SOON_S, LATER_S, IDLE_S = 0.0003, 0.005, 0.1  # between two looks: while rows move; while notices are waited for; while nothing is (a peer may ask all the same)
KEPT_FACTS = 10_000


class WorkerConnector:
    """
    Args:
        engine: an LLMEngine; this becomes its scheduler's connector.
        agent: moves bytes between workers (disagg/transfer.py); None: there is only a tier.
        tier: a kv.tier_stack.TierStack, or None.
        wake: called, with no lock held, when a sleeping step loop should look at the engine again.
        on_reserved: called with (request_id, KVTarget) by the I/O thread when a request with a `Reserve` has its blocks.
        kv_transfer_timeout_s: what a transfer may take; None: what the engine's arguments say.
        fingerprint: of the engine's weights, where it is known already.
        links, others: of an engine whose ranks split every step: to the other ranks, and how to reach their parts of the pool. Each of them reads
            its own share of what is loaded.

    Raises:
        TransferError: the agent cannot register the pool.
    """

    def __init__(self, engine: Any, agent: Agent | None = None, *, tier: Any = None, wake: Callable[[], None] | None = None,
                 on_reserved: Callable[[str, KVTarget], None] | None = None, kv_transfer_timeout_s: float | None = None, fingerprint: str | None = None,
                 links: Links | None = None, others: Sequence[RankFacts] = ()) -> None:
        args = engine.args
        self.engine, self.agent, self.tier, self.links = engine, agent, tier, links
        self.wake, self.on_reserved = wake or (lambda: None), on_reserved or (lambda request_id, target: None)
        self.timeout_s = args.kv_transfer_timeout_s if kv_transfer_timeout_s is None else kv_transfer_timeout_s
        self.event = args.load_admission == "event"
        self.totals = TransferTotals()
        self._facts: deque[TransferFacts] = deque(maxlen=KEPT_FACTS)
        self._thread = IOThread(self._turn, self._pause_s)
        self._cond = self._thread.cond
        self._loads: dict[str, Load] = {}  # that the scheduler waits for, by request
        self._moving: list[Load] = []  # that the I/O thread sees to; the scheduler may have given them up
        self._landed: deque[Load] = deque()  # poll() has not looked yet
        self._storing = 0  # blocks
        self._said = ""  # why a tier has refused a block, as it was logged last
        self._reservations = count(secrets.randbits(62))  # none that an earlier start of this worker had
        self.io = self.holds = self.pushes = None
        if agent is not None:
            self.io = KVIO(agent, engine.kv, fingerprint or model_fingerprint(engine.model), kv_heads=engine.config.kv_heads,
                           topology=args.ranks.name if links is not None else "TP1")
            self.io.facts = replace(self.io.facts, others=tuple(others))
            self.holds = Holds(engine, self.io, args.kv_lease_s, self.totals)
            self.pushes = Pushes(engine, self.io, self._cond, self._push_ended, self.timeout_s)
            if args.kv_transfer == "push_layers":
                engine.runner.on_layer = self.pushes.on_layer
            self._thread.start()
        engine.scheduler.connector = engine.scheduler.loads.connector = self

    # --- KVConnector: under the engine's lock ----------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> int:
        return self.tier.find(hashes) if self.tier is not None else 0

    def load(self, request: Request, block_ids: Sequence[int], num_cached_blocks: int, hashes: Sequence[bytes]) -> None:
        if request.source is None:
            load = TierLoad(request, block_ids, num_cached_blocks)
            load.started, load.quiet = True, False
            with self._cond:
                self._loads[request.request_id] = load
            request.timeline.retrieve_start_s = self.engine.clock()
            load.job = self.tier.load(hashes, load.block_ids[num_cached_blocks: num_cached_blocks + len(hashes)], lambda job: self._tier_loaded(load, job))
            return
        if isinstance(request.source, Reserve):
            load = Pushed(request, block_ids, num_cached_blocks, next(self._reservations), self.timeout_s, self.engine.args.kv_lease_s)
        else:
            load = Pull(request, block_ids, num_cached_blocks, self.io.fence() if self.io else None, self.timeout_s, self.links)
        with self._cond:
            self._loads[request.request_id] = load
            self._moving.append(load)
            self._thread.wake()

    def cancel(self, request: Request) -> bool:
        with self._cond:
            load = self._loads.get(request.request_id)
            if load is None or load.request is not request:
                return True
            del self._loads[request.request_id]
            if isinstance(load, TierLoad):
                load.quiet = load.quiet or load.job.cancel()
            load.isolated = not load.quiet
            self._thread.wake()  # to stop it, and to tell the other side
            return load.quiet

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> bool:
        if self.tier is None:
            return False
        blocks = list(block_ids)
        with self._cond:
            self._storing += len(blocks)
        self.tier.store(hashes, blocks, lambda job: self._tier_stored(blocks, job.num_blocks))
        return True

    # --- the step loop ---------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Tell the scheduler of what has landed or failed since the last call; returns how many requests that were."""
        handed = 0
        while self._landed:
            handed += self._hand_over(self._landed.popleft())
        return handed

    def hold(self, request_id: str) -> KVSource | None:
        """A request's prefill is done (Status.HELD): lease its rows to a decoder. None: they are being pushed, or nobody wants them, and
        the request ends by itself.

        Raises:
            KeyError: no such request is held.
            OutOfLeases: too many are held; release this one.
        """
        pushed = self.pushes.close(request_id)
        source = self.holds.hold(request_id)
        with self._cond:
            self._thread.wake()
        return None if pushed else source

    def push_to(self, request_id: str, target: KVTarget) -> bool:
        """Push the rows of a request that is added next; False: its decoder has called it off already."""
        return self.pushes.add(request_id, target)

    def renew(self, request_id: str) -> None:
        """Its decoder will fetch this request's rows, but has no room yet; harmless if nothing is leased of it."""
        self.holds.renew(request_id)

    def release(self, request_id: str) -> None:
        """Nobody will fetch this request's rows (any more); an unknown one is left alone."""
        self.pushes.break_off(request_id, "the request was given up")
        self.holds.release(request_id)
        with self._cond:
            self._thread.wake()

    def resume(self, request_id: str, resume: Resume) -> bool:
        """The prefill of a request whose rows are pushed here ended with this; it goes on when they are there. False: it is not waited for."""
        return self._tell(request_id, resume, "")

    def fail(self, request_id: str, resume: Resume | None = None) -> bool:
        """The rows will not come: compute them here, going on after what the front has already. False: they are not waited for."""
        return self._tell(request_id, resume, "the front says that its prefill failed")

    def _tell(self, request_id: str, resume: Resume | None, error: str) -> bool:
        with self._cond:
            load = self._loads.get(request_id)
            if not isinstance(load, Pushed) or load.told:
                return False
            load.resume, load.told = resume, True
            if error:
                load.broken, load.facts.error = True, error
            self._thread.wake()
            return True

    # --- from outside ----------------------------------------------------------------------------------------

    @property
    def facts(self) -> PoolFacts:
        return self.io.facts

    def check(self, other: PoolFacts) -> None:
        """
        Raises:
            ConfigError: rows cannot move between that worker's pool and this one.
        """
        check_pools(self.facts, other)

    @property
    def pools(self) -> tuple[PoolFacts, ...]:
        """Of all ranks that have one of their own."""
        return (self.facts,) if self.io is not None else ()

    @property
    def num_free_blocks(self) -> int:
        return self.engine.num_free_blocks

    def counts(self) -> dict[str, float]:
        """Counts and seconds of `totals`, by name."""
        return {name: value for name, value in asdict(self.totals).items() if name != "outcomes"}

    def connect(self, pool: PoolFacts) -> None:
        """Get to know another worker's agents before the first transfer."""
        self._thread.do(lambda: self._meet(pool))

    def peer_gone(self, agent: str) -> None:
        """That worker's process has ended (it is not merely slow): nothing of it touches this one's memory from now on."""
        self._thread.do(lambda: self._forget(agent))

    @property
    def idle(self) -> bool:
        """Nothing is loading, held, stored, pushed or in quarantine."""
        with self._cond:
            busy = self._loads or self._moving or self._landed or self._storing or self._thread.todo
        return not (busy or (self.io is not None and (len(self.holds) or len(self.pushes))))

    def take_facts(self) -> list[TransferFacts]:
        """Of every transfer that ended since the last call."""
        return [self._facts.popleft() for _ in range(len(self._facts))]

    def describe(self) -> str:
        moves = self.agent.describe() if self.agent is not None else "no transfers"
        return f"{moves}; load_admission={self.engine.args.load_admission}, kv_transfer={self.engine.args.kv_transfer}; tier: {'yes' if self.tier else 'none'}"

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads of this and of the tier; transfers under way are left to the agent, which is its owner's to close."""
        self._thread.close(timeout_s)
        if self.tier is not None:
            self.tier.close()

    # --- the I/O thread --------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        """Until the next look, with `_cond`."""
        if any(not load.offered and (isinstance(load, Pull) or load.told) for load in self._moving) or self.pushes.flying:
            return SOON_S
        if self._moving or len(self.holds) or len(self.pushes):
            return LATER_S
        return IDLE_S

    def _turn(self) -> None:
        for agent, message in self.agent.notifications():
            guarded(lambda: self._notice(agent, Notice.decode(message)))
        now_s = self.engine.clock()
        for load in list(self._moving):
            guarded(lambda: self._see_to(load, now_s))
        guarded(lambda: self.pushes.advance(now_s))
        if self.holds.look(now_s):
            self.wake()

    def _see_to(self, load: Load, now_s: float) -> None:
        """One look at a load that this thread moves."""
        with self._cond:
            given_up = self._loads.get(load.request.request_id) is not load
            if not given_up and not load.started:
                load.started, load.quiet = True, False
                begin = True
            else:
                begin = False
        if begin and isinstance(load, Pushed):
            guarded(lambda: self._announce(load))
        if not given_up and not load.outcome:
            try:
                load.advance(self.io, now_s)
            except Exception as error:  # none that is known; the request must not wait for ever
                log.exception("the load of %s", load.request)
                load.end("failed", repr(error))
        if given_up and not load.outcome:
            load.end("cancelled")
        if load.outcome:
            self._finish(load, now_s)

    def _announce(self, load: Pushed) -> None:
        try:
            self.io.meet(load.source.pool)
        except (TransferError, ConfigError) as error:
            load.broken, load.facts.error = True, str(error)
            with self._cond:
                load.quiet = True  # it has not been told where to write
        else:
            self.on_reserved(load.request.request_id, load.target(self.io))

    def _finish(self, load: Load, now_s: float) -> None:
        """A load has its outcome: tell the scheduler; when nothing touches its blocks any more, tell the other side, and forget it."""
        try:
            quiet = load.quiet or load.stop(self.io, now_s)
        except (TransferError, ConfigError) as error:
            log.warning("%s", error)
            quiet = False
        with self._cond:
            load.quiet = quiet
        if not load.offered:
            load.offered = True
            self._count(load.facts)
            if load.outcome != "cancelled":
                self._offer(load)
        if not quiet:
            return
        with self._cond:
            self._moving.remove(load)
            isolated, load.isolated = load.isolated, False
        if isolated:
            self.engine.settled(load.request)
            self.wake()
        load.let_go(self.io)

    def _notice(self, agent: str, notice: Notice | None) -> None:
        if notice is None:
            self.totals.strange_notices += 1
        elif notice.kind == "fetch":
            if self.holds.end(notice.number):
                self.wake()
        elif notice.kind == "stop":
            self.pushes.stop(agent, notice)
        else:
            load = next((load for load in self._moving if isinstance(load, Pushed) and (load.reservation, load.facts.peer) == (notice.number, agent)), None)
            if load is not None and not load.quiet:
                load.notice(notice, self.engine.clock())
                with self._cond:
                    load.quiet = True

    def _meet(self, pool: PoolFacts) -> None:
        if self.links is not None:
            self.links.tell(Met(pool))
        self.io.connect(pool.metadata)
        self.io.connect_sources(pool)

    def _forget(self, agent: str) -> None:
        self.io.part(agent)
        if self.links is not None:
            self.links.tell(Gone(agent))
        self.pushes.gone(agent)
        now_s = self.engine.clock()
        for load in self._moving:
            if load.facts.peer == agent:
                load.gone(now_s)

    def _push_ended(self, push: Push) -> None:
        self._count(push.facts)
        if push.closed:
            self.holds.release(push.request_id)
            self.wake()

    # --- to the scheduler, from any thread, with no lock held ------------------------------------------------

    def _offer(self, load: Load) -> None:
        if self.event:
            self._hand_over(load)
        else:
            self._landed.append(load)
        self.wake()

    def _hand_over(self, load: Load) -> bool:
        """False: it was given up meanwhile."""
        request, engine = load.request, self.engine
        seen_s = engine.clock()
        with engine.lock:
            with self._cond:
                if self._loads.get(request.request_id) is not load:
                    return False
                del self._loads[request.request_id]
                quiet = load.quiet
                load.isolated = not quiet
            error = load.facts.error
            if isinstance(load, Pushed) and load.resume is not None:
                try:
                    engine.resume_request(request.request_id, load.resume)
                except RequestError as problem:  # it was complete: its front knows, and aborts it
                    load.outcome, error = "failed", str(problem)
            if isinstance(load, TierLoad):
                request.timeline.polled_s, request.timeline.handed_off_s = seen_s, engine.clock()
            if load.outcome == "landed":
                engine.landed(request, load.num_blocks)
            else:
                engine.load_failed(request, error, settled=quiet)
        return True

    def _tier_loaded(self, load: TierLoad, job: Any) -> None:
        """On the tier's thread."""
        facts, timeline = load.facts, load.request.timeline
        load.num_blocks = facts.num_blocks = job.num_blocks
        facts.peer, facts.nbytes, facts.seconds = "+".join(job.media), job.num_bytes, job.end_s - job.queued_s
        load.outcome = facts.outcome = "landed" if not job.cancelled else "cancelled"
        with self._cond:
            load.quiet = True
            isolated, load.isolated = load.isolated, False
        self._count(facts)
        if isolated:
            self.engine.settled(load.request)
            self.wake()
        else:
            timeline.retrieve_end_s = self.engine.clock()  # now; the job's own stamps are of another clock
            self._offer(load)

    def _tier_stored(self, blocks: list[int], kept: int) -> None:
        """On the tier's thread: `kept` of these blocks are in a tier now."""
        self.engine.stored(blocks)
        with self._cond:
            self._storing -= len(blocks)
            self.totals.tier_stored_blocks += kept
            self.totals.tier_refused_blocks += len(blocks) - kept
        if kept < len(blocks) and (why := next((one.last_refusal for one in self.tier.tiers if one.last_refusal), "")) != self._said:
            self._said = why
            log.warning("a tier does not keep what it is given: %s", why)

    def _count(self, facts: TransferFacts) -> None:
        with self._cond:
            self.totals.add(facts)
            self._facts.append(facts)
