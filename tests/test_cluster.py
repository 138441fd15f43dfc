"""Workers behind one engine's face, every worker doing both: the same answers, and whatever happens to a process, no token lost or given twice."""
import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clusters import ENGINE, alive, alone, collect, given, greedy, make, pid_of, running, tiny, tokens, until, until_gone, until_quiet  # noqa: F401
from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.disagg import launch, supervise
from minengine.disagg.cluster import Cluster
from minengine.disagg.plan import ClusterArgs, check_fit, plan
from minengine.request import RequestError, SamplingParams
from minengine.streams import EngineDead, EngineDraining, EngineOverloaded

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and stops processes")


@pytest.fixture(scope="module")
def pair(tiny):  # noqa: F811
    """Two engines that all tests of this file use that do not end one for good."""
    with running(tiny["llama"], cluster={"worker_timeout_s": 1.0}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answers(tiny):  # noqa: F811
    """What one engine answers, by prompt; 120 greedy tokens."""
    known = {}

    def ask(prompt, n=120):
        key = tuple(prompt)
        if key not in known:
            known[key] = alone(tiny["llama"], [prompt], greedy(120))[0].outputs[0].token_ids
        return known[key][:n]

    return ask


# --- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_a_cluster_answers_as_one_engine_does(tiny, kind):  # noqa: F811
    prompts = [list(range(1, 5 + 9 * i)) for i in range(9)]  # more than two engines run at once
    params = [SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=2 if i % 3 == 0 else None) for i in range(9)]
    with Cluster(tiny[kind], decode=2, num_threads=2, **ENGINE) as cluster:
        outputs = cluster.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert len({worker.pid for worker in cluster.workers} | {os.getpid()}) == 3
        assert [(worker.role, worker.num_threads, worker.kv_cache_layout) for worker in cluster.workers] == [("both", 1, "LBNHC")] * 2
        assert all(worker["routed"] for worker in cluster.engine.router_stats()["workers"].values())
    for want, got in zip(alone(tiny[kind], prompts, params), outputs, strict=True):
        a, b = want.outputs[0], got.outputs[0]
        assert (a.token_ids, a.finish_reason, got.finished, got.prompt_token_ids) == (b.token_ids, b.finish_reason, True, want.prompt_token_ids)
        if a.logprobs is not None:
            assert [list(entry) for entry in a.logprobs] == [list(entry) for entry in b.logprobs]
        assert len(got.metrics.token_s) == 12 and got.metrics.arrival_s <= got.metrics.routed_s <= got.metrics.admitted_s <= got.metrics.finished_s


def test_a_stream_gives_the_output_so_far_and_closing_it_aborts(tiny):  # noqa: F811
    with Cluster(tiny["llama"], decode=1, **ENGINE) as cluster:
        outputs = list(cluster.stream({"prompt_token_ids": [1, 2, 3]}, greedy(20)))
        assert outputs[-1].outputs[0].token_ids == alone(tiny["llama"], [[1, 2, 3]], greedy(20))[0].outputs[0].token_ids
        assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
        stream = cluster.stream({"prompt_token_ids": [1, 2, 3]}, greedy(400))
        next(stream)
        stream.close()
        with pytest.raises(RequestError, match="1000 is not a token"):
            cluster.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1000]}], greedy(400))
        with pytest.raises(RequestError, match="sampling_params: 1 given for 2"):
            cluster.generate([{"prompt_token_ids": [1]}] * 2, [greedy(1)])

        async def inside_a_loop():
            return cluster.generate({"prompt_token_ids": [1, 2, 3]}, greedy(3))[0].outputs[0].token_ids
        assert asyncio.run(inside_a_loop()) == outputs[-1].outputs[0].token_ids[:3]
        asyncio.run(until_quiet(cluster.engine))
        assert cluster.engine.stats().finished["abort"] == 2
        with pytest.raises(RequestError, match="sampling_params={'max_tokens': 2}: use SamplingParams"):
            cluster.generate({"prompt_token_ids": [1]}, {"max_tokens": 2})
        heard, open_stream = [], cluster.stream({"prompt_token_ids": [1, 2, 3]}, greedy(500))
        next(open_stream)

        def wait():
            try:
                cluster.generate({"prompt_token_ids": [1, 2, 3]}, greedy(500))
            except EngineDead as error:
                heard.append(error)
        waiting = threading.Thread(target=wait)
        waiting.start()
        asyncio.run(until(lambda: cluster.engine.stats().num_running + cluster.engine.stats().num_waiting == 2))
    waiting.join(60)
    assert len(heard) == 1 and not waiting.is_alive()
    with pytest.raises(EngineDead, match="was not finished"):
        list(open_stream)
    assert [worker.state for worker in cluster.workers] == ["stopped"]
    for late in (lambda: cluster.generate("x"), lambda: next(cluster.stream("x"))):
        with pytest.raises(EngineDead, match="has been closed"):
            late()
    cluster.close()  # twice is harmless


