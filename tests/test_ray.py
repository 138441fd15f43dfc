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
            self.second = self.add()
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


def two_nodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")  # as between machines
        patch.setenv("RAY_worker_niceness", "0")  # its workers yield to everybody else otherwise, and here are others
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what a later Ray does; else it says so
        handler = signal.getsignal(signal.SIGTERM)  # Ray takes it
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def nodes():
    yield from two_nodes()


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


# --- longer ---------------------------------------------------------------------------------------------------------------


def cpus_of_cluster(address):
    """Free CPUs, as Ray counts them; asked in a process of its own."""
    code = f"import ray; ray.init({address!r}, logging_level=40, log_to_driver=False); print(ray.available_resources().get('CPU', 0))"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def until_free(nodes, cpus, timeout_s=60):
    end = time.monotonic() + timeout_s
    while cpus_of_cluster(nodes.address) != cpus:
        assert time.monotonic() < end, "Ray still counts what a worker had"


@pytest.fixture
def fresh():
    """Two nodes that nobody else uses."""
    yield from two_nodes()


SCRIPT = """
import sys
from minengine import Cluster, SamplingParams
with Cluster(sys.argv[1], prefill=1, decode=1, cluster=sys.argv[2], num_threads=2, block_size=16, num_gpu_blocks_override=64, max_model_len=512) as cluster:
    print(*(worker.pid for worker in cluster.workers), flush=True)
    prompts = [{"prompt_token_ids": [1 + i, 2, 3]} for i in range(int(sys.argv[3]))]
    outputs = cluster.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    print([out.outputs[0].token_ids for out in outputs], flush=True)
"""


def front(nodes, tiny, address, requests):  # noqa: F811
    return subprocess.Popen([sys.executable, "-c", SCRIPT, tiny["llama"], address, str(requests)], stdout=subprocess.PIPE, text=True)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["ray://", "auto"])
def test_a_program_outside_the_cluster_and_one_on_a_node_use_it_and_leave_nothing(fresh, tiny, how):  # noqa: F811
    process = front(fresh, tiny, fresh.client_address if how == "ray://" else "auto", 5)
    told = process.communicate(timeout=300)[0].splitlines()
    pids = [int(pid) for pid in told[0].split()]
    assert process.returncode == 0 and len(pids) == 2
    expected = alone(tiny["llama"], [[1 + i, 2, 3] for i in range(5)], greedy(20))
    assert told[1] == str([out.outputs[0].token_ids for out in expected])
    until_gone(pids)
    until_free(fresh, 2 * CPUS)


@pytest.mark.soak
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_front_that_is_killed(fresh, tiny, sig):  # noqa: F811
    process = front(fresh, tiny, fresh.address, 100_000)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    actors = [parent(pid) for pid in pids]
    process.send_signal(sig)
    process.communicate(timeout=60)
    until_gone(pids)
    until_gone(actors, 60)
    until_free(fresh, 2 * CPUS)


@pytest.mark.soak
def test_a_server_uses_the_cluster_that_it_is_told(fresh, tiny):  # noqa: F811
    import json
    import urllib.request

    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "minengine.cli", "serve", "--model", tiny["llama"], "--prefill", "1", "--decode", "1", "--cluster", fresh.client_address,
                               "--num-threads", "2", "--block-size", "16", "--num-gpu-blocks-override", "64", "--port", str(port), "--served-model-name", "m"],
                              stdout=subprocess.PIPE, text=True)
    try:
        lines = [next(line for line in server.stdout if line.startswith(f"minengine: worker {name}")) for name in ("prefill0", "decode0")]
        pids = [int(line.split("process ")[1].split()[0]) for line in lines]
        assert all("(Ray node " in line and "NIXL" in line for line in lines)
        next(line for line in server.stdout if " on http://" in line)
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)
        assert told["choices"][0]["text"] == alone(tiny["llama"], [[1, 2, 3]], greedy(20))[0].outputs[0].text
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
    until_gone(pids)


@pytest.mark.soak
def test_a_node_that_goes_takes_its_worker_along_which_finds_another(fresh, tiny):  # noqa: F811
    async def main():
        with running(tiny["llama"], cluster={"prefill": 1, "decode": 1, "cluster": fresh.address, "worker_timeout_s": 20.0}, num_threads=2 * CPUS) as cluster:
            number = fresh.second.node_id[:8]
            lost = next(worker for worker in cluster.workers if number in worker.node)
            task = asyncio.create_task(collect(cluster, [1, 2, 3], greedy(400), "r"))
            await until(lambda: given(cluster, "r") > 1)
            fresh.cluster.remove_node(fresh.second, allow_graceful=False)
            until_gone([lost.pid])
            fresh.add()  # in this thread: Ray asks for signals
            outputs = await task
            assert tokens(outputs) == alone(tiny["llama"], [[1, 2, 3]], greedy(400))[0].outputs[0].token_ids
            await until_quiet(cluster, 120)
            again = next(worker for worker in cluster.workers if worker.name == lost.name)
            assert again.restarts >= 1 and again.node and number not in again.node
    asyncio.run(main())


@pytest.mark.soak
def test_the_ranks_of_a_worker_are_on_one_node(fresh, tiny):  # noqa: F811
    large = fresh.cluster.add_node(**{**NODE, "num_cpus": 2})
    with running(tiny["glm"], cluster={"decode": 1, "cluster": fresh.address}, topology="TP2", num_threads=2) as cluster:
        (worker,) = cluster.workers
        assert large.node_id[:8] in worker.node
        (raylet,) = [info.process.pid for kind, infos in large.all_processes.items() if kind == "raylet" for info in infos]
        assert descends(worker.pid, raylet)
        with open(f"/proc/{worker.pid}/task/{worker.pid}/children") as children:
            ranks = [int(pid) for pid in children.read().split()]
        assert ranks and all(descends(rank, raylet) for rank in ranks)

        async def main():
            outputs = [await collect(cluster, prompt, greedy(20), f"r{i}") for i, prompt in enumerate(PROMPTS[:2])]
            assert [tokens(one) for one in outputs] == [out.outputs[0].token_ids for out in alone(tiny["glm"], PROMPTS[:2], greedy(20))]
        asyncio.run(main())
    until_gone(ranks)
