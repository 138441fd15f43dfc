"""push_layers: a prefill worker writes each layer's rows to the decoder as soon as that layer of a chunk is computed.

    the step loop        on_layer: "this layer of these tokens is in the pool"        (no waiting: it only notes it)
    the I/O thread       advance: writes what has been noted, looks after writes under way, tells the decoder when all is there

What on_layer never sees (a cached prefix, a step that a CUDA graph replayed) is written whole, before the next chunk or at the end. A part has a
reference of its own on its blocks, from when it is noted until it is written: the request may lose them in the meantime.
"""
from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from ..config import ConfigError
from ..request import Request, Status
from .agents import Transfer, TransferError
from .kv_io import KVIO
from .moved import TransferFacts
from .source import KVTarget, Notice

__all__ = ["Pushes"]

log = logging.getLogger(__name__)
STOPPED = 65536  # reservations kept that were called off before their prefill came here


@dataclass(eq=False)
class Part:
    """Tokens start ... stop-1 of a request: one chunk, layer by layer, or what is written all at once."""

    start: int
    stop: int
    table: tuple[int, ...]  # the request's blocks then
    borrowed: tuple[int, ...]  # of them, those that hold these tokens
    ready: list[tuple[int | None, Any]] = field(default_factory=list)  # (layer or None for all, GPU mark); not written yet
    complete: bool = False  # nothing more will be ready
    flying: int = 0


@dataclass(eq=False)
class Push:
    request_id: str
    target: KVTarget
    facts: TransferFacts
    request: Request | None = None  # from its first step on
    next: int = 0  # rows before it are noted in all layers
    parts: list[Part] = field(default_factory=list)
    flights: list[tuple[Transfer, Part, float]] = field(default_factory=list)  # transfer, what of, when it must be over
    closed: bool = False  # its prefill is done: no more parts
    broken: str = ""  # why it will not be completed
    over: bool = False  # it is in no list any more, and takes no parts
    start_s: float | None = None  # of its first write


