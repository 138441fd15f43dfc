"""What others do to an engine while its model computes: the step is not disturbed, and nothing is lost."""
import threading

import pytest
import torch

from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.kv.cache import KVCache
from minengine.request import OutputKind, Resume, SamplingParams, Status
from test_engine import alone, assert_same, engine, prompt
from tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Connector:
    """Another engine's pool, in this process: what is asked is copied when the test says so."""

    def __init__(self, other=None):
        self.other, self.loads, self.stores = other, [], []

    def find(self, hashes):
        return 0

    def load(self, request, block_ids, num_cached_blocks, hashes):
        self.loads.append((request, list(block_ids), num_cached_blocks))

    def cancel(self, request):
        return True

    def store(self, hashes, block_ids):
        self.stores.append(list(block_ids))

    def copy(self, mine, theirs):
        request, block_ids, first = self.loads.pop(0)
        size = mine.kv.block_size
        for i in range(first * size, request.num_tokens - 1):
            for layer in range(mine.config.num_hidden_layers):
                for head in range(mine.config.kv_heads):
                    target = mine.kv.row(layer, block_ids[i // size] * size + i % size, head)
                    target.copy_(theirs.kv.row(layer, request.source[i // size] * size + i % size, head))
        return request, len(block_ids) - first


def during(e, act):
    """The next step, with `act()` called by another thread while the model computes."""
    execute = e.runner.execute

    def acting(step):
        tokens = execute(step)
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        return tokens

    e.runner.execute = acting
    try:
        return e.step()
    finally:
        e.runner.execute = execute
        e.scheduler.check()


def with_connector(**options):
    connector = Connector()
    args = EngineArgs(**{"block_size": 16, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options})
    return LLMEngine(args, model=tiny_model("llama"), connector=connector), connector


def finish(e):
    got = {}
    while e.has_unfinished_requests():
        for out in e.step():
            got.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
        e.scheduler.check()
    return got


def test_an_abort_waits_for_the_step_that_computes_it_and_for_no_other():
    e = engine()
    for name, family in (("a", 1), ("b", 2)):
        e.add_request(name, prompt(199, 20, family), GREEDY, output_kind=OutputKind.DELTA)
    e.step()
    e.add_request("waits", prompt(199, 20, 1), GREEDY)
    answers = []

    def act():
        answers.append(e.abort_request("a"))  # twice is harmless
        answers.append(e.abort_request("a"))
        e.add_request("late", prompt(199, 20, 3), GREEDY)
        answers.append(e.abort_request("late"))
        assert "a" in e.requests and e.requests["a"].status is Status.RUNNING

    outputs = during(e, act)
    assert answers[:2] == [None, None] and answers[2].outputs[0].finish_reason == "abort"
    ended = [out for out in outputs if out.finished]
    assert [(out.request_id, out.outputs[0].finish_reason) for out in ended] == [("a", "abort")]
    assert finish(e).keys() == {"b", "waits"} and e.num_free_blocks == e.pool.num_blocks


def test_one_that_ends_in_the_step_that_it_is_aborted_in_is_told_once():
    e = engine()
    e.add_request("last", prompt(199, 20, 1), SamplingParams(max_tokens=1))
    out, = during(e, lambda: e.abort_request("last"))
    assert out.outputs[0].finish_reason == "length" and not e.requests
    assert e.step() == []


def test_a_step_that_raises_still_honours_the_abort():
    e = engine()
    e.add_request("r", prompt(199, 20, 1), GREEDY, output_kind=OutputKind.DELTA)
    execute = e.runner.execute

    def failing(step):
        e.abort_request("r")
        raise MemoryError

    e.runner.execute = failing
    with pytest.raises(MemoryError):
        e.step()
    e.runner.execute = execute
    assert e.step()[-1].outputs[0].finish_reason == "abort" and not e.requests and e.num_free_blocks == e.pool.num_blocks


@pytest.mark.parametrize("admission", ["poll", "event"])
def test_rows_land_while_a_step_computes(admission):
    """One engine prefills and holds, the other reads its rows and goes on: the tokens of one engine alone."""
    p = engine()
    e, connector = with_connector(load_admission=admission)
    held = p.add_request("r", prompt(199, 50, 1), GREEDY, output_kind=OutputKind.DELTA, hold=True)
    first = p.step()[0]
    e.add_request("busy", prompt(199, 20, 2), SamplingParams(max_tokens=30, temperature=0.0))
    e.step()
    resume = Resume(output_token_ids=tuple(first.outputs[0].token_ids), timeline=first.metrics)

    def arrive():
        e.add_request("r", prompt(199, 50, 1), GREEDY, output_kind=OutputKind.DELTA, resume=resume, source=list(held.block_ids))
        assert len(connector.loads) == (admission == "event"), "an event needs no step"

    during(e, arrive)
    during(e, lambda: None)
    request = e.requests["r"]
    assert request.status is Status.LOADING and not e.idle

    def land():
        e.landed(*connector.copy(e, p))
        p.release_request("r")

    during(e, land)
    assert request.status is Status.READY
    e.step()
    assert request.status is Status.RUNNING and request.num_tokens == 52 and request.num_computed_tokens == 51
    got = [request.token_ids[50], request.token_ids[51]] + finish(e)["r"]
    assert_same(got, *alone("llama", "float32", 50, 1, 8))
    t = request.timeline
    assert t.arrival_s <= t.admitted_s <= t.token_s[0] <= t.landed_s <= t.decode_admitted_s <= t.token_s[1]
    assert p.num_free_blocks == p.pool.num_blocks
    for blocks in connector.stores:
        e.stored(blocks)
    assert e.num_free_blocks == e.pool.num_blocks


def test_rows_that_came_before_the_first_token():
    """Pushed while prefill computes: the decoder's request has no output until it is told."""
    p = engine()
    e, connector = with_connector()
    ids = prompt(199, 48, 1)  # its first token needs a block of its own
    held = p.add_request("r", ids, GREEDY, output_kind=OutputKind.DELTA, hold=True)
    request = e.add_request("r", ids, GREEDY, output_kind=OutputKind.DELTA, source=[])
    assert e.step() == [] and e.idle and request.status is Status.LOADING and e.has_unfinished_requests()
    first = p.step()[0].outputs[0]
    request.source = list(held.block_ids)
    e.resume_request("r", Resume(output_token_ids=tuple(first.token_ids), sent_chars=0))
    e.landed(*connector.copy(e, p))
    assert not e.idle
    assert_same(first.token_ids + finish(e)["r"], *alone("llama", "float32", 48, 1, 8))
    e.resume_request("r", Resume(output_token_ids=(1,)))  # too late: nothing happens


def test_a_failed_load_is_recomputed_and_a_step_that_does_nothing_says_so():
    e, connector = with_connector()
    tokens, margins = alone("llama", "float32", 50, 1, 8)
    request = e.add_request("r", prompt(199, 50, 1), GREEDY, output_kind=OutputKind.DELTA, resume=Resume(output_token_ids=(tokens[0],)), source=[0])
    assert e.step() == [] and e.idle
    e.load_failed(request, "prefill is gone")
    assert not e.idle
    assert_same([tokens[0]] + finish(e)["r"], tokens, margins)


def test_the_hook_sees_each_layer_when_its_rows_are_there():
    e = engine(max_num_batched_tokens=32)
    seen = []
    e.add_request("r", prompt(199, 40, 1), SamplingParams(max_tokens=2, temperature=0.0))

    def on_layer(layer, batch):
        request, n = e.runner.step.prefills[0] if e.runner.step.prefills else (e.runner.step.decodes[0], 1)
        slot = request.block_ids[0] * 16
        there = [bool(e.kv.row(i, slot).any()) for i in range(3)]
        seen.append((layer, len(batch.input_ids), there if not request.num_computed_tokens else None))

    e.runner.on_layer = on_layer
    while e.has_unfinished_requests():
        e.step()
    assert seen[:3] == [(0, 32, [True, False, False]), (1, 32, [True, True, False]), (2, 32, [True, True, True])]
    assert [(layer, n) for layer, n, _ in seen[3:]] == [(0, 8), (1, 8), (2, 8), (0, 1), (1, 1), (2, 1)]


def test_the_pool_lies_where_it_is_told():
    e = engine()
    given = torch.zeros(e.kv.nbytes, dtype=torch.uint8)
    asked = []
    for storage in (given, lambda nbytes: asked.append(nbytes) or given):
        kv = LLMEngine(e.args, model=e.model, storage=storage).kv
        assert kv.storage.data_ptr() == given.data_ptr()
    assert asked == [e.kv.nbytes]
    for wrong in (given[1:], given.view(torch.int8)):
        with pytest.raises(ValueError, match="the pool takes"):
            KVCache(e.config, "float32", "LBNHC", e.kv.num_blocks, 16, storage=wrong)