def test_a_session_stays_on_one_worker_and_finds_its_prefix(pair):
    async def main():
        first = await collect(pair, list(range(1, 100)), greedy(2), "turn1", session_id="s")
        where = {name for name, worker in pair.router_stats()["workers"].items() if worker["known_blocks"]["device"]}
        second = await collect(pair, list(range(1, 150)), greedy(2), "turn2", session_id="s")
        assert first[-1].num_cached_tokens == 0 and second[-1].num_cached_tokens == 96 and where
        await until_quiet(pair)
    asyncio.run(main())


# --- refusals, aborts, the end ------------------------------------------------------------------------------------------


def test_a_refused_request_reaches_its_caller_and_nobody_else(pair, answers):
    async def main():
        good = asyncio.create_task(collect(pair, [1, 2, 3], greedy(120), "good"))
        await asyncio.sleep(0)  # it is there now, and has not ended
        with pytest.raises(RequestError, match="in use"):
            await collect(pair, [1], greedy(1), "good")
        for prompt, words in (([1000], "1000 is not a token"), ([], "is empty"), ("text", "no tokenizer"), ([1] * 600, "max_model_len")):
            with pytest.raises(RequestError, match=words):
                await collect(pair, prompt, greedy(1), "bad")
        with pytest.raises(RequestError, match="no tokenizer"):
            await collect(pair, [1], SamplingParams(stop="x"), "bad")
        assert tokens(await good) == answers([1, 2, 3], 120)
        await until_quiet(pair)
    asyncio.run(main())


def test_closing_a_stream_frees_its_blocks_wherever_it_is(pair, answers):
    async def main():
        steps = pair.stats().steps
        other = asyncio.create_task(collect(pair, [7, 8, 9], greedy(60), "other"))
        streams = [pair.generate([i, 2, 3], greedy(400), f"r{i}") for i in range(1, 30)]  # some run, some wait there, some have no place yet
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert pair._parked
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        assert tokens(await other) == answers([7, 8, 9], 60)
        await until_quiet(pair)
        assert pair.stats().steps - steps < 400  # nobody went on for those who had left
    asyncio.run(main())


def test_a_full_queue_refuses_and_a_drained_cluster_takes_nothing(tiny):  # noqa: F811
    async def main():
        with running(tiny["llama"], cluster={"decode": 1}, max_num_waiting=1, max_num_seqs=1) as cluster:
            assert cluster.capacity == 2
            held = cluster.generate([1, 2, 3], greedy(400), "running")
            await anext(held)
            waiting = asyncio.create_task(collect(cluster, [1, 2, 3], greedy(2), "waiting"))
            await until(lambda: cluster.stats().num_waiting)
            with pytest.raises(EngineOverloaded):
                await collect(cluster, [1, 2, 3], greedy(2), "one too many")
            drained = asyncio.create_task(cluster.drain(0))
            assert (await waiting)[-1].outputs[0].finish_reason == "abort" and not await drained
            with pytest.raises(EngineDraining):
                await collect(cluster, [1], greedy(1), "new")
            assert [out async for out in held][-1].outputs[0].finish_reason == "abort"
            await until_quiet(cluster)
            await cluster.shutdown()
            with pytest.raises(EngineDead):
                cluster.check_health()
    asyncio.run(main())


