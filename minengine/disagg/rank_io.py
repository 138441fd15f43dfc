"""The transfers of a worker's ranks that are not rank 0: what runs in their processes, beside the steps.

    ranks that split every step        a thread reads, for each request that rank 0's connector loads, what this rank keeps of it
    ranks with requests of their own   a whole WorkerConnector; rank 0 passes on what the front says of a request that it does not have itself

The functions at the end are what `Group.call` runs on every rank.
"""
from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..parallel.group import Member
from ..request import RequestOutput
from .connector import IDLE_S, SOON_S, WorkerConnector
from .io_thread import IOThread
from .kv_io import KVIO
from .leases import OutOfLeases
from .links import Fetch, Fetched, Gone, Link, Met, RankState, ReleaseHeld, RenewHeld, StopFetch, connect_link
from .reading import Reading
from .source import KVSource, PoolFacts

__all__ = ["RankConnector", "RankReader", "close_rank", "join_rank", "open_rank_agent"]


@dataclass
class _Read:
    reading: Reading
    stopped: bool = False
    error: str = ""


class RankReader:
    """Of a rank that splits every step with the others."""

    def __init__(self, io: KVIO, link: Link) -> None:
        self.io, self._link = io, link
        self._reads: dict[int, _Read] = {}
        self._thread = IOThread(self._turn, lambda: SOON_S if self._reads else IDLE_S)
        self._thread.start()
        link.read(lambda message: self._thread.do(lambda: self._act(message)), "link to rank 0")

    def close(self) -> None:
        self._thread.close(5.0)

    def _act(self, message: Any) -> None:
        match message:
            case Fetch(number, source, block_ids, start):
                try:
                    self._reads[number] = _Read(Reading(self.io, source, block_ids, start))
                except Exception as error:  # rank 0 must not wait for ever
                    self._link.send(Fetched(number, None, self._said(error)))
            case StopFetch(number):
                if number in self._reads:
                    self._reads[number].stopped = True
            case Met(pool):
                self.io.connect_sources(pool)
            case Gone(agent):
                self.io.part(agent)

    def _turn(self) -> None:
        for number, read in list(self._reads.items()):
            here = False
            try:
                here = not read.error and read.reading.advance(late=read.stopped)
            except Exception as error:
                read.error = self._said(error)
            if here or (read.error or read.stopped) and read.reading.release():
                del self._reads[number]
                self._link.send(Fetched(number, read.reading.moved if here else None, read.error))

    def _said(self, error: Exception) -> str:
        return f"rank {self.io.rank}: {str(error) or type(error).__name__}"


class RankConnector:
    """Of a rank with requests of its own."""

    def __init__(self, member: Member, link: Link, fingerprint: str) -> None:
        self.engine, self._link = member.engine, link
        self.connector = WorkerConnector(member.engine, member.agent, wake=lambda: self._tell(may_step=True), fingerprint=fingerprint)
        link.read(self._act, "link to rank 0")

    def poll(self) -> None:
        """Before each step."""
        self.connector.poll()

    def hold(self, outputs: Sequence[RequestOutput]) -> list[tuple[str, KVSource | None]]:
        """After each: what is kept for a decoder from now on, by request; None: it could not be."""
        held = [(output.request_id, self._hold(output.request_id)) for output in outputs if self.engine.held(output.request_id) is not None]
        self._tell(may_step=False)
        return held

    def _hold(self, request_id: str) -> KVSource | None:
        try:
            return self.connector.hold(request_id)
        except OutOfLeases:  # its decoder computes it
            self.engine.release_request(request_id)
            return None

    def close(self) -> None:
        self.connector.close()

    def _tell(self, *, may_step: bool) -> None:
        self._link.send(RankState(may_step, self.engine.num_free_blocks, self.connector.counts()))

    def _act(self, message: Any) -> None:
        match message:
            case ReleaseHeld(request_id):
                self.connector.release(request_id)
                self.engine.release_request(request_id)
                self._tell(may_step=True)
            case RenewHeld(request_id):
                self.connector.renew(request_id)
            case Met(pool):
                self.connector.connect(pool)
            case Gone(agent):
                self.connector.peer_gone(agent)


# --- what the ranks run ------------------------------------------------------------------------------------------


def open_rank_agent(member: Member, name: str, kind: str) -> None:
    """Make the transfer agent of a rank other than 0; its engine's pool is to lie in the agent's memory."""
    from .transfer import open_agent

    member.agent = open_agent(f"{name}-rank{member.rank}-{os.getpid()}-{secrets.token_hex(4)}", kind)
    member.storage = lambda device: partial(member.agent.allocate, device=device)


def join_rank(member: Member, fingerprint: str) -> PoolFacts:
    """Begin to serve rank 0's `Links`, on a rank other than 0: this rank's pool, as others see it."""
    engine, link = member.engine, connect_link(member.folder)
    if engine.args.ranks.data > 1:
        member.transfers = RankConnector(member, link, fingerprint)
        return member.transfers.connector.facts
    member.transfers = RankReader(KVIO(member.agent, engine.kv, fingerprint, kv_heads=engine.config.kv_heads, topology=engine.args.ranks.name,
                                       rank=member.rank), link)
    return member.transfers.io.facts


def close_rank(member: Member) -> None:
    """Let go of what outlives a process: shared memory."""
    if member.rank:
        member.transfers.close()
        member.agent.close()
