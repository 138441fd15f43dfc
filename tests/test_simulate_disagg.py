"""Prefill and decode apart under a virtual clock: the scheduler's own holding and loading, and a timeline that can be checked by hand."""
import json
import subprocess
import sys
from math import fsum

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bookkit import page_engine
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.request import OutputKind, Resume, SamplingParams
from minengine.schedule import Scheduler
from minengine.simulate.answer import answer
from minengine.simulate.cost import StepCost
from minengine.simulate.disagg import AMOUNTS, COUNTS, TOKEN_BYTES, Scene, prefill_decode
from minengine.simulate.timeline import BLOCK_SIZE, LEAD, TAIL, Scenario, timeline
from minengine.workload.stats import percentile
from tiny_models import tiny_model

torch.set_num_threads(1)

CALL = "minengine.simulate.disagg.prefill_decode"
ASKED = st.fixed_dictionaries(dict(
    streams=st.integers(1, 24), prompt_tokens=st.integers(16, 500), large_budget=st.integers(150, 400), small_budget=st.integers(30, 149),
    transfer_gb_s=st.floats(0.05, 10), pd_slowdown=st.floats(1, 4), load_admission=st.sampled_from(["poll", "event"]), seed=st.integers(0, 1000)))


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every scheduler's invariants hold after each of its steps."""
    update = Scheduler.update

    def noted(self, *args):
        ended = update(self, *args)
        self.check()
        return ended

    monkeypatch.setattr(Scheduler, "update", noted)


# --- against the engine ------------------------------------------------------------------------------------

class Rows:
    """A connector that is asked, and answers when the test does."""

    def __init__(self):
        self.asked = []

    def find(self, hashes):
        return 0

    def load(self, request, block_ids, num_cached_blocks, hashes):
        self.asked.append((request, len(block_ids) - num_cached_blocks))

    def cancel(self, request):
        return True


@pytest.mark.parametrize("streams, prompt_tokens, budget, seed", [(3, 300, 64, 0), (1, 16, 16, 1), (7, 257, 32, 3), (5, 129, 64, 8)])
def test_the_steps_are_those_that_two_real_engines_take(monkeypatch, streams, prompt_tokens, budget, seed):
    log = {}
    schedule = Scheduler.schedule

    def noted(self, now_s=0.0):
        step = schedule(self, now_s)
        if step.num_tokens:
            log.setdefault(self, []).append({**{r.request_id: 1 for r in step.decodes}, **{r.request_id: n for r, n in step.prefills}})
        return step

    monkeypatch.setattr(Scheduler, "schedule", noted)
    scenario = Scenario(streams, prompt_tokens, 100, seed)
    scene = Scene(scenario, budget, StepCost(), seed, apart=True, transfer_s=lambda rows: 1e-4 * rows, admission="event")
    scene.run()
    decisions, chunks = log[scene.decoder.scheduler][:len(scene.decoder.steps)], log[scene.prefiller.scheduler]
    joined = next(i for i, step in enumerate(decisions) if "prompt" in step)

    def engine(**how):
        args = EngineArgs(block_size=BLOCK_SIZE, num_gpu_blocks_override=40, max_num_seqs=streams + 1, max_num_batched_tokens=budget,
                          enable_prefix_caching=False, max_model_len=512, load_admission="event")
        return LLMEngine(args, model=tiny_model("llama"), **how)

    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    wire = Rows()
    decode, prefill = engine(connector=wire), engine()
    prompt = prefill.add_request("prompt", [5] * prompt_tokens, params, hold=True)
    while "prompt" not in prefill.scheduler.held:
        prefill.step()
    assert log[prefill.scheduler] == chunks
    for i, n in enumerate(scenario.stream_prompts):
        decode.add_request(f"stream-{i}", [7 + i] * n, params)
    for i in range(len(decisions)):
        if i == joined:
            decode.add_request("prompt", [5] * prompt_tokens, params, output_kind=OutputKind.DELTA, source="the prefill engine",
                               resume=Resume(output_token_ids=tuple(prompt.output_token_ids), timeline=prompt.timeline))
            ((request, num_blocks),) = wire.asked
            decode.landed(request, num_blocks)
            prefill.release_request("prompt")
        decode.step()
    assert log[decode.scheduler] == decisions and not prefill.scheduler.held


# --- what holds for every setting --------------------------------------------------------------------------

