"""Workers of several ranks behind one face: what a client gets is what one process answers, and a rank's end is its worker's end, of which nothing is left."""
import asyncio
import os
import signal
import sys

import httpx
import pytest
import torch

from clusters import alive, alone, collect, given, greedy, running, shared_pools, tiny, tokens, until, until_gone, until_quiet  # noqa: F401
from minengine.llm import LLM
from minengine.request import SamplingParams
from test_serve_process import serving

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and ends processes")


STAGES = {
    "at a prefill rank": lambda flight: flight.worker == "prefill0" and not flight.token_ids,
    "handed over": lambda flight: flight.worker == "decode0" and len(flight.token_ids) == 1,
    "decoding": lambda flight: len(flight.token_ids) > 2,
}


def children(pid):
    """Processes that one has started and that are there."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(name))
    return found


@pytest.fixture(scope="module")
def cluster(tiny):  # noqa: F811
    with running(tiny["glm"], cluster={"prefill": 1, "decode": 1, "prefill_topology": "DEP2", "decode_topology": "TP2"},
                 load_admission="event") as cluster:
        ranks = [rank for worker in cluster.workers for rank in children(worker.pid)]
        assert len(ranks) == 2
        yield cluster
        ranks = [rank for worker in cluster.workers for rank in children(worker.pid)]
    until_gone(ranks)


def prompt(i):
    return [1 + i % 190, *range(1, 40 + i % 20)]


def rank_of(cluster, name):
    """(the process of rank 0, that of rank 1) of a worker."""
    pid = next(worker.pid for worker in cluster.workers if worker.name == name)
    rank, = children(pid)
    return pid, rank


def test_answers_are_one_processs_and_the_workers_say_what_they_are(cluster, tiny):  # noqa: F811
    async def main():
        prompts = [prompt(i) for i in range(8)]
        params = [SamplingParams(max_tokens=1 + 3 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(8)]
        got = await asyncio.gather(*(collect(cluster, ids, one, f"r{i}") for i, (ids, one) in enumerate(zip(prompts, params))))
        for want, outputs in zip(alone(tiny["glm"], prompts, params), got):
            assert tokens(outputs) == want.outputs[0].token_ids
            times = outputs[-1].metrics
            stamps = [times.arrival_s, times.routed_s, times.admitted_s, times.prefill_start_s, *times.token_s, times.finished_s]
            assert None not in stamps and stamps == sorted(stamps)
        await until_quiet(cluster)
        workers = {worker.name: worker for worker in cluster.workers}
        assert [(name, worker.topology, worker.num_ranks, worker.num_threads) for name, worker in workers.items()] == [("prefill0", "DEP2", 2, 1), ("decode0", "TP2", 2, 1)]
        assert workers["prefill0"].transfers["holds"] == workers["decode0"].transfers["landed"] == 7  # a first token that is the last is nobody else's
        assert not any(workers["decode0"].transfers[name] for name in ("failed", "expired", "cancelled"))
    asyncio.run(main())


@pytest.mark.parametrize("stage", STAGES)
def test_clients_that_leave_take_nothing_with_them(cluster, tiny, stage):  # noqa: F811
    """Wherever their requests are, on whichever rank."""
    async def main():
        tasks = {f"r{i}": asyncio.create_task(collect(cluster, prompt(i), greedy(30), f"r{i}")) for i in range(12)}
        seen: set[str] = set()

        def some_are_there():
            with cluster._lock:
                found = [flight.request_id for flight in cluster._flights.values() if STAGES[stage](flight) and flight.request_id not in seen]
            for request_id in found[:2]:
                seen.add(request_id)
                tasks[request_id].cancel()
            return len(seen) >= 4 or not cluster._flights
        await until(lambda: cluster._flights)
        await until(some_are_there)
        done = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True)))
        want = alone(tiny["glm"], [prompt(i) for i in range(12)], greedy(30))
        assert seen and all(tokens(done[f"r{i}"]) == want[i].outputs[0].token_ids for i in range(12) if f"r{i}" not in seen)
        await until_quiet(cluster)
    asyncio.run(main())


@pytest.mark.parametrize("name, which", [("decode0", "rank 1"), ("decode0", "rank 0"), pytest.param("prefill0", "rank 1", marks=pytest.mark.soak),
                                         pytest.param("prefill0", "rank 0", marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_takes_its_worker_along_and_the_requests_go_on(cluster, tiny, name, which):  # noqa: F811
    async def main():
        before = next(worker.restarts for worker in cluster.workers if worker.name == name)
        first, other = rank_of(cluster, name)
        tasks = [asyncio.create_task(collect(cluster, prompt(i), greedy(40), f"r{i}")) for i in range(4)]
        await until(lambda: given(cluster, "r0") > (5 if name == "decode0" else 0))
        os.kill(first if which == "rank 0" else other, signal.SIGKILL)
        await until(lambda: not alive(first) and not alive(other))  # whichever was killed
        for want, outputs in zip(alone(tiny["glm"], [prompt(i) for i in range(4)], greedy(40)), await asyncio.gather(*tasks)):
            assert tokens(outputs) == want.outputs[0].token_ids
        await until_quiet(cluster)
        assert next(worker.restarts for worker in cluster.workers if worker.name == name) == before + 1
    asyncio.run(main())


def test_a_rank_that_is_killed_while_nobody_asks_is_noticed_too(cluster):
    async def main():
        pid, rank = rank_of(cluster, "decode0")
        os.kill(rank, signal.SIGKILL)
        await until(lambda: cluster._workers["decode0"].ready.pid != pid)
        await until_quiet(cluster)
    asyncio.run(main())


def test_a_server_of_two_topologies_answers_what_one_process_does():
    openai = pytest.importorskip("openai", reason="the openai package is missing; run: make setup")
    text = "duze 197 004 by the river fefa 158 203 and a stone was under the old wall . ? fefa"
    options = dict(block_size=16, max_model_len=2048, num_threads=1)
    want = LLM("glm-mini", **options).generate([text], SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))[0].outputs[0]
    with serving("--prefill", "1", "--decode", "1", "--prefill-topology", "DEP2", "--decode-topology", "TP2", "--num-threads", "4", "--worker-timeout-s", "60",
                 "--transfer", "shm") as server:
        lines = "".join(server.lines)
        assert "worker prefill0: process" in lines and "1 threads a rank of DEP2" in lines and "1 threads a rank of TP2" in lines
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "workers": {"prefill0": "up", "decode0": "up"},
                                                            "topologies": {"prefill0": "DEP2", "decode0": "TP2"}}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for stream in (False, True, True):  # both ranks of DEP2 have their turn
                ask = dict(model="glm-mini", prompt=text, max_tokens=32, temperature=0, extra_body={"ignore_eos": True}, stream=stream)
                answer = client.completions.create(**ask)
                assert want.text == ("".join(chunk.choices[0].text for chunk in answer if chunk.choices) if stream else answer.choices[0].text)
        workers = children(server.process.pid)
        ranks = [rank for worker in workers for rank in children(worker)]
        assert len(workers) == len(ranks) == 2
        pools = shared_pools([*workers, *ranks])
        assert pools
        server.signal(signal.SIGTERM)
        code, _, errors = server.end()
        assert code == 0 and "Traceback" not in errors, errors
        until_gone([*workers, *ranks])
    assert not [pool for pool in pools if os.path.exists(pool)]


def test_ranks_end_with_a_worker_whose_front_was_killed():
    with serving("--decode", "1", "--decode-topology", "TP2", "--num-threads", "2") as server:
        worker, = children(server.process.pid)
        ranks = children(worker)
        assert len(ranks) == 1
        server.process.kill()
        until_gone([worker, *ranks])