class Pushes:
    """
    Args:
        cond: the connector's lock; guards `ready`, `parts` and the dict of pushes. Never held while the agent or the engine is called.
        ended: called with (push, now_s) by the I/O thread when one is over.
    """

    def __init__(self, engine: Any, io: KVIO, cond: Condition, ended: Any, timeout_s: float) -> None:
        self.engine, self.io, self.cond, self.ended, self.timeout_s = engine, io, cond, ended, timeout_s
        self._pushes: dict[str, Push] = {}  # by request
        self._old: list[Push] = []  # called off, and not quiet yet
        self._step: list[tuple[Push, Part]] = []  # of the step that is being computed
        self._stopped: OrderedDict[tuple[str, int], None] = OrderedDict()
        config = engine.config
        self._last_layer = config.num_hidden_layers - 1
        full = [i for i, kind in enumerate(getattr(config, "indexer_types", ())) if kind == "full"]
        self._plane = {layer: plane for plane, layer in enumerate(full)}  # of a layer's indexer keys

    def __len__(self) -> int:
        return len(self._pushes) + len(self._old)

    @property
    def flying(self) -> bool:
        """Rows are being written."""
        return any(push.flights for push in (*self._pushes.values(), *self._old))

    # --- the step loop ---------------------------------------------------------------------------------------

    def add(self, request_id: str, target: KVTarget) -> bool:
        """Push the rows of a request that is about to be added; False: the decoder has called it off already."""
        push = Push(request_id, target, TransferFacts(request_id, "push", target.pool.agent), next=target.start)
        key = target.pool.agent, target.reservation
        with self.cond:
            if key in self._stopped:
                del self._stopped[key]
                return False
            former = self._pushes.pop(request_id, None)
            if former is not None:
                former.broken = former.broken or "it was started again"
                self._old.append(former)
            self._pushes[request_id] = push
            return True

    def on_layer(self, layer: int, batch: Any) -> None:
        """ModelRunner.on_layer."""
        if not self._pushes and not self._step:
            return
        if layer == 0:
            self._begin_step()
        if not self._step:
            return
        mark = self.io.fence()
        with self.cond:
            for push, part in self._step:
                part.ready.append((layer, mark))
                if layer == self._last_layer:
                    part.complete = True
                    push.next = part.stop
            if layer == self._last_layer:
                self._step = []
            self.cond.notify_all()

    def close(self, request_id: str) -> bool:
        """Its prefill is done (Status.HELD): note what is left. False: there is no such push."""
        push = self._pushes.get(request_id)
        if push is None:
            return False
        with self.engine.lock:
            request = self.engine.held(request_id)
            if request is None:
                raise KeyError(request_id)
            push.request = request
            self._note(push, push.next, push.request.num_computed_tokens, whole=True)
        with self.cond:
            push.closed = True
            self.cond.notify_all()
        return True

    def _begin_step(self) -> None:
        with self.cond:
            for push, part in self._step:  # a step that raised: what it did not reach is left for later
                part.complete = True
        self._step = []
        step = self.engine.runner.step
        for request, count in (*step.prefills, *((request, 1) for request in step.decodes)):
            push = self._pushes.get(request.request_id)
            if push is None or push.broken:
                continue
            push.request, at = request, request.num_computed_tokens
            with self.engine.lock:
                self._note(push, push.next, at, whole=True)
                part = self._note(push, max(at, push.next), at + count)
            if part is not None:
                self._step.append((push, part))

    def _note(self, push: Push, start: int, stop: int, whole: bool = False) -> Part | None:
        """With the engine's lock: a part for these tokens, to be written layer by layer, or as a whole and at once."""
        stop = min(stop, push.target.num_tokens)
        if start >= stop:
            return None
        size = self.io.layout.block_size
        table = tuple(push.request.block_ids)
        part = Part(start, stop, table, table[start // size: -(-stop // size)])
        self.engine.scheduler.borrow(part.borrowed)
        if whole:
            part.ready.append((None, self.io.fence()))
            part.complete = True
            push.next = stop
        with self.cond:
            if not push.over:
                push.parts.append(part)
                return part
        self.engine.stored(part.borrowed)
        return None

    # --- the I/O thread --------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        for push in [*self._pushes.values(), *self._old]:
            try:
                self._land(push, now_s)
                if not push.broken:
                    self._write(push, now_s)
            except (TransferError, ConfigError, IndexError) as error:
                push.broken = str(error)
            request = push.request
            if request is not None and request.finished and not push.broken and not push.closed:
                push.broken = "its prefill ended early"
            if push.broken:
                self._drop(push)
            with self.cond:
                push.over = not push.parts and not push.flights and (push.closed or bool(push.broken))
                if push.over:
                    if self._pushes.get(push.request_id) is push:
                        del self._pushes[push.request_id]
                    else:
                        self._old.remove(push)
            if push.over:
                self._end(push, now_s)

    def _write(self, push: Push, now_s: float) -> None:
        for part in list(push.parts):
            with self.cond:
                ready = [(layer, mark) for layer, mark in part.ready if mark is None or mark.query()]
                part.ready = part.ready[len(ready):]
            if not ready:
                continue
            layers = range(self._last_layer + 1) if ready[0][0] is None else [layer for layer, _ in ready]
            planes = [self._plane[layer] for layer in layers if layer in self._plane]
            if ready[0][0] is None and (push.closed or not part.stop % self.io.layout.block_size):
                layers, planes = None, ()  # whole blocks may go: behind the last row there is none that another part writes
            self.io.meet(push.target.pool)
            if push.start_s is None:
                push.start_s = now_s
            transfer = self.io.write_rows(push.target, part.table, part.start, part.stop, layers, planes)
            part.flying += 1
            push.flights.append((transfer, part, now_s + self.timeout_s))
            push.facts.took(transfer.pieces)

    def _land(self, push: Push, now_s: float) -> None:
        for flight in list(push.flights):
            transfer, part, deadline_s = flight
            state = self.io.agent.poll(transfer)
            if state == "PROC" and not push.broken and now_s < deadline_s:
                continue
            if state != "DONE" and not push.broken:
                push.broken = (str(transfer.error) if state == "ERR" else
                               f"writing to '{push.target.pool.agent}' took longer than {self.timeout_s:g} s")
            if state == "DONE":
                push.facts.ended(self.io.agent.telemetry(transfer))
            if self.io.agent.release(transfer):
                push.flights.remove(flight)
                part.flying -= 1
        with self.cond:
            done = [part for part in push.parts if part.complete and not part.ready and not part.flying]
            push.parts = [part for part in push.parts if part not in done]
        self._give_back(done)

    def _drop(self, push: Push) -> None:
        """It is broken: what is not being written will not be."""
        with self.cond:
            done = [part for part in push.parts if not part.flying]
            push.parts = [part for part in push.parts if part.flying]
            for part in push.parts:
                part.ready.clear()
            self._step = [(other, part) for other, part in self._step if other is not push]
        self._give_back(done)

    def _give_back(self, parts: list[Part]) -> None:
        for part in parts:
            self.engine.stored(part.borrowed)

    def _end(self, push: Push, now_s: float) -> None:
        target, facts = push.target, push.facts
        facts.num_tokens, facts.num_blocks = target.num_tokens - target.start, len(target.block_ids) - target.start // target.pool.layout.block_size
        facts.seconds = 0.0 if push.start_s is None else now_s - push.start_s
        facts.outcome, facts.error = "failed" if push.broken else "landed", push.broken
        notice = Notice("fail", target.reservation, push.broken.encode()) if push.broken else \
            Notice("push", target.reservation, b"" if push.start_s is None else struct.pack("<d", push.start_s))
        try:
            self.io.tell(target.pool, notice)
        except (TransferError, ConfigError) as error:  # the decoder hears from the front that this worker's part is over
            log.warning("the decoder '%s' could not be told of reservation %d: %s", target.pool.agent, target.reservation, error)
        self.ended(push)

    def stop(self, agent: str, notice: Notice) -> None:
        """The decoder `agent` wants no more of a reservation: it is answered with "fail" when nothing is being written to it."""
        with self.cond:  # as one with what `add` does: a push is either found here, or refused there
            for push in [*self._pushes.values(), *self._old]:
                if (push.target.pool.agent, push.target.reservation) == (agent, notice.number):
                    push.broken = push.broken or "the decoder has called it off"
                    return
            self._stopped[agent, notice.number] = None
            if len(self._stopped) > STOPPED:
                self._stopped.popitem(last=False)
        try:
            self.io.agent.notify(self.io.connect(notice.text), Notice("fail", notice.number).encode())
        except TransferError as error:
            log.warning("the decoder '%s' could not be told that nothing is written to it: %s", agent, error)

    def break_off(self, request_id: str, why: str) -> None:
        push = self._pushes.get(request_id)
        if push is not None:
            push.broken = push.broken or why

    def gone(self, agent: str) -> None:
        """That decoder's process has ended: whatever was under way to it touches nothing any more."""
        for push in [*self._pushes.values(), *self._old]:
            if push.target.pool.agent == agent:
                push.broken = push.broken or f"'{agent}' is gone"
