"""A group of ranks as one engine: one rank's tokens on any mix of requests, counts that are the formulas', and an end that leaves nothing behind."""
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import lru_cache

import pytest
import ranks
import torch

from minengine import LLM, SamplingParams
from minengine.arithmetic import kv_copies, rank_kv_bytes, rank_weights, step_sent
from minengine.async_llm import AsyncLLM, EngineDead
from minengine.cli import main
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.model.decoder import load_model
from minengine.parallel import opening
from minengine.parallel.group import Group, GroupError
from minengine.parallel.opening import open_engine
from minengine.request import RequestError, StructuredOutputsParams
from ranks import alive, gone
from tiny_directories import write_tiny

TIE = 1e-3  # two best tokens closer than this may change places under another order of summation
COUNTED = ["TP2", "TP4", "TEP4", "DEP2", "DEP4", "TP4+DCP2"]
OPTIONS = dict(block_size=16, num_gpu_blocks_override=40, max_num_batched_tokens=48, max_num_seqs=6, num_threads=1)
MIXES = 6  # of two ranks; half as many of four

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Seven experts divide among neither two ranks nor four."""
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny", "glm", n_routed_experts=7))


@pytest.fixture(scope="module", params=COUNTED)
def group(request, directory):
    """An engine of that topology, for all tests that leave it as it was."""
    engine = open_engine(EngineArgs(model=directory, topology=request.param, **OPTIONS))
    yield engine
    engine.close()


def prompt(length, family):
    return [(family * 31 + i * i * 7 + i * 3) % 210 + 1 for i in range(length)]


@lru_cache(maxsize=None)
def alone(directory, length, family, max_tokens):
    """One rank, one request: its tokens, and how far apart the two best were at each."""
    engine = LLMEngine(EngineArgs(model=directory, block_size=16, max_num_seqs=1, enable_prefix_caching=False, num_threads=1), model=one_rank(directory))
    engine.add_request("alone", prompt(length, family), SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    out = outputs[0].outputs[0]
    return out.token_ids, [abs(a.logprob - b.logprob) for a, b in (list(entry.values())[:2] for entry in out.logprobs)]


@lru_cache
def one_rank(directory):
    return load_model(directory)


def finish(engine):
    """Step to the end: {request_id: output}."""
    done = {}
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            return done
        done.update((out.request_id, out) for out in engine.step() if out.finished)
    raise AssertionError("the engine does not come to an end")


def near_ties(directory, outputs, asked):
    """Checks all tokens; returns how many answers left one rank's path where the two best tokens were as good as equal."""
    ties = 0
    assert outputs.keys() == asked.keys()
    for name, (length, family, max_tokens) in asked.items():
        want, margins = alone(directory, length, family, max_tokens)
        got = outputs[name].outputs[0].token_ids
        assert len(got) == len(want)
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if at is not None:
            assert margins[at] < TIE, f"{name}: token {at} is {got[at]}, alone it is {want[at]}, and the two best lie {margins[at]:.4f} apart"
            ties += 1
    return ties


def mix(engine, directory, seed):
    """Random lengths (shorter than a DCP group, longer than index_topk), arrivals, prefixes shared by families, aborts; returns near ties."""
    draw, turn = random.Random(seed), 0
    arrivals = [(draw.randint(0, 8), f"{seed}-{i}", (draw.choice([1, 2, 15, 17, 33, 70, 95]), draw.randint(0, 2), draw.choice([1, 3, 9])))
                for i in range(draw.randint(1, 7))]
    victims = {name for _, name, _ in arrivals if draw.random() < 0.1}
    asked, outputs = {}, {}
    while arrivals or engine.has_unfinished_requests():
        for at, name, what in [one for one in arrivals if one[0] <= turn]:
            engine.add_request(name, prompt(*what[:2]), SamplingParams(max_tokens=what[2], temperature=0.0))
            asked[name] = what
            arrivals.remove((at, name, what))
        for out in engine.step():
            if out.finished:
                outputs[out.request_id] = out
        for name in victims & (asked.keys() - outputs.keys()):
            if (out := engine.abort_request(name)) is not None:
                outputs[name] = out
        turn += 1
        assert turn < 5000
    assert {outputs[name].outputs[0].finish_reason for name in outputs} <= {"length", "abort"}
    whole = {name: out for name, out in outputs.items() if out.outputs[0].finish_reason == "length"}
    assert outputs.keys() - whole.keys() <= victims and outputs.keys() == asked.keys()
    return near_ties(directory, whole, {name: asked[name] for name in whole})


