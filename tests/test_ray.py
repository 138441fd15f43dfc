"""Workers on the nodes of a Ray cluster: two nodes, of this machine, with no CPU more than one worker needs, and KV over TCP between them.

    make soak runs the rest of it: a server that is told to use the cluster, a front that is killed, a node that goes, ranks
"""
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from clusters import ENGINE, alive, alone, collect, given, greedy, running, tiny, tokens, until, until_gone, until_quiet  # noqa: F401
from minengine.config import ConfigError
from minengine.disagg import ray_launch

pytest.importorskip("ray", reason="pip install 'minengine[ray]'")
pytest.importorskip("nixl")
torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray and NIXL are installed on Linux only")
CPUS = 1  # of a node, and of a worker: no two are on one node
NODE = dict(num_cpus=CPUS, object_store_memory=80 << 20)
PROMPTS = [[1 + i, *range(2, 40 + 9 * i)] for i in range(6)]


class Nodes:
    """A Ray cluster of two nodes."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.port = free_port()
        try:
            self.add(include_dashboard=False, ray_client_server_port=self.port)
            self.add()
            until_it_listens(self.port)
        except BaseException:
            self.cluster.shutdown()
            raise

    def add(self, **options):
        return self.cluster.add_node(**NODE, **options)

    @property
    def address(self):
        return self.cluster.address

    @property
    def client_address(self):
        return f"ray://127.0.0.1:{self.port}"


def until_it_listens(port, timeout_s=60):
    end = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")  # as between machines
        patch.setenv("RAY_worker_niceness", "0")  # its workers yield to everybody else otherwise, and here are others
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what a later Ray does; else it says so
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def apart(nodes, tiny):  # noqa: F811
    """Prefill on one node, decode on the other."""
    with running(tiny["glm"], cluster={"prefill": 1, "decode": 1, "cluster": nodes.address, "worker_timeout_s": 20.0}, num_threads=2 * CPUS) as cluster:
        actors = [parent(worker.pid) for worker in cluster.workers]
        yield cluster
        actors += [parent(worker.pid) for worker in cluster.workers if worker.pid]
    until_gone(set(actors))


@pytest.fixture(scope="module")
def answers(tiny):  # noqa: F811
    return [out.outputs[0].token_ids for out in alone(tiny["glm"], PROMPTS, greedy(40))]


def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def descends(pid, ancestor):
    while pid > 1 and pid != ancestor:
        pid = parent(pid)
    return pid == ancestor


def test_prefill_on_one_node_and_decode_on_another_answer_as_one_process_does(apart, answers):
    async def main():
        prefill, decode = apart.workers
        assert prefill.node and decode.node and prefill.node != decode.node
        assert prefill.num_threads == decode.num_threads == CPUS and "NIXL" in decode.transfer
        before = decode.transfers.get("nbytes", 0)
        outputs = await asyncio.gather(*(collect(apart, prompt, greedy(40), f"r{i}") for i, prompt in enumerate(PROMPTS)))
        assert [tokens(one) for one in outputs] == answers
        await until_quiet(apart)
        told = apart.workers[1].transfers
        assert told["landed"] >= len(PROMPTS) and told["failed"] == 0 and told["nbytes"] > before
        for one in outputs:  # on one clock: in order, and now
            t = one[-1].metrics
            stamps = [t.arrival_s, t.routed_s, t.admitted_s, t.token_s[0], t.transfer_start_s, t.transfer_end_s, t.decode_admitted_s, *t.token_s[1:], t.finished_s]
            assert all(b - a > -1.0 for a, b in zip(stamps, stamps[1:])) and 0 <= time.perf_counter() - t.finished_s < 600
    asyncio.run(main())


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
def test_a_worker_that_is_killed_on_its_node_is_started_again_there_and_its_requests_go_on(apart, answers, victim):
    async def main():
        worker = next(worker for worker in apart.workers if worker.name == victim)
        tasks = [asyncio.create_task(collect(apart, prompt, greedy(40), f"r{i}")) for i, prompt in enumerate(PROMPTS)]
        await until(lambda: given(apart, "r0") > 0)
        os.kill(worker.pid, signal.SIGKILL)
        assert [tokens(one) for one in await asyncio.gather(*tasks)] == answers
        await until_quiet(apart)
        again = next(worker for worker in apart.workers if worker.name == victim)
        assert again.pid != worker.pid and again.restarts == worker.restarts + 1 and again.node
    asyncio.run(main())


def test_a_worker_that_finds_no_place_is_an_error_that_says_what_it_needs(apart, tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ray_launch, "PLACE_S", 1.0)
    with pytest.raises(ConfigError, match="worker engine0: was not placed: for 1 s no node of the cluster had 1 CPUs free; ask for fewer workers or threads"):
        with running(tiny["glm"], cluster={"decode": 1, "cluster": apart.cluster_args.cluster}):
            pass
    assert [worker.state for worker in apart.workers] == ["up", "up"]  # which has the connection to Ray as well