@settings(max_examples=12, deadline=None)
@given(asked=ASKED)
def test_one_engine_is_the_timeline_of_chapter_2(asked):
    result = prefill_decode(**asked)
    for name in ("large", "small"):
        ours = result[name]
        theirs = timeline(streams=asked["streams"], prompt_tokens=asked["prompt_tokens"], max_num_batched_tokens=asked[f"{name}_budget"],
                          output_tokens=512, seed=asked["seed"])
        moved = [[pytest.approx(start - theirs["arrival_s"], abs=2e-9), pytest.approx(end - theirs["arrival_s"], abs=2e-9), decodes, prefill]
                 for start, end, decodes, prefill in theirs["steps"]]
        assert ours["steps"][:len(moved)] == moved
        assert ours["ttft_s"] == pytest.approx(theirs["ttft_s"], abs=2e-9) and ours["lost_s"] == pytest.approx(theirs["lost_s"], abs=1e-8)
        assert (ours["stalled_gaps"], ours["quiet_gap_s"]) == (theirs["stalled_gaps"], theirs["quiet_gap_s"])


@settings(max_examples=15, deadline=None)
@given(asked=ASKED)
def test_apart_no_stream_waits_for_the_prompt_and_no_token_is_lost(asked):
    apart = prefill_decode(**asked)["apart"]
    seen = next(i for i, step in enumerate(apart["steps"]) if step[0] <= 0 < step[1])
    joined = next(i for i, step in enumerate(apart["steps"]) if step[0] >= apart["decode_admitted_s"])
    assert apart["stalled_gaps"] == 0 and apart["lost_s"] == 0
    assert all(prefill == 0 for _, _, _, prefill in apart["steps"][seen:])  # the decoder computes nothing of the prompt
    assert all(decodes == asked["streams"] + (i >= joined) for i, (_, _, decodes, _) in enumerate(apart["steps"]) if i > seen)
    assert sum(decodes + prefill for _, _, decodes, prefill in apart["prefill_steps"]) == asked["prompt_tokens"]
    assert all(decodes == 0 for _, _, decodes, _ in apart["prefill_steps"][:-1])  # a last chunk of one token is a decode's work
    assert all(decodes + prefill <= asked["large_budget"] for _, _, decodes, prefill in apart["prefill_steps"])
    assert len(apart["prompt"]) == 1 + len(apart["steps"]) - joined  # the first from prefill, then one in each step
    assert apart["prompt"][0] == apart["prefill_steps"][-1][1] == apart["ttft_s"]
    assert apart["prompt"][1:] == [step[1] for step in apart["steps"][joined:]]


@settings(max_examples=15, deadline=None)
@given(asked=ASKED)
def test_a_transfer_takes_its_bytes_time_and_admission_waits_for_a_step(asked):
    apart = prefill_decode(**asked)["apart"]
    start, end = apart["transfer_s"]
    boundaries = [step[0] for step in apart["steps"]]
    assert end - start == pytest.approx(asked["prompt_tokens"] * TOKEN_BYTES / (1e9 * asked["transfer_gb_s"]), abs=2e-9)
    if asked["load_admission"] == "event":
        assert start == apart["ttft_s"] and apart["landed_s"] == end
    else:  # both are noticed between steps only
        assert start == next(at for at in boundaries if at >= apart["ttft_s"])
        assert apart["landed_s"] == next(at for at in boundaries if at >= end)
    assert apart["decode_admitted_s"] == next(at for at in boundaries if at >= apart["landed_s"])
    assert apart["ttft_s"] <= start < end <= apart["landed_s"] <= apart["decode_admitted_s"] < apart["prompt"][1]


@settings(max_examples=12, deadline=None)
@given(asked=ASKED)
def test_the_numbers_follow_from_the_steps_and_all_three_are_equally_long(asked):
    result = prefill_decode(**asked)
    assert json.loads(json.dumps(result)) == result == prefill_decode(**asked)
    ends = []
    for one in result.values():
        steps = one["steps"]
        seen = next(i for i, step in enumerate(steps) if step[0] <= 0 < step[1])
        assert seen == max(first for first, _ in one["streams"]) + LEAD and len(one["prompt"]) > TAIL
        last = steps[-1]
        assert all(mark == len(steps) - 1 for _, mark in one["streams"])
        gaps = [steps[i][1] - steps[i][0] for first, mark in one["streams"] for i in range(max(first, seen) + 1, mark + 1)]
        quiet = steps[seen][1] - steps[seen][0]
        shared = [end - start for start, end, decodes, prefill in steps[seen + 1:] if decodes and prefill]
        for name, value in {"quiet_gap_s": quiet, "longest_gap_s": max(gaps), "p90_gap_s": percentile(gaps, 90),
                            "lost_s": fsum(gap - quiet for gap in shared), "second_gap_s": one["prompt"][1] - one["prompt"][0]}.items():
            assert one[name] == pytest.approx(value, abs=1e-8), name
        ends.append((last[0], last[1]))
    assert max(start for start, _ in ends) < min(end for _, end in ends) + 1e-9  # each goes on until the others' time is covered


