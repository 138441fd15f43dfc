"""The engine behind its asynchronous face: nothing lost, nothing kept, nobody waiting for ever."""
import asyncio
import contextlib
import shutil
import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minengine.async_llm import AsyncLLM, EngineDead, EngineDraining, EngineOverloaded
from minengine.compiling import Compiling
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.kv.tier_open import tier_folders
from minengine.request import RequestError, SamplingParams, StructuredOutputsParams
from tiny_models import tiny_model

torch.set_num_threads(1)  # a second thread only slows a model this small


def tiny_engine(**options):
    return LLMEngine(EngineArgs(**{"block_size": 16, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 4, **options}),
                     model=tiny_model("llama"))


@contextlib.asynccontextmanager
async def served(max_num_waiting=64, **options):
    llm = AsyncLLM(tiny_engine(**options), max_num_waiting=max_num_waiting)
    try:
        yield llm
    finally:
        await llm.shutdown()
        llm.engine.scheduler.check()


def greedy(n, **more):
    return SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, **more)


async def collect(llm, prompt, params, request_id, **more):
    return [out async for out in llm.generate(prompt, params, request_id, **more)]


async def until(condition):
    """Yield to everybody until it holds; the test's own time limit is the only clock."""
    while not condition():
        await asyncio.sleep(0)


def tokens(outs):
    return [token for out in outs for token in out.outputs[0].token_ids]


def alone(prompt, params):
    engine = tiny_engine()
    engine.add_request("alone", prompt, params)
    while engine.has_unfinished_requests():
        outs = engine.step()
    return outs[0].outputs[0]


def test_deltas_joined_are_what_the_engine_gives_alone():
    async def main():
        async with served() as llm:
            prompts = [list(range(1, 5 + 9 * i)) for i in range(9)]  # more than max_num_seqs: some wait
            return prompts, await asyncio.gather(*(collect(llm, p, greedy(12), f"r{i}") for i, p in enumerate(prompts)))
    for prompt, outs in zip(*asyncio.run(main())):
        want = alone(prompt, greedy(12))
        assert tokens(outs) == want.token_ids
        assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
        assert outs[-1].outputs[0].finish_reason == "length" and outs[-1].prompt_token_ids == prompt


def test_deltas_that_nobody_fetched_in_time_come_as_one():
    async def main():
        async with served() as llm:
            stream = llm.generate([1, 2, 3], greedy(20, logprobs=1), "slow")
            first = await anext(stream)
            await until(lambda: not llm.stats().num_running)
            await asyncio.sleep(0)
            return first, [out async for out in stream]
    first, rest = asyncio.run(main())
    assert len(rest) < 19 and tokens([first, *rest]) == alone([1, 2, 3], greedy(20)).token_ids
    assert sum(len(out.outputs[0].logprobs) for out in [first, *rest]) == 20


def test_a_request_has_arrived_when_its_caller_sends_it_not_when_a_step_has_ended():
    async def main():
        async with served() as llm:
            reached, go_on = threading.Event(), threading.Event()
            execute = llm.engine.runner.execute

            def held(step):
                reached.set()
                go_on.wait()
                return execute(step)

            llm.engine.runner.execute = held
            first = asyncio.create_task(collect(llm, [1, 2, 3], greedy(1), "first"))
            await until(reached.is_set)  # a step is under way
            second = asyncio.create_task(collect(llm, [4, 5, 6], greedy(1), "second"))
            await until(lambda: llm.stats().num_waiting)
            posted_s = llm.engine.clock()
            go_on.set()
            await first
            return posted_s, (await second)[-1].metrics
    posted_s, times = asyncio.run(main())
    assert times.arrival_s < posted_s < times.admitted_s


