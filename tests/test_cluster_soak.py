"""Random kills, stops and aborts under load, round after round: every answer right, every block back on every worker."""
import asyncio
import os
import random
import signal
import sys

import pytest
import torch

from clusters import alone, greedy, running, tiny, tokens, until_quiet  # noqa: F401

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops processes")
PROMPTS = [[1 + 7 * i % 190, *range(1, 8 + 5 * i)] for i in range(12)]
LENGTH = 48


async def one(cluster, answers, rng, name):
    """A request, read to its end or left at a random moment; what came is a beginning of the right answer."""
    i, leave_after = rng.randrange(len(PROMPTS)), rng.choice([None, None, None, 0, 1, 2, rng.randrange(LENGTH)])
    stream, outputs = cluster.generate(PROMPTS[i], greedy(LENGTH), name, session_id=f"s{i % 3}"), []
    try:
        if leave_after == 0:
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        async for output in stream:
            outputs.append(output)
            if leave_after is not None and len(tokens(outputs)) >= leave_after:
                break
    finally:
        await stream.aclose()
    if outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "error":
        assert "workers ended while they computed it" in outputs[-1].error
    elif leave_after is None:
        assert len(tokens(outputs)) == LENGTH
    assert tokens(outputs) == answers[i][:len(tokens(outputs))], f"{name}: wrong tokens"


async def one_round(cluster, answers, rng, number):
    tasks = [asyncio.create_task(one(cluster, answers, rng, f"{number}-{i}")) for i in range(rng.randrange(6, 20))]
    for _ in range(rng.randrange(3)):
        await asyncio.sleep(rng.random() / 5)
        up = [worker for worker in cluster.workers if worker.state == "up"]
        if not up:
            continue
        pid = rng.choice(up).pid
        if rng.random() < 0.7:
            os.kill(pid, signal.SIGKILL)
            continue
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(rng.random() * 2 * cluster.cluster_args.worker_timeout_s)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # killed by another draw
            pass
    await asyncio.gather(*tasks)
    await until_quiet(cluster, 120)


def soak(model, rounds, seed, kv_transfer, load_admission):
    answers = [out.outputs[0].token_ids for out in alone(model, PROMPTS, greedy(LENGTH))]
    rng = random.Random(seed)

    async def main():
        with running(model, cluster={"prefill": 1, "decode": 2, "worker_timeout_s": 1.0}, kv_transfer=kv_transfer, load_admission=load_admission) as cluster:
            for number in range(rounds):
                with cluster._lock:
                    for worker in cluster._workers.values():
                        worker.failures = 0  # these ends are not its own fault
                await one_round(cluster, answers, rng, number)
    asyncio.run(main())


@pytest.mark.parametrize("kv_transfer, load_admission", [("pull", "poll"), ("push_layers", "event")])
def test_a_few_rounds(tiny, kv_transfer, load_admission):  # noqa: F811
    soak(tiny["llama"], 4, 1, kv_transfer, load_admission)


@pytest.mark.soak
@pytest.mark.parametrize("kind, kv_transfer, load_admission", [
    ("llama", "pull", "poll"), ("llama", "push_layers", "event"), ("glm", "pull", "event"), ("glm", "push_layers", "poll")])
def test_five_hundred_rounds(tiny, kind, kv_transfer, load_admission):  # noqa: F811
    soak(tiny[kind], 125, 2, kv_transfer, load_admission)