def test_tokens_are_one_ranks(group, directory):
    mixes = MIXES * 2 // group.args.ranks.gpus
    assert sum(mix(group, directory, seed) for seed in range(mixes)) <= 2
    assert group.pool.num_free_blocks == group.pool.num_blocks and not group.requests


@pytest.mark.soak
def test_tokens_are_one_ranks_on_many_mixes(group, directory):
    ties = sum(mix(group, directory, seed) for seed in range(100, 200))
    print(f"{group.args.ranks.name}: {ties} answers of 100 mixes left the path at a near tie")
    assert ties <= 10


def difference(after, before):
    """Per rank, {purpose: (calls, bytes)} of what happened in between."""
    found = []
    for new, old in zip(after.ranks, before.ranks):
        parts = {name: (one.calls, one.nbytes) for name, one in new.traffic.items()}
        for name, one in old.traffic.items():
            parts[name] = parts[name][0] - one.calls, parts[name][1] - one.nbytes
        found.append({name: part for name, part in parts.items() if part[0]})
    return found


def test_counts_are_the_formulas(group):
    """One request on rank 0: 30 prompt tokens in a chunk, then four decodes, of which all see more than index_topk tokens (24)."""
    args, config, name = group.args, group.config, group.args.ranks.name
    group.reset_prefix_cache()
    group.zero_kv_cache()
    before = group.counts()
    on_rank_0 = {"data_parallel_rank": 0} if args.ranks.data > 1 else {}
    group.add_request("counted", prompt(30, 5), SamplingParams(max_tokens=5, temperature=0.0), **on_rank_0)
    finish(group)
    after = group.counts()
    assert after.topology == name and [rank.rank for rank in after.ranks] == list(range(args.ranks.gpus))
    # What lies there.
    assert after.copies(34) == kv_copies(name)  # the last token of an answer is never computed
    for rank in after.ranks:
        assert rank.kv_bytes == rank_kv_bytes(config, name, "float32", 40, 16)
        assert rank.weight_bytes == sum(rank_weights(config, name, rank.rank).values())
    # What was sent.
    data = args.ranks.data > 1
    steps = [dict(tokens=30, logits=1, choices=[30])] + [dict(tokens=1, logits=1, choices=[1])] * 4
    sent = difference(after, before)
    assert [new.forwards - old.forwards for new, old in zip(after.ranks, before.ranks)] == [5] * args.ranks.gpus
    assert [new.dummy_forwards - old.dummy_forwards for new, old in zip(after.ranks, before.ranks)] == [0] + [5 * data] * (args.ranks.gpus - 1)
    assert all(rank.collectives and rank.sent_bytes for rank in after.ranks)
    row = config.hidden_size * 4
    if data:  # where the visits went is the router's word; that as many come back as went is not
        arrived = [part["moe.combine"][1] // row for part in sent]
        assert arrived[0] == 0 and sum(arrived) * row == sent[0]["moe.dispatch"][1]
        assert sum(arrived) <= 4 * 34 * 2  # layers, tokens, experts a token
        assert all(new.all_to_all_wait_s > old.all_to_all_wait_s for new, old in zip(after.ranks, before.ranks))
    for rank, part in enumerate(sent):
        expected = {}
        for step in steps:
            own = step if not data or rank == 0 else dict(tokens=0, logits=0)
            for purpose, one in step_sent(config, name, rank, **own).items():
                calls, nbytes = expected.get(purpose, (0, 0))
                expected[purpose] = calls + one.calls, nbytes + one.nbytes
        if data:
            visits = step_sent(config, name, rank, 0, 0, visits_out=sum(arrived) if rank == 0 else 0, visits_in=arrived[rank])
            expected |= {purpose: (expected[purpose][0], visits[purpose].nbytes) for purpose in ("moe.dispatch", "moe.combine")}
        assert part == expected


def test_nobody_works_while_nobody_asks(group):
    """Ranks without work sleep: they compute nothing, and nothing wakes them."""
    finish(group)
    before = group.counts()
    assert group.step() == [] and group.idle
    slept = [_times_slept(pid) for pid in group.group.pids]
    for _ in range(50):
        group.step()
    # One may have been on its way to sleep when it was looked at.
    assert all(_times_slept(pid) - so_far <= 1 for pid, so_far in zip(group.group.pids, slept))
    assert [rank.forwards for rank in group.counts().ranks] == [rank.forwards for rank in before.ranks]


def _times_slept(pid):
    """How often the thread that runs a rank's steps has gone to sleep; gloo's own, which looks at its sockets now and then, is another."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read(), re.MULTILINE)[1])


def test_errors_are_one_ranks(group):
    """What can never be served is refused at once, wherever it would have gone; and the group goes on."""
    for rank in range(group.args.ranks.data):
        where = {"data_parallel_rank": rank} if group.args.ranks.data > 1 else {}
        with pytest.raises(RequestError, match="prompt: has 700 tokens"):
            group.add_request("long", [1] * 700, **where)
    assert not group.has_unfinished_requests()
    group.add_request("twice", [1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        group.add_request("twice", [1, 2, 3])
    assert finish(group).keys() == {"twice"}


@pytest.fixture(scope="module")
def engine(directory):
    """Ranks with requests of their own."""
    engine = open_engine(EngineArgs(model=directory, topology="DEP2", **OPTIONS))
    yield engine
    engine.close()


class TestData:
    def test_uneven_loads(self, engine, directory):
        """All requests on one rank, then on the other; then one long one beside many short ones."""
        for loads in ((0, 0, 0, 0), (1, 1, 1), (0, 1, 1, 1, 1)):
            asked = {}
            for i, rank in enumerate(loads):
                asked[str(i)] = (40 if i == 0 else 5, i, 12 if i == 0 else 2)
                engine.add_request(str(i), prompt(*asked[str(i)][:2]), SamplingParams(max_tokens=asked[str(i)][2], temperature=0.0), data_parallel_rank=rank)
            assert near_ties(directory, finish(engine), asked) == 0

    def test_requests_go_where_fewest_are(self, engine):
        for i in range(4):
            engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=2))
        assert sorted(engine._rank_of.items()) == [("1", 1), ("3", 1)]
        finish(engine)
        with pytest.raises(RequestError, match="data_parallel_rank=2: use 0 to 1"):
            engine.add_request("x", [1], data_parallel_rank=2)

    def test_a_session_stays_where_its_history_is(self, engine):
        """Turns of three sessions on two ranks, in an order that going to the idlest would mix up."""
        histories = {name: prompt(48, 300 + name) for name in range(3)}
        first = {}
        for turn in range(3):
            for name in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[turn]:
                engine.add_request(f"{name}", histories[name], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
                first.setdefault(name, engine._rank_of.get(f"{name}", 0))
                assert engine._rank_of.get(f"{name}", 0) == first[name]
            for name, output in finish(engine).items():
                assert output.num_cached_tokens >= (48 if turn else 0), (turn, name)
                histories[int(name)] = histories[int(name)] + output.outputs[0].token_ids + prompt(20, 400 + turn)
        assert set(first.values()) == {0, 1}

    def test_a_seed_gives_the_same_tokens_on_any_rank(self, engine):
        answers = []
        for rank in (0, 1):
            engine.add_request("drawn", prompt(9, 1), SamplingParams(max_tokens=12, temperature=1.0), data_parallel_rank=rank, seed=5)
            answers.append(finish(engine)["drawn"].outputs[0].token_ids)
        assert answers[0] == answers[1]

    def test_a_prefix_is_found_on_the_rank_that_has_it(self, engine):
        found = []
        for rank in (1, 1, 0):
            engine.add_request("again", prompt(40, 77), SamplingParams(max_tokens=1), data_parallel_rank=rank)
            found.append(finish(engine)["again"].num_cached_tokens)
        assert found == [0, 32, 0]
        engine.reset_prefix_cache()
        engine.add_request("again", prompt(40, 77), SamplingParams(max_tokens=1), data_parallel_rank=1)
        assert finish(engine)["again"].num_cached_tokens == 0

    def test_a_request_that_is_dropped_at_once_is_not_computed(self, engine):
        before = engine.counts()
        engine.add_request("gone", [1, 2, 3], data_parallel_rank=1)
        assert engine.abort_request("gone") is None  # it is another rank's, which says so with the next step
        done = finish(engine)
        assert done["gone"].outputs[0].finish_reason == "abort" and not done["gone"].outputs[0].token_ids
        assert [rank.forwards for rank in engine.counts().ranks] == [rank.forwards for rank in before.ranks]


# --- ends --------------------------------------------------------------------------------------------------------


class TestEnds:
    @pytest.mark.parametrize("topology, at", [("TP2", "idle"), ("TP4+DCP2", "busy"), ("DEP2", "idle"), ("DEP2", "busy")])
    def test_a_killed_rank_ends_the_group(self, topology, at, directory):
        engine = open_engine(EngineArgs(model=directory, topology=topology, **OPTIONS))
        pids = engine.group.pids
        engine.add_request("one", prompt(40, 1), SamplingParams(max_tokens=400, temperature=0.0))
        for _ in range(3):
            engine.step()
        began = time.monotonic()
        victim = pids[-1]
        if at == "busy":  # stopped first, so that the others are inside a collective when it ends
            os.kill(victim, signal.SIGSTOP)
            killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({victim}, 9)"])
        else:
            os.kill(victim, signal.SIGKILL)
        with pytest.raises(GroupError, match=rf"topology='{topology.replace('+', '.')}': rank {len(pids)} of {len(pids) + 1} was ended by SIGKILL; "
                                             "the group has ended, start the engine again"):
            for _ in range(100):
                engine.step()
        assert time.monotonic() - began < 10 and gone(pids)
        if at == "busy":
            killer.wait()
        with pytest.raises(GroupError, match="was ended by SIGKILL"):  # the same again, at once
            engine.step()

    @pytest.mark.parametrize("topology", ["TP2", "DEP2"])
    def test_ctrl_c_ends_an_answer_and_not_the_group(self, topology, directory):
        llm = LLM(directory, topology=topology, **OPTIONS)
        ask = [{"prompt_token_ids": prompt(20, i)} for i in range(2)], SamplingParams(max_tokens=5, temperature=0.0)
        llm.llm_engine.runner.on_layer = lambda layer, batch: layer == 2 and os.kill(os.getpid(), signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                llm.generate(*ask)
        llm.llm_engine.runner.on_layer = None
        assert [out.outputs[0].token_ids for out in llm.generate(*ask)] == [alone(directory, 20, i, 5)[0] for i in range(2)]
        assert llm.kv_cache.num_free_blocks == llm.kv_cache.num_blocks and not llm.llm_engine.requests
        llm.llm_engine.runner.on_layer = lambda layer, batch: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):  # twice: at once
            llm.generate(*ask)
        with pytest.raises(GroupError, match="KeyboardInterrupt; the group has ended"):
            llm.generate(*ask)
        assert gone(llm.llm_engine.group.pids)

    def test_a_rank_that_fails_says_why(self, directory):
        engine = open_engine(EngineArgs(model=directory, topology="TP2", **OPTIONS))
        with pytest.raises(GroupError, match="topology='TP2': rank 1: ZeroDivisionError: .*by zero; the group has ended"):
            engine.group.call(_fails_on_rank_1)
        assert gone(engine.group.pids)

    def test_a_rank_that_does_not_answer(self, directory, monkeypatch):
        monkeypatch.setattr(opening, "SILENCE_S", 2.0)
        engine = open_engine(EngineArgs(model=directory, topology="TP2", **OPTIONS))
        os.kill(engine.group.pids[0], signal.SIGSTOP)
        engine.add_request("one", [1, 2, 3])
        with pytest.raises(GroupError, match="topology='TP2': a rank of 2 does not answer: 'vocab.embed' came to nothing after 2"):
            engine.step()
        assert gone(engine.group.pids)

    def test_a_group_that_is_closed_or_forgotten_leaves_no_process(self, directory):
        for forget in (False, True):
            llm = LLM(directory, topology="TP2", **OPTIONS)
            pids, folder = llm.llm_engine.group.pids, llm.llm_engine.group.member.folder
            assert all(map(alive, pids))
            if forget:
                import gc

                del llm
                gc.collect()
            else:
                llm.close()
                llm.close()
                with pytest.raises(GroupError, match="was closed"):
                    llm.generate([{"prompt_token_ids": [1, 2]}])
            assert gone(pids) and not os.path.exists(folder)

    @pytest.mark.parametrize("how", ["exits", "killed"])
    def test_the_ranks_end_with_rank_0(self, how):
        """Killed while another rank is in the middle of something; or at its own end, with the group forgotten."""
        code = ("import sys, time, ranks; from minengine.parallel.group import Group; group = Group(2, 1, 'TP2'); group.call(ranks.pid);"
                "print(*group.pids, flush=True); sys.argv[1] == 'exits' or (group.tell(ranks.sleeps), print(flush=True), time.sleep(600))")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True, env=env) as first:
            pids = list(map(int, first.stdout.readline().split()))
            if how == "killed":
                first.stdout.readline()
                assert all(map(alive, pids))
                first.kill()
        assert pids and gone(pids)

    def test_the_first_to_end_is_named(self):
        """Not one that ended because of it, though that was noticed before."""
        group = Group(3, 1, "TP3")
        pids = group.call(ranks.pid)
        group.tell(ranks.follows_and_fails, pids)
        with pytest.raises(GroupError, match="topology='TP3': rank 2 of 3 ended with exit code 1 .ZeroDivisionError"):
            group.results()
        assert gone(group.pids)


    def test_a_server_hears_of_it_while_nobody_asks(self, directory):
        asked = {str(i): (20 + i, i, 6) for i in range(5)}

        async def answer(llm, name, length, family, max_tokens):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            return [token async for out in llm.generate({"prompt_token_ids": prompt(length, family)}, params, name) for token in out.outputs[0].token_ids]

        async def serve():
            llm = AsyncLLM.from_engine_args(EngineArgs(model=directory, topology="DEP2", **OPTIONS))
            pids = llm.engine.group.pids
            answers = await asyncio.gather(*(answer(llm, name, *what) for name, what in asked.items()))
            llm.check_health()
            os.kill(pids[0], signal.SIGKILL)
            await asyncio.to_thread(llm._thread.join, 10)
            with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
                llm.check_health()
            await llm.shutdown()
            assert gone(pids)
            return answers

        assert asyncio.run(serve()) == [alone(directory, *what)[0] for what in asked.values()]


def _fails_on_rank_1(member):
    return 1 // (1 - member.rank)


def test_from_a_terminal(capsys):
    texts = [f"duze 197 004 by the river fefa 158 203 and a stone was under the old wall . ? {name}" for name in ("fefa", "duze")]
    assert main(["generate", "--model", "glm-mini", "--topology", "DEP2", "--block-size", "16", "--num-threads", "1", *texts]) == 0
    assert [line[-7:] for line in capsys.readouterr().out.splitlines()] == ["158 203", "197 004"]
    assert main(["generate", "--model", "glm-mini", "--topology", "TP3", "x"]) == 2
    assert "use TP2, TP4, TP8" in capsys.readouterr().err


def test_a_grammar_that_is_none_is_refused_at_once():
    """And one that is one holds on any rank."""
    engine = open_engine(EngineArgs(model="glm-mini", topology="DEP2", **OPTIONS))
    try:
        for rank in (0, 1):
            with pytest.raises(RequestError, match="structured_outputs.regex"):
                engine.add_request("wrong", [5, 6], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), data_parallel_rank=rank)
            engine.add_request(str(rank), [5, 6], SamplingParams(structured_outputs=StructuredOutputsParams(choice=[" the old wall"])), data_parallel_rank=rank)
        assert [out.outputs[0].text for out in finish(engine).values()] == [" the old wall"] * 2
    finally:
        engine.close()


def test_the_public_face():
    """Texts, streams and the cache's figures, as with one rank."""
    texts = ["duze 197 004 by the river fefa 158 203 and a stone was under the old wall . ? fefa"] * 2
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    llm = LLM("glm-mini", topology="TP2", block_size=16, num_threads=1)
    try:
        assert [out.outputs[0].text for out in llm.generate(texts, greedy)] == [" 158 203"] * 2
        *_, last = llm.stream(texts[0], greedy)
        assert last.outputs[0].text == " 158 203" and last.num_cached_tokens == 16
        assert llm.kv_cache.block_size == 16 and llm.kv_cache.num_free_blocks == llm.kv_cache.num_blocks
        llm.zero_kv_cache()
        assert llm.generate(texts[:1], greedy)[0].outputs[0].text != " 158 203"
    finally:
        llm.close()
