"""Faults between a prefill worker and a decoder, each made to happen at its moment: over sockets, where a worker that stands still answers no read.

What every test asks: the caller gets the right answer within LIMIT_S, so do the others, and every block is back on both sides.
"""
import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

from clusters import alone, collect, given, greedy, running, tiny, tokens, until, until_quiet  # noqa: F401
from minengine.disagg import dispatch
from minengine.disagg.source import Notice
from minengine.disagg.transfer import open_agent

pytest.importorskip("nixl")
torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes")
LIMIT_S = 60.0
LEASE_S = 5.0


@pytest.fixture(scope="module")
def cluster(tiny):  # noqa: F811
    """A prefill worker and a small decoder. Both can push; what is not asked to be pushed is pulled. Neither counts as sick for standing still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        with running(tiny["llama"], cluster={"prefill": 1, "decode": 1, "worker_timeout_s": 120.0, "decode_args": {
                "num_gpu_blocks_override": 34, "max_num_seqs": 2}}, kv_transfer="push_layers", load_admission="event", kv_lease_s=LEASE_S) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def answers(tiny):  # noqa: F811
    """Greedy tokens of one engine, by prompt."""
    known = {}

    def ask(prompt, n):
        if (tuple(prompt), n) not in known:
            known[tuple(prompt), n] = alone(tiny["llama"], [prompt], greedy(n))[0].outputs[0].token_ids
        return known[tuple(prompt), n]

    return ask


def prompt(i, length=50):
    return [1 + i, *(2 + j % 190 for j in range(length - 1))]


class Watched:
    """The cluster by the test's own words, with a place to do something at the moment of a hand-over."""

    def __init__(self, cluster, answers, way):
        self.cluster, self.answers, self.asked = cluster, answers, {}
        cluster.engine_args = replace(cluster.engine_args, kv_transfer=way)
        self.stopped = set()
        self.leases = []
        self.at_hand_over = self.at_reserve = lambda: None

    def start(self, name, ids, n=40):
        self.asked[name] = ids, n, asyncio.create_task(collect(self.cluster, ids, greedy(n), name))

    async def right(self, *names):
        for name in names or list(self.asked):
            ids, n, task = self.asked.pop(name)
            assert tokens(await asyncio.wait_for(task, LIMIT_S)) == self.answers(ids, n), name

    async def leave(self, name):
        task = self.asked.pop(name)[2]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def info(self, name):
        return next(worker for worker in self.cluster.workers if worker.name == name)

    def moved(self, name, what):
        return self.info(name).transfers.get(what, 0)

    def signal(self, name, sig):
        os.kill(self.cluster._workers[name].process.pid, sig)
        (self.stopped.add if sig == signal.SIGSTOP else self.stopped.discard)(name)


@contextlib.asynccontextmanager
async def watched(cluster, answers, way="pull"):
    w = Watched(cluster, answers, way)
    hand_over, said = type(cluster)._hand_over, type(cluster).worker_said

    def handed(worker, held):
        if held.source is not None:
            w.leases.append(held.source.lease_id)
        w.at_hand_over()
        hand_over(cluster, worker, held)

    def heard(worker, message):
        if type(message).__name__ == "Reserved":
            w.at_reserve()
        said(cluster, worker, message)

    cluster._hand_over, cluster.worker_said = handed, heard
    try:
        yield w
        await w.right()
        await until_quiet(cluster)
    finally:
        for name in list(w.stopped):
            w.signal(name, signal.SIGCONT)
        del cluster._hand_over, cluster.worker_said


# --- transfers that do not end ----------------------------------------------------------------------------------------

def test_a_prefill_worker_that_stands_still_while_it_sends(cluster, answers):
    """For 10 s, the limit of a transfer, its rows do not come: the decoder computes them, and keeps the blocks that they may still come into."""
    async def main():
        async with watched(cluster, answers) as w:
            failed = w.moved("decode0", "failed")
            w.start("other", prompt(1), 400)
            await until(lambda: given(cluster, "other") > 2)
            w.at_hand_over = lambda: w.signal("prefill0", signal.SIGSTOP)
            w.start("r", prompt(2))
            await w.right("r")
            assert "prefill0" in w.stopped and w.moved("decode0", "failed") == failed + 1
            await w.right("other")
            await until(lambda: not w.info("decode0").num_running)
            free = w.info("decode0").num_free_blocks
            w.at_hand_over = lambda: None
            w.signal("prefill0", signal.SIGCONT)
            w.start("after", prompt(2))
            await w.right("after")
        assert free == 34 - 4 and w.info("decode0").num_free_blocks == 34
    asyncio.run(main())


def test_a_client_that_leaves_while_its_rows_are_under_way(cluster, answers):
    async def main():
        async with watched(cluster, answers) as w:
            w.start("other", prompt(3), 200)
            await until(lambda: given(cluster, "other") > 2)
            w.at_hand_over = lambda: w.signal("prefill0", signal.SIGSTOP)
            w.start("r", prompt(4))
            await until(lambda: w.info("decode0").num_waiting == 1)
            await w.leave("r")
            await w.right("other")
            await until(lambda: not w.info("decode0").num_running + w.info("decode0").num_waiting)
            assert w.info("decode0").num_free_blocks == 34 - 4  # a read under way cannot be called back
            w.signal("prefill0", signal.SIGCONT)
    asyncio.run(main())


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
def test_a_worker_is_killed_while_rows_are_on_their_way_from_one_to_the_other(cluster, answers, victim):
    async def main():
        restarts = sum(worker.restarts for worker in cluster.workers)
        async with watched(cluster, answers) as w:
            w.start("other", prompt(5), 200)
            await until(lambda: given(cluster, "other") > 2)
            w.at_hand_over = lambda: w.signal("prefill0", signal.SIGSTOP)
            w.start("r", prompt(6))
            await until(lambda: w.info("decode0").num_waiting == 1)
            w.at_hand_over = lambda: None
            w.signal(victim, signal.SIGKILL)
            if w.stopped:
                w.signal("prefill0", signal.SIGCONT)
            await w.right("r", "other")
        assert sum(worker.restarts for worker in cluster.workers) == restarts + 1
    asyncio.run(main())