def test_closing_a_stream_frees_its_blocks_and_leaves_the_others():
    async def main():
        async with served() as llm:
            other = asyncio.create_task(collect(llm, [7, 8, 9], greedy(60), "other"))
            stream = llm.generate([1, 2, 3], greedy(400), "closed")
            await anext(stream)
            await stream.aclose()
            outs = await other
            await until(lambda: not llm.stats().num_running)
            assert llm.stats().finished == {"length": 1, "abort": 1} and llm.engine.num_free_blocks == llm.engine.pool.num_blocks
            return outs
    assert tokens(asyncio.run(main())) == alone([7, 8, 9], greedy(60)).token_ids


def test_a_cancelled_task_aborts_its_request_running_or_waiting():
    async def main():
        async with served(max_num_seqs=1) as llm:
            tasks = [asyncio.create_task(collect(llm, [i, 2, 3], greedy(400), f"r{i}")) for i in range(1, 4)]
            await until(lambda: llm.stats().num_running == 1 and llm.stats().num_waiting == 2)
            for task in tasks:
                task.cancel()
            assert all(isinstance(done, asyncio.CancelledError) for done in await asyncio.gather(*tasks, return_exceptions=True))
            await until(lambda: not llm.engine.requests and not llm._num_waiting())
            assert llm.engine.num_free_blocks == llm.engine.pool.num_blocks and not llm._streams
    asyncio.run(main())


def test_a_refused_request_reaches_its_caller_and_nobody_else():
    async def main():
        async with served() as llm:
            good = asyncio.create_task(collect(llm, [1, 2, 3], greedy(30), "good"))
            for prompt, words in (([1000], "1000 is not a token"), ([], "is empty"), ("text", "no tokenizer"), ([1] * 10_000, "max_model_len")):
                with pytest.raises(RequestError, match=words):
                    await collect(llm, prompt, greedy(1), "bad")
            await until(lambda: "good" in llm._streams)
            with pytest.raises(RequestError, match="in use"):
                await collect(llm, [1], greedy(1), "good")
            return await good
    assert len(tokens(asyncio.run(main()))) == 30


def test_a_full_queue_refuses_and_says_when_to_come_back():
    async def main():
        async with served(max_num_waiting=2, max_num_seqs=1) as llm:
            held = llm.generate([1, 2, 3], greedy(450), "running")
            await anext(held)
            waiting = [asyncio.create_task(collect(llm, [1, 2, 3], greedy(2), f"w{i}")) for i in range(2)]
            await until(lambda: llm.stats().num_waiting == 2)
            with pytest.raises(EngineOverloaded) as caught:
                await collect(llm, [1, 2, 3], greedy(2), "one too many")
            assert 1 <= caught.value.retry_after_s <= 60
            await held.aclose()
            assert [len(tokens(outs)) for outs in await asyncio.gather(*waiting)] == [2, 2]  # those that were there are served
            assert len(tokens(await collect(llm, [1, 2, 3], greedy(2), "one too many"))) == 2
    asyncio.run(main())


def test_an_idle_engine_takes_as_many_as_can_run_and_wait():
    async def main():
        async with served(max_num_waiting=1, max_num_seqs=2) as llm:
            assert llm.capacity == 3
            streams = [llm.generate([1, 2, 3], greedy(5), f"r{i}") for i in range(4)]
            tasks = [asyncio.create_task(anext(stream)) for stream in streams]  # all before the engine has seen one
            outs = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(out, EngineOverloaded) for out in outs] == [False, False, False, True]
            for stream in streams:
                await stream.aclose()
    asyncio.run(main())


def test_the_wait_that_an_overload_names_is_the_pace_of_the_last_requests():
    async def main():
        async with served() as llm:
            for ended, seconds in (([], 1), ([5.0], 1), ([0.0, 3.5, 7.0], 4), ([0.0, 500.0], 60), ([1.0, 1.0], 1)):
                llm._ended.clear()
                llm._ended.extend(ended)
                assert llm._retry_after_s() == seconds
    asyncio.run(main())


