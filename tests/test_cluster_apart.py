"""Prefill and decode in processes of their own: the same answers, and whatever happens to either, no token lost or given twice, every block back."""
import asyncio
import os
import signal
import sys

import pytest
import torch

from clusters import ENGINE, alone, collect, greedy, running, tiny, tokens, until, until_quiet  # noqa: F401
from minengine.disagg.cluster import Cluster
from minengine.disagg.flight import Flight
from minengine.llm import LLM
from minengine.request import SamplingParams, StructuredOutputsParams

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and stops processes")


@pytest.fixture(scope="module", params=["pull", "push_layers"])
def apart(request, tiny):  # noqa: F811
    """One prefill worker and two decoders, that all tests of this file use."""
    with running(tiny["llama"], cluster={"prefill": 1, "decode": 2, "worker_timeout_s": 2.0}, kv_transfer=request.param, load_admission="event") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answers(tiny):  # noqa: F811
    """What one engine answers, by prompt; 80 greedy tokens."""
    known = {}

    def ask(prompt, n=80):
        key = tuple(prompt)
        if key not in known:
            known[key] = alone(tiny["llama"], [prompt], greedy(80))[0].outputs[0].token_ids
        return known[key][:n]

    return ask


def prompt(i):
    return [1 + i % 190, *range(1, 40 + i % 20)]


# --- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, options", [
    ("llama", {"prefill_args": {"block_size": 64, "kv_cache_layout": "BHLNC", "num_gpu_blocks_override": 32}, "kv_cache_dtype": "q8_0"}),
    ("glm", {"decode_args": {"block_size": 32, "num_gpu_blocks_override": 64}, "kv_transfer": "push_layers", "load_admission": "event"}),
    ("glm", {"transfer": "shm", "kv_cache_dtype": "bfloat16", "kv_cache_layout": "BLNHC"}),
])
def test_prefill_and_decode_apart_answer_as_one_engine_does(tiny, kind, options):  # noqa: F811
    prompts = [list(range(1, 5 + 13 * i)) for i in range(9)]
    params = [SamplingParams(max_tokens=1 + 3 * i, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=2 if i % 3 == 0 else None) for i in range(9)]
    shared = {name: options[name] for name in ("kv_cache_dtype", "kv_cache_layout") if name in options}
    with Cluster(tiny[kind], prefill=1, decode=2, num_threads=3, **{**ENGINE, **options}) as cluster:
        outputs = cluster.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        workers = {worker.name: worker for worker in cluster.workers}
        asyncio.run(until_quiet(cluster.engine))
    assert [worker.role for worker in workers.values()] == ["prefill", "decode", "decode"]
    for want, got in zip(alone(tiny[kind], prompts, params, **shared), outputs, strict=True):
        a, b = want.outputs[0], got.outputs[0]
        assert (a.token_ids, a.finish_reason, got.prompt_token_ids) == (b.token_ids, b.finish_reason, want.prompt_token_ids)
        if a.logprobs is not None:
            assert [list(entry) for entry in a.logprobs] == [list(entry) for entry in b.logprobs]
        times = got.metrics
        stamps = [times.arrival_s, times.routed_s, times.admitted_s, times.prefill_start_s, times.prefill_end_s]
        if len(b.token_ids) > 1:
            stamps += [times.landed_s, times.decode_admitted_s, times.token_s[1], times.finished_s]
            assert times.transfer_start_s <= times.transfer_end_s <= times.landed_s
        else:
            assert times.decode_admitted_s is None  # its first token was its last: no decoder has seen it
        assert stamps == sorted(stamps) and len(times.token_s) == len(b.token_ids)
    moved = [worker.transfers for worker in workers.values()]
    assert sum(each["asked"] for each in moved) >= sum(each["merged"] for each in moved) > 0
    assert not any(each["failed"] + each["expired"] for each in moved)


def test_stop_strings_and_grammars_go_on_across_the_hand_over():
    options = dict(block_size=16, max_model_len=512, num_gpu_blocks_override=64)
    prompts = ["duze 197 004 by the river fefa 158 203 and a stone was under the old wall . ? fefa"] * 4
    params = [SamplingParams(max_tokens=24, temperature=0.0, stop=[" 2", "the"]), SamplingParams(max_tokens=24, temperature=1.0),
              SamplingParams(max_tokens=24, temperature=1.0, structured_outputs=StructuredOutputsParams(regex=" [0-9]{3} [a-z]{4}( [0-9]){2,9}")),
              SamplingParams(max_tokens=24, temperature=0.0, structured_outputs=StructuredOutputsParams(choice=["158 203", "197 004"]))]
    want = LLM("glm-mini", num_threads=1, **options).generate(prompts, params)
    with Cluster("glm-mini", prefill=1, decode=1, num_threads=2, **options) as cluster:
        for a, b in zip(want, cluster.generate(prompts, params), strict=True):
            a, b = a.outputs[0], b.outputs[0]
            assert (a.text, a.token_ids, a.finish_reason, a.stop_reason) == (b.text, b.token_ids, b.finish_reason, b.stop_reason)


