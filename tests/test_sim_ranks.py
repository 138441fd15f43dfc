"""The simulator against real ranks: the steps that a group takes, and the dummy forwards of those that have nothing to compute."""
from random import Random

import pytest
import torch

from minengine import SamplingParams
from minengine.engine_args import EngineArgs
from minengine.parallel.opening import open_engine
from minengine.simulate import simulate
from minengine.workload.sessions import Session, TraceRequest
from sim_scenes import StandIn, deployment
from tiny_directories import write_tiny

SIZE = 16
OPTIONS = dict(block_size=SIZE, max_num_batched_tokens=48, max_num_seqs=3)
BLOCKS = 14  # of a rank: too few for three long requests, so that some wait and some lose their blocks

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["DEP2", "TP2"])
def group(request, tmp_path_factory):
    directory = str(write_tiny(tmp_path_factory.mktemp("models") / "tiny", "glm", n_routed_experts=7))
    engine = open_engine(EngineArgs(model=directory, topology=request.param, num_gpu_blocks_override=BLOCKS, num_threads=1, **OPTIONS))
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_steps_and_dummy_forwards_are_those_that_real_ranks_take(group, seed):
    """All requests come at once. Each rank's forwards and dummies are counted by the ranks themselves, step by step by the simulator."""
    rng = Random(seed)
    asked = [(rng.randint(1, 150), rng.choice([1, 3, 20, 60])) for _ in range(rng.randint(1, 9))]
    group.reset_prefix_cache()
    before = group.counts()
    for i, (tokens, output) in enumerate(asked):
        ids = [(i * 17 + j * 3) % 200 + 1 for j in range(tokens)]
        group.add_request(f"{seed}-{i}", {"prompt_token_ids": [i + 1] * min(tokens, SIZE) + ids[SIZE:]}, SamplingParams(max_tokens=output, ignore_eos=True))
    outputs = {}
    while group.has_unfinished_requests():
        outputs.update((out.request_id, out) for out in group.step() if out.finished)
    after = group.counts()

    name, seen = group.args.ranks.name, []
    sessions = [Session(f"{i}", SIZE, (TraceRequest(0.0, tokens, output, tuple(range(tokens // SIZE)), SIZE),)) for i, (tokens, output) in enumerate(asked)]
    result = simulate(deployment(topology=name, cached_tokens=BLOCKS * SIZE, **OPTIONS), iter(sessions), concurrency=len(sessions), duration_s=1.0,
                      costs=StandIn, stretch=False, watch=lambda engine, start, end, works, steps: seen.append(works))
    data = group.args.ranks.data
    assert [new.forwards - old.forwards for new, old in zip(after.ranks, before.ranks)] == [len(seen)] * group.args.ranks.gpus
    dummies = [new.dummy_forwards - old.dummy_forwards for new, old in zip(after.ranks, before.ranks)]
    assert dummies[:data] == [sum(not any(works[rank]) for works in seen) for rank in range(data)]
    assert result.counts["dummies"] == sum(dummies)
    for flight in result.flights:  # and the same requests lost their blocks as often
        real = outputs[f"{seed}-{flight.turn.session.split('#')[0]}"]
        assert real.metrics.num_preemptions == flight.timeline.num_preemptions and len(real.outputs[0].token_ids) == flight.output_tokens