def test_a_failed_step_ends_every_request_with_an_error_and_the_engine_is_dead():
    async def main():
        llm = AsyncLLM(tiny_engine())
        tasks = [asyncio.create_task(collect(llm, [i, 2, 3], greedy(400), f"r{i}")) for i in range(1, 4)]
        await until(lambda: llm.stats().num_running == 3)

        def broken(step):
            raise MemoryError("no room")

        llm.engine.runner.execute = broken
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(done, EngineDead) and "no room" in str(done)
        with pytest.raises(EngineDead, match="restart the server"):
            llm.check_health()
        with pytest.raises(EngineDead):
            await collect(llm, [1], greedy(1), "late")
        await llm.shutdown()
    asyncio.run(main())


@pytest.mark.parametrize("patient", [True, False])
def test_draining_finishes_what_is_there_and_takes_nothing_new(patient):
    async def main():
        async with served() as llm:
            task = asyncio.create_task(collect(llm, [1, 2, 3], greedy(40 if patient else 480), "there"))
            await until(lambda: llm.stats().num_running == 1)
            drained = asyncio.create_task(llm.drain(60 if patient else 0))
            await until(lambda: llm._draining)
            with pytest.raises(EngineDraining):
                await collect(llm, [1], greedy(1), "new")
            outs = await task
            assert await drained is patient
            assert outs[-1].outputs[0].finish_reason == ("length" if patient else "abort")
            assert await llm.drain(0)  # with nothing left
    asyncio.run(main())


def test_shutting_down_tells_those_who_still_wait():
    async def main():
        llm = AsyncLLM(tiny_engine())
        stream = llm.generate([1, 2, 3], greedy(400), "left")
        await anext(stream)
        await llm.shutdown()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
    asyncio.run(main())


# --- compiling ------------------------------------------------------------------------------------------------------


class SlowGrammars:
    """Stands in for the engine's: each compile is noted, and ends when the test says so."""

    def __init__(self):
        self.begun, self.go_on = [], threading.Event()

    def compile(self, params):
        self.begun.append(params)
        self.go_on.wait()
        if params == "wrong":
            raise RequestError("structured_outputs: wrong")
        return params.upper()


def test_a_compile_that_nobody_waits_for_any_more_is_dropped_before_its_turn():
    slow = SlowGrammars()

    async def main():
        compiling = Compiling(slow.compile)
        first, gone, wrong, last = (asyncio.create_task(compiling.run(params)) for params in ("first", "gone", "wrong", "last"))
        await until(lambda: slow.begun)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        slow.go_on.set()
        with pytest.raises(RequestError, match="wrong"):
            await wrong
        assert (await first, await last, slow.begun) == ("FIRST", "LAST", ["first", "wrong", "last"])
    asyncio.run(main())


def test_requests_whose_grammar_is_being_compiled_count_as_waiting_and_neither_drain_nor_exit_waits_for_it():
    slow = SlowGrammars()

    async def main():
        async with served(max_num_waiting=1, max_num_seqs=1) as llm:
            llm._compiling = Compiling(slow.compile)
            ask = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
            tasks = [asyncio.create_task(collect(llm, [1, 2, 3], ask, f"r{i}")) for i in range(2)]
            await until(lambda: slow.begun)
            assert llm.stats().num_waiting == 2
            with pytest.raises(EngineOverloaded):
                await collect(llm, [1, 2, 3], greedy(1), "one too many")
            assert not await llm.drain(0)
            for done in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(done, EngineDraining)
            assert await llm.drain(0)
            await until(lambda: not llm.stats().num_waiting)
    asyncio.run(main())  # hangs, if the compile is in a thread that asyncio joins
    slow.go_on.set()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_callers_do_every_block_comes_back_and_every_token_comes_once(data):
    """Requests arrive, are read at any pace, closed after any number of deltas, refused; those read to the end are as alone."""
    plans = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 5)),
                               min_size=1, max_size=10))

    async def one(llm, i, length, max_tokens, close_after, pause):
        prompt, seen = list(range(1, 1 + length)), []
        stream = llm.generate(prompt, greedy(max_tokens), f"r{i}")
        async for out in stream:
            seen.append(out)
            for _ in range(pause):
                await asyncio.sleep(0)
            if close_after is not None and len(seen) > close_after:
                break
        await stream.aclose()
        if seen[-1].finished:
            assert tokens(seen) == alone(prompt, greedy(max_tokens)).token_ids

    async def main():
        async with served(kv_cache_memory_bytes=None, num_gpu_blocks_override=12) as llm:  # a pool too small for all: some are preempted
            await asyncio.gather(*(one(llm, i, *plan) for i, plan in enumerate(plans)))
            await until(lambda: not llm.engine.requests and not llm._num_waiting())
            assert llm.engine.num_free_blocks == llm.engine.pool.num_blocks and not llm._streams
            assert sum(llm.stats().finished.values()) == len(plans)
    asyncio.run(main())