# --- aborts -------------------------------------------------------------------------------------------------------------


STAGES = {
    "queued": lambda cluster, flight: flight in cluster._parked,
    "at the prefill worker": lambda cluster, flight: flight.worker == "prefill0" and not flight.token_ids,
    "handed over": lambda cluster, flight: flight.worker in ("decode0", "decode1") and len(flight.token_ids) == 1,
    "decoding": lambda cluster, flight: len(flight.token_ids) > 2,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_at_any_stage_takes_nothing_with_it(apart, answers, stage):
    async def main():
        tasks, seen, width = {}, set(), 40 if stage == "queued" else 12

        def one_is_there():
            with apart._lock:
                found = next((flight for flight in apart._flights.values() if STAGES[stage](apart, flight)), None)
            if found is not None:
                seen.add(found.request_id)
                tasks[found.request_id].cancel()
            return len(seen) >= 3 or not apart._flights
        while not seen and len(tasks) < 20 * width:  # a stage may be too short to be seen on a machine that does other things
            batch = range(len(tasks), len(tasks) + width)
            tasks |= {f"r{i}": asyncio.create_task(collect(apart, prompt(i % width), greedy(60), f"r{i}")) for i in batch}
            await until(lambda: apart._flights)
            await until(one_is_there)
        done = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True)))
        assert seen
        for i, (request_id, outputs) in enumerate(done.items()):
            if request_id not in seen:
                assert tokens(outputs) == answers(prompt(i % width), 60)
        await until_quiet(apart)
    asyncio.run(main())


# --- it survives ------------------------------------------------------------------------------------------------------


VICTIMS = {
    "prefill, computing": ("prefill0", lambda flight: not flight.token_ids),
    "prefill, its rows wanted": ("prefill0", lambda flight: len(flight.token_ids) == 1),
    "decode, receiving": (None, lambda flight: len(flight.token_ids) == 1),
    "decode, computing": (None, lambda flight: len(flight.token_ids) > 2),
}


async def signalled(cluster, sig, who, when, request_ids):
    """Send a signal to a worker at a moment of one of these requests; its name and process."""
    found = []

    def moment():
        with cluster._lock:
            for flight in map(cluster._flights.get, request_ids):
                if isinstance(flight, Flight) and flight.worker is not None and when(flight) and flight.worker.startswith("prefill" if who else "decode"):
                    found.append((flight.worker, cluster._workers[flight.worker].process.pid))
                    os.kill(found[0][1], sig)
                    return True
                if who and isinstance(flight, Flight) and when(flight) and flight.token_ids:
                    found.append((who, cluster._workers[who].process.pid))
                    os.kill(found[0][1], sig)
                    return True
        return False
    await until(moment)
    return found[0]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_worker_is_killed_and_its_requests_go_on(apart, answers, victim):
    async def main():
        restarts = sum(worker.restarts for worker in apart.workers)
        tasks = [asyncio.create_task(collect(apart, prompt(i), greedy(80), f"r{i}")) for i in range(10)]
        await signalled(apart, signal.SIGKILL, *VICTIMS[victim], [f"r{i}" for i in range(10)])
        for i, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == answers(prompt(i))
            assert outputs[-1].outputs[0].finish_reason == "length" and len(outputs[-1].metrics.token_s) == 80
        await until_quiet(apart)
        assert sum(worker.restarts for worker in apart.workers) == restarts + 1
    asyncio.run(main())


@pytest.mark.parametrize("victim", ["prefill, computing", "decode, receiving", "decode, computing"])
def test_a_worker_is_stopped_for_longer_than_its_timeout(apart, answers, victim):
    async def main():
        tasks = [asyncio.create_task(collect(apart, prompt(i), greedy(80), f"r{i}")) for i in range(10)]
        name, pid = await signalled(apart, signal.SIGSTOP, *VICTIMS[victim], [f"r{i}" for i in range(10)])
        try:
            await until(lambda: apart._workers[name].state == "sick")
            for i, outputs in enumerate(await asyncio.gather(*tasks)):
                assert tokens(outputs) == answers(prompt(i))
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_quiet(apart)
        assert apart._workers[name].process.pid == pid
    asyncio.run(main())


def test_without_a_prefill_worker_decoders_read_prompts_themselves(apart, answers):
    async def main():
        pid = apart._workers["prefill0"].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            outputs = await asyncio.gather(*(collect(apart, prompt(i), greedy(20), f"r{i}") for i in range(6)))
            for i, output in enumerate(outputs):
                assert tokens(output) == answers(prompt(i), 20)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_quiet(apart)
    asyncio.run(main())