# --- it survives ------------------------------------------------------------------------------------------------------


def test_what_a_killed_worker_computed_goes_on_elsewhere(pair, answers):
    prompts = [list(range(i, 40 + 3 * i)) for i in range(1, 9)]

    async def main():
        restarts = sum(worker.restarts for worker in pair.workers)
        tasks = [asyncio.create_task(collect(pair, prompt, greedy(120), f"r{i}")) for i, prompt in enumerate(prompts)]
        await until(lambda: all(given(pair, f"r{i}") > 5 for i in (0, 1)))
        os.kill(pid_of(pair, "r0"), signal.SIGKILL)
        for prompt, outputs in zip(prompts, await asyncio.gather(*tasks)):
            assert tokens(outputs) == answers(prompt) and outputs[-1].outputs[0].finish_reason == "length"
            assert len(outputs[-1].metrics.token_s) == 120
        await until_quiet(pair)
        assert sum(worker.restarts for worker in pair.workers) == restarts + 1
        assert tokens(await collect(pair, prompts[0], greedy(5), "after")) == answers(prompts[0], 5)
    asyncio.run(main())


def test_with_every_worker_killed_requests_wait_for_the_next_ones(pair, answers):
    async def main():
        tasks = [asyncio.create_task(collect(pair, [i, 5, 6], greedy(80), f"r{i}")) for i in range(1, 7)]
        await until(lambda: all(given(pair, f"r{i}") > 3 for i in (1, 2)))
        for worker in pair.workers:
            os.kill(worker.pid, signal.SIGKILL)
        for i, outputs in enumerate(await asyncio.gather(*tasks), start=1):
            assert tokens(outputs) == answers([i, 5, 6], 80)
        await until_quiet(pair)
    asyncio.run(main())


def test_a_stopped_worker_loses_its_requests_and_what_it_says_afterwards_is_stale(pair, answers):
    async def main():
        prompts = [[i, 3, 4] for i in range(1, 7)]
        tasks = [asyncio.create_task(collect(pair, prompt, greedy(120), f"r{i}")) for i, prompt in enumerate(prompts)]
        await until(lambda: given(pair, "r0") > 5)
        stopped = pair._flights["r0"].worker
        pid = pid_of(pair, "r0")
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: pair._workers[stopped].state == "sick")
        finally:
            os.kill(pid, signal.SIGCONT)  # while others compute what it had: it goes on where it stood
        for prompt, outputs in zip(prompts, await asyncio.gather(*tasks)):
            assert tokens(outputs) == answers(prompt)
        await until_quiet(pair)  # it is up again, and has let go of what it had
        assert pair._workers[stopped].process.pid == pid
    asyncio.run(main())


def test_a_worker_that_stays_silent_is_replaced(pair, answers, monkeypatch):
    monkeypatch.setattr(supervise, "SICK_S", 0.0)

    async def main():
        stopped = pair.workers[0].pid
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: pair.workers[0].pid not in (stopped, None) and pair.workers[0].state == "up")
        until_gone([stopped])
        assert tokens(await collect(pair, [1, 5, 6], greedy(9), "after")) == answers([1, 5, 6], 9)
        await until_quiet(pair)
    asyncio.run(main())