@pytest.mark.parametrize("load_admission", ["poll", "event"])
def test_an_engine_of_its_own_has_tiers_too(tmp_path, load_admission):
    prompts = [[i, *range(1, 150)] for i in range(1, 6)]  # 10 blocks each, and the pool has 16: only the tier still has the first ones

    async def main():
        async with served(kv_cache_memory_bytes=None, num_gpu_blocks_override=16, max_model_len=200, host_tier_bytes=1 << 24, tier_path=str(tmp_path),
                          load_admission=load_admission) as llm:
            first = [await collect(llm, prompt, greedy(8), f"a{i}") for i, prompt in enumerate(prompts)]
            await until(lambda: llm._connector.idle)
            return first, [await collect(llm, prompt, greedy(8), f"b{i}") for i, prompt in enumerate(prompts)]
    try:
        first, second = asyncio.run(main())
    finally:
        shutil.rmtree(tier_folders(str(tmp_path))["host"], ignore_errors=True)
    assert [tokens(outs) for outs in first] == [tokens(outs) for outs in second] == [alone(prompt, greedy(8)).token_ids for prompt in prompts]
    assert [outs[0].num_cached_tokens for outs in second] == [144] * 5
    assert all(part >= 0 for outs in second for part in outs[-1].metrics.wait_parts())


@pytest.mark.parametrize("load_admission, lands", [("poll", False), ("event", True)])
def test_a_load_begins_while_a_step_is_computed_if_landings_are_events(tmp_path, load_admission, lands):
    known = list(range(1, 150))

    async def main():
        async with served(kv_cache_memory_bytes=None, num_gpu_blocks_override=32, max_model_len=200, host_tier_bytes=1 << 24, tier_path=str(tmp_path),
                          load_admission=load_admission) as llm:
            first = await collect(llm, known, greedy(8), "first")
            await until(lambda: llm._connector.idle)
            llm.engine.reset_prefix_cache()
            computing, go_on, execute = threading.Event(), threading.Event(), llm.engine.runner.execute

            def slowly(step):
                computing.set()
                go_on.wait(30)
                return execute(step)

            llm.engine.runner.execute = slowly
            long_step = asyncio.create_task(collect(llm, [7, 7, 7], greedy(1), "other"))
            await until(computing.is_set)
            second = asyncio.create_task(collect(llm, known, greedy(8), "second"))
            if lands:
                await until(lambda: llm.engine.scheduler.ready)  # in the pool, and the step is still computed
            else:
                await asyncio.sleep(0)
                assert "second" not in llm.engine.requests
            go_on.set()
            await long_step
            return first, await second
    try:
        first, second = asyncio.run(main())
    finally:
        shutil.rmtree(tier_folders(str(tmp_path))["host"], ignore_errors=True)
    assert tokens(first) == tokens(second) and second[0].num_cached_tokens == 144