def test_by_hand():
    """Steps of 1 s and no more, a prompt of two steps, a transfer of 1.28 s."""
    cost = {"base_s": 1.0, "decode_s": 0, "prefill_s": 0, "attention_s": 0}
    apart = prefill_decode(streams=2, prompt_tokens=64, large_budget=32, small_budget=32, transfer_gb_s=0.05, token_bytes=10**6, cost=cost)["apart"]
    phase = apart["steps"][0][0] % 1  # steps begin at these fractions of a second after the arrival
    assert (apart["admitted_s"], apart["ttft_s"], apart["transfer_s"], apart["landed_s"]) == (0, 2, [2, 3.28], 3.28)
    assert apart["decode_admitted_s"] == pytest.approx(3.28 + (phase - 0.28) % 1) and apart["prompt"][1] == pytest.approx(apart["decode_admitted_s"] + 1)
    poll = prefill_decode(streams=2, prompt_tokens=64, large_budget=32, small_budget=32, transfer_gb_s=0.05, token_bytes=10**6, cost=cost,
                          load_admission="poll")["apart"]
    assert poll["transfer_s"] == [pytest.approx(2 + phase), pytest.approx(3.28 + phase)] and poll["landed_s"] == poll["decode_admitted_s"] == pytest.approx(4 + phase)


def test_the_prefill_engine_keeps_nothing_once_the_rows_have_landed():
    scene = Scene(Scenario(3, 300, 4096, 0), 128, StepCost(), 0, apart=True, transfer_s=lambda rows: 0.1 * (rows == 300), admission="event")
    scene.events.run(lambda: bool(scene.prefiller.scheduler.held))
    pool = scene.prefiller.scheduler.pool
    assert pool.num_free_blocks == pool.num_blocks - pool.blocks_for(300)
    scene.run()
    assert not scene.prefiller.scheduler.held and pool.num_free_blocks == pool.num_blocks
    assert scene.prompt.finish_reason == "handed_over" and scene.continued.num_tokens == 300 + TAIL + 1


def test_where_it_pays_and_where_not():
    result = prefill_decode(streams=8, prompt_tokens=2048)
    assert result["apart"]["p90_gap_s"] < 0.5 * result["small"]["p90_gap_s"] and result["apart"]["ttft_s"] < result["small"]["ttft_s"]
    slow = prefill_decode(streams=8, prompt_tokens=2048, pd_slowdown=2, transfer_gb_s=0.05)["apart"]
    assert slow["ttft_s"] > 1.9 * result["apart"]["ttft_s"] and slow["second_gap_s"] > 1.8 and slow["quiet_gap_s"] > result["large"]["quiet_gap_s"]


@pytest.mark.parametrize("asked, message", [
    ({"streams": 0}, "streams=0: use a whole number from 1 to 24"),
    ({"prompt_tokens": 2.5}, "prompt_tokens=2.5: use a whole number from 16 to 8192"),
    ({"seed": True}, "seed=True: use a whole number"),
    ({"token_bytes": 0}, "token_bytes=0: use a whole number"),
    ({"transfer_gb_s": "fast"}, "transfer_gb_s='fast': use a number from 0.05 to 1000"),
    ({"pd_slowdown": 0.5}, "pd_slowdown=0.5: use a number from 1 to 4"),
    ({"load_admission": "push"}, "load_admission='push': use one of poll, event"),
    ({"small_budget": 600}, "small_budget=600: use at most large_budget, 512"),
    ({"streams": 24, "small_budget": 16}, "max_num_batched_tokens=16 is below max_num_seqs=25: decodes would starve"),
    ({"cost": {"prefill_s": -1}}, "prefill_s=-1: use seconds, 0 or more"),
])
def test_a_setting_that_cannot_be_is_a_sentence(asked, message):
    with pytest.raises(ValueError, match=message):
        prefill_decode(**asked)
    assert answer(CALL, asked)["error"].startswith(message)


def test_the_extremes_of_the_limits_come_to_an_end():
    least, most = ({name: pair[i] for name, pair in {**COUNTS, **AMOUNTS}.items()} for i in (0, 1))
    for asked in (least, most, {**most, "small_budget": 32, "transfer_gb_s": 0.05}, {**least, "prompt_tokens": 8192, "pd_slowdown": 4}):
        assert all(len(one["prompt"]) > TAIL for one in prefill_decode(**asked).values()), asked


def test_the_files_of_the_page_stand_alone_and_answer_as_here(tmp_path):
    files = page_engine.closure()
    assert {"minengine/simulate/disagg.py", "minengine/loading.py", "minengine/kv/connector.py"} <= set(files)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"import json, sys; from minengine.simulate.answer import answer; print(json.dumps(answer({CALL!r}, {{'streams': 5}}))); " \
           "assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answer(CALL, {"streams": 5})