def test_a_request_that_ends_its_workers_is_given_up_with_an_error(pair, answers):
    async def main():
        poison = asyncio.create_task(collect(pair, [9, 9, 9], greedy(400), "poison"))
        for deaths in range(3):
            await until(lambda: (flight := pair._flights.get("poison")) is not None and flight.deaths == deaths and flight.worker is not None
                        and pair._workers[flight.worker].state == "up")
            os.kill(pid_of(pair, "poison"), signal.SIGKILL)
        outputs = await poison
        assert outputs[-1].outputs[0].finish_reason == "error" and "3 workers ended while they computed it" in outputs[-1].error
        assert tokens(outputs)[:120] == answers([9, 9, 9])[:len(tokens(outputs))]
        assert tokens(await collect(pair, [1, 5, 6], greedy(9), "other")) == answers([1, 5, 6], 9)
        await until_quiet(pair)
    asyncio.run(main())


def test_a_worker_that_never_starts_again_is_gone_and_the_last_one_ends_all(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(supervise, "FIRST_PAUSE_S", 0.0)

    async def main():
        cluster = make(tiny["llama"], cluster={"decode": 1})
        try:
            stream = cluster.generate([1, 2, 3], greedy(400), "r")
            await anext(stream)
            monkeypatch.setattr(sys, "executable", "/bin/false")
            os.kill(cluster.workers[0].pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="engine0"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDead, match="restart the server"):
                cluster.check_health()
            assert cluster.workers[0].state == "gone"
        finally:
            cluster.close()
    asyncio.run(main())


SCRIPT = """
import sys, threading
from minengine import Cluster, SamplingParams
cluster = Cluster(sys.argv[1], prefill=int(sys.argv[2]), decode=2 - int(sys.argv[2]), block_size=16, num_gpu_blocks_override=64, max_model_len=512)
print(*(worker.pid for worker in cluster.workers), flush=True)
cluster.generate([{"prompt_token_ids": [1, 2, 3]}] * 4000, SamplingParams(max_tokens=500, ignore_eos=True))
"""


@pytest.mark.parametrize("sig, prefill", [(signal.SIGKILL, 1), (signal.SIGINT, 0)])
def test_no_worker_outlives_its_parent(tiny, tmp_path, sig, prefill):  # noqa: F811
    script = tmp_path / "unguarded.py"  # workers import nothing of it
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    parent = subprocess.Popen([sys.executable, str(script), tiny["llama"], str(prefill)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    parent.send_signal(sig)
    _, errors = parent.communicate(timeout=60)
    until_gone(pids)
    assert errors.count("Traceback") == (sig == signal.SIGINT), errors  # the parent's own, and none of a worker


# --- it does not start ------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Pids of all processes that are started; none of them may be left."""
    pids = []

    class Noted(launch.LocalProcess):
        def __init__(self, *args):
            super().__init__(*args)
            pids.append(self.pid)

    monkeypatch.setattr(launch, "LocalProcess", Noted)
    yield pids
    until_gone(pids)


def test_a_model_that_is_none_is_found_before_a_process_is_made(started, tmp_path):
    for model in ("no-such-model", str(tmp_path)):
        with pytest.raises(ConfigError, match="model|config.json"):
            make(model)


def test_a_worker_that_cannot_start_says_why_in_one_sentence(started, tiny):  # noqa: F811
    with pytest.raises(ConfigError, match="worker engine[01]: kv_cache_memory_bytes: a pool of .* does not fit this machine's memory"):
        make(tiny["llama"], num_gpu_blocks_override=1 << 40)
    assert len(started) == 2


def test_a_worker_that_is_killed_while_it_starts_is_no_hang(started, tiny, monkeypatch):  # noqa: F811
    noted = launch.LocalProcess

    class Killed(noted):
        def __init__(self, *args):
            super().__init__(*args)
            self.kill()

    monkeypatch.setattr(launch, "LocalProcess", Killed)
    with pytest.raises(ConfigError, match="worker engine[01]: was ended by SIGKILL, perhaps for want of memory"):
        make(tiny["llama"])


@pytest.mark.parametrize("different, words", [
    ({"max_model_len": 128}, "max_model_len: worker decode0 takes 512 tokens and prefill0 128"),
    ({"model": "weights"}, "model: worker decode0 runs another model than prefill0"),
])
def test_workers_that_do_not_fit_are_refused_at_start(started, tiny, tmp_path, different, words):  # noqa: F811
    if different.get("model") == "weights":  # the same config, other weights
        import shutil

        from safetensors.torch import load_file, save_file
        shutil.copytree(tiny["llama"], tmp_path / "other")
        tensors = load_file(tmp_path / "other" / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
        save_file(tensors, tmp_path / "other" / "model.safetensors")
        different = {"model": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match=words):
        make(tiny["llama"], cluster={"prefill": 1, "decode": 1, "prefill_args": different})


def test_what_does_not_fit_is_named(pair):
    ready = pair._workers["engine0"].ready
    check_fit({"prefill0": ready, "decode0": ready, "decode1": replace(ready, num_blocks=5, pid=1)})
    for other, words in ((replace(ready, kv_cache_dtype="bfloat16"), "kv_cache_dtype: worker decode0 keeps rows as bfloat16 and prefill0 as float32"),
                         (replace(ready, config=replace(ready.config, num_hidden_layers=9)), "model: worker decode0 .* with 9 layers of 48"),
                         (replace(ready, fingerprint="0" * 32), "model: worker decode0 runs another model than prefill0"),
                         (replace(ready, max_model_len=5), "max_model_len: worker decode0 takes 5 tokens and prefill0 512")):
        with pytest.raises(ConfigError, match=words):
            check_fit({"prefill0": ready, "decode0": other})


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_threads_are_split_evenly_unless_a_role_has_its_own():
    def threads(**cluster):
        return {start.name: start.args.num_threads for start in plan(EngineArgs(num_threads=8), ClusterArgs(**cluster))}
    assert threads(decode=3) == {"engine0": 3, "engine1": 3, "engine2": 2}
    assert threads(prefill=1, decode=2) == {"prefill0": 3, "decode0": 3, "decode1": 2}
    assert threads(prefill=1, decode=1, prefill_args={"num_threads": 6}) == {"prefill0": 6, "decode0": 4}
    assert set(threads(decode=20).values()) == {1}


@pytest.mark.parametrize("wrong, words", [
    ({"decode": 0}, "decode=0: use 1"), ({"prefill": -1}, "prefill=-1"), ({"router_policy": "best"}, "use one of random, round_robin, kv_aware"),
    ({"worker_timeout_s": 0}, "worker_timeout_s=0"), ({"transfer": "post"}, "transfer='post'"), ({"prefill_args": {"block_size": 16}}, "no prefill worker"),
    ({"decode_args": {"blocks": 16}}, "^decode_args: unknown option 'blocks'"), ({"decode_args": 16}, "use a dict"),
    ({"prefill": 1, "prefill_args": {"block_size": "256"}}, "^prefill_args: block_size='256'"), ({"transfer": "shm"}, "transfer='shm': without prefill workers"),
])
def test_a_plan_that_cannot_be_is_refused_in_one_sentence(wrong, words):
    with pytest.raises(ConfigError, match=words):
        plan(EngineArgs(), ClusterArgs(**wrong))


def test_pushing_without_prefill_workers_is_refused():
    with pytest.raises(ConfigError, match="kv_transfer='push_layers': without prefill workers no KV moves"):
        plan(EngineArgs(kv_transfer="push_layers"), ClusterArgs(decode=2))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_how_rows_move_is_no_choice_of_one_role(role):
    with pytest.raises(ConfigError, match=f"{role}_args: kv_transfer='push_layers' is between the roles"):
        plan(EngineArgs(), ClusterArgs(prefill=1, **{f"{role}_args": {"kv_transfer": "push_layers"}}))
