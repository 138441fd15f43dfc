"""Small clusters for tests: tiny models in directories, workers that can be found, signalled and looked into from outside."""
import asyncio
import contextlib
import os
import time
from pathlib import Path

import pytest
from tiny_directories import write_tiny

from minengine.engine_args import EngineArgs
from minengine.disagg.front import AsyncCluster
from minengine.disagg.plan import ClusterArgs
from minengine.llm import LLM
from minengine.request import SamplingParams

ENGINE = dict(block_size=16, num_gpu_blocks_override=128, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directories of the tiny models by kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_tiny(root / kind, kind)) for kind in ("llama", "glm")}


def make(model, max_num_waiting=1024, cluster=None, **engine):
    return AsyncCluster(EngineArgs(model=model, **{"num_threads": 1, **ENGINE, **engine}), ClusterArgs(**{"decode": 2, **(cluster or {})}),
                        max_num_waiting=max_num_waiting)


@contextlib.contextmanager
def running(model, **options):
    cluster = make(model, **options)
    try:
        yield cluster
    finally:
        pids = [worker.pid for worker in cluster.workers if worker.pid]
        cluster.close()
        assert not [pid for pid in pids if alive(pid)]


def greedy(n, **more):
    return SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, **more)


def alone(model, prompts, params, **engine):
    """What one engine in this process answers."""
    return LLM(model, num_threads=1, **{**ENGINE, **engine}).generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


async def collect(cluster, prompt, params, request_id, **more):
    return [output async for output in cluster.generate(prompt, params, request_id, **more)]


def tokens(outputs):
    return [token for output in outputs for token in output.outputs[0].token_ids]


async def until(condition, timeout_s=60):
    """Look again and again; other processes take their time."""
    for _ in range(int(timeout_s * 500)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"not so after {timeout_s} s")


def quiet(cluster):
    """Every worker is there, no request is left in any, and every block is back; the front remembers nothing either."""
    return (not cluster._flights and not cluster._keys and not cluster._parked and not cluster._streams
            and all(worker.state == "up" and not worker.num_running and not worker.num_waiting and worker.num_free_blocks == worker.num_blocks
                    for worker in cluster.workers))


async def until_quiet(cluster, timeout_s=60):
    await until(lambda: quiet(cluster), timeout_s)
    with cluster._lock:
        cluster._router.check()
        assert not cluster._router.stats()["places"]


def given(cluster, request_id):
    """Tokens that its reader has so far."""
    flight = cluster._flights.get(request_id)
    return len(flight.token_ids) if flight is not None else 0


def pid_of(cluster, request_id):
    """Of the worker that computes it now."""
    return cluster._workers[cluster._flights[request_id].worker].process.pid


def alive(pid):
    """A process that nobody has waited for yet is dead, too."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shared_pools(pids):
    """Files of shared memory that these processes have mapped; those of other tests, which run beside, are not among them."""
    return {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/map_files").iterdir() if "minengine-shm-" in os.readlink(link)}


def until_gone(pids, timeout_s=20):
    end = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"orphans: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)