def test_a_decoder_that_nobody_writes_to_computes_by_itself_after_a_lease(cluster, answers):
    """A prefill worker that hangs without being sick, push_layers: what it says when it goes on is stale."""
    async def main():
        async with watched(cluster, answers, "push_layers") as w:
            w.at_reserve = lambda: w.signal("prefill0", signal.SIGSTOP)
            w.start("r", prompt(7))
            await w.right("r")
            assert "prefill0" in w.stopped
            w.at_reserve = lambda: None
            w.signal("prefill0", signal.SIGCONT)
    asyncio.run(main())


def test_a_decoder_that_stands_still_while_rows_are_written_to_it(cluster, answers):
    async def main():
        async with watched(cluster, answers, "push_layers") as w:
            handed = []
            w.at_reserve, w.at_hand_over = lambda: w.signal("decode0", signal.SIGSTOP), lambda: handed.append(1)
            w.start("r", prompt(8))
            await until(lambda: handed)  # all is computed, and nothing has been received
            w.signal("decode0", signal.SIGCONT)
            await w.right("r")
    asyncio.run(main())


# --- leases and notices -----------------------------------------------------------------------------------------------

def test_leases_that_run_out_while_the_decoder_stands_still(cluster, answers, monkeypatch):
    """Their blocks come back while nobody has fetched them, and the decoder does not take for theirs what lies there then."""
    monkeypatch.setattr(dispatch, "MAX_RENEWALS", 0)

    async def main():
        async with watched(cluster, answers) as w:
            ended, expired = w.moved("prefill0", "leases_expired"), w.moved("decode0", "expired")
            w.at_hand_over = lambda: w.signal("decode0", signal.SIGSTOP)
            for i in range(3):
                w.start(f"r{i}", prompt(10 + i))
            await until(lambda: w.moved("prefill0", "leases_expired") == ended + 3)
            await until(lambda: w.info("prefill0").num_free_blocks == w.info("prefill0").num_blocks)
            w.at_hand_over = lambda: None
            w.signal("decode0", signal.SIGCONT)
            await w.right()
            assert w.moved("decode0", "expired") == expired + 3
    asyncio.run(main())


def test_rows_wait_for_a_decoder_that_is_full_and_may_be_left_there(cluster, answers):
    async def main():
        async with watched(cluster, answers) as w:
            made = w.moved("prefill0", "holds")
            for i in range(2):
                w.start(f"large{i}", prompt(20 + i, 200), 60)
                await until(lambda: given(cluster, f"large{i}") > 1)
            w.signal("decode0", signal.SIGSTOP)  # nobody is done before all are there
            for name in ("waits", "leaves"):
                w.start(name, prompt(22, 120), 20)
            await until(lambda: len(w.leases) == 4)
            with cluster._lock:
                now_s, renewals = cluster.clock(), w.moved("prefill0", "renewals")
                for third in range(1, dispatch.MAX_RENEWALS + 5):
                    cluster._renew_leases(now_s + third * LEASE_S / 3)
                assert all(flight.renewals == dispatch.MAX_RENEWALS for flight in cluster._flights.values() if flight.held)
            w.signal("decode0", signal.SIGCONT)
            await until(lambda: w.moved("prefill0", "renewals") >= renewals + 2)
            await until(lambda: w.info("decode0").num_waiting == 2)
            await w.leave("leaves")
            await w.right()
            assert w.moved("prefill0", "holds") == made + 4
    asyncio.run(main())


def test_a_client_that_leaves_after_its_rows_have_landed_and_before_it_is_admitted(cluster, answers):
    async def main():
        async with watched(cluster, answers) as w:
            for i in range(2):  # all that the decoder runs at once
                w.start(f"long{i}", prompt(30 + i), 150)
                await until(lambda: given(cluster, f"long{i}") > 1)
            landed = w.moved("decode0", "landed")
            w.start("r", prompt(32))
            await until(lambda: w.moved("decode0", "landed") > landed)
            assert given(cluster, "r") == 1 and w.info("decode0").num_running == 2 and w.info("decode0").num_waiting == 1
            await w.leave("r")
    asyncio.run(main())


def test_notices_that_come_early_twice_or_late_end_nothing_that_they_are_not_for(cluster, answers):
    async def main():
        stranger = open_agent("stranger", "nixl")
        try:
            async with watched(cluster, answers) as w:
                trouble = [w.moved("decode0", what) for what in ("failed", "expired")]
                facts = {name: cluster._workers[name].ready.pools[0] for name in ("prefill0", "decode0")}
                for each in facts.values():
                    stranger.connect(each.metadata)
                w.start("before", prompt(40))
                await w.right()
                for i in range(6):
                    w.start(f"r{i}", prompt(41 + i), 30)
                    for lease in (w.leases[0], w.leases[0], w.leases[0] + 100 + i):  # ended, and not made yet
                        stranger.notify(facts["prefill0"].agent, Notice("fetch", lease).encode())
                    for kind in ("push", "fail", "stop"):
                        stranger.notify(facts["decode0"].agent, Notice(kind, i, stranger.metadata()).encode())
                await w.right()
                assert [w.moved("decode0", what) for what in ("failed", "expired")] == trouble
        finally:
            stranger.close()
    asyncio.run(main())
