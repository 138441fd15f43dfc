"""The engine's scheduler under a virtual clock: the same decisions as a real engine, the same events for the same seed."""
import json
import subprocess
import sys
from math import fsum

import pytest
import torch
from hypothesis import given, settings, strategies as st

from bookkit import page_engine
from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.request import Request, SamplingParams
from minengine.schedule import Chunk, Scheduler, Step
from minengine.simulate.answer import answer
from minengine.simulate.clock import VirtualClock
from minengine.simulate.cost import StepCost, attended_pairs
from minengine.simulate.timeline import BLOCK_SIZE, LEAD, LIMITS, STREAM_PROMPT, TAIL, Scenario, timeline
from tiny_models import tiny_model

torch.set_num_threads(1)
CALL = "minengine.simulate.timeline.timeline"
SETTINGS = dict(streams=st.integers(1, 24), prompt_tokens=st.integers(1, 600), max_num_batched_tokens=st.integers(25, 300),
                output_tokens=st.integers(8, 80), seed=st.integers(0, 1000))


@pytest.fixture
def decisions(monkeypatch):
    """What every scheduler decides, step by step: {request: tokens}; its invariants are checked after each."""
    log = []
    schedule, update = Scheduler.schedule, Scheduler.update

    def noted(self, now_s=0.0):
        step = schedule(self, now_s)
        log.append({**{r.request_id: 1 for r in step.decodes}, **{r.request_id: n for r, n in step.prefills}})
        return step

    def checked(self, *args):
        ended = update(self, *args)
        self.check()
        return ended

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(Scheduler, "update", checked)
    return log


# --- against the engine ------------------------------------------------------------------------------------

@pytest.mark.parametrize("asked", [
    dict(streams=3, prompt_tokens=300, max_num_batched_tokens=64, output_tokens=40),
    dict(streams=1, prompt_tokens=1, max_num_batched_tokens=16, output_tokens=8),
    dict(streams=7, prompt_tokens=257, max_num_batched_tokens=8 * 4, output_tokens=12, seed=3),  # streams end while the prompt is computed
    dict(streams=20, prompt_tokens=100, max_num_batched_tokens=21, output_tokens=30, seed=5),  # some wait while others decode
    dict(streams=2, prompt_tokens=430, max_num_batched_tokens=500, output_tokens=80, seed=9),
])
def test_the_steps_are_those_that_a_real_engine_takes(decisions, asked):
    result = timeline(**asked)
    virtual = decisions.copy()
    decisions.clear()

    scenario = Scenario(asked["streams"], asked["prompt_tokens"], asked["output_tokens"], asked.get("seed", 0))
    clock, cost = VirtualClock(), StepCost()
    engine = LLMEngine(EngineArgs(block_size=BLOCK_SIZE, num_gpu_blocks_override=scenario.num_blocks, max_num_seqs=asked["streams"] + 1,
                                  max_num_batched_tokens=asked["max_num_batched_tokens"], enable_prefix_caching=False, max_model_len=512),
                       model=tiny_model("llama"), clock=clock)
    execute = engine.runner.execute

    def timed(step):
        clock.advance(cost.seconds(step))
        return execute(step)

    engine.runner.execute = timed
    params = SamplingParams(max_tokens=asked["output_tokens"], temperature=0, ignore_eos=True)
    streams = [engine.add_request(f"stream-{i}", [7 + i] * n, params) for i, n in enumerate(scenario.stream_prompts)]
    late = None
    while len(decisions) < len(virtual):
        engine.step()
        if late is None and all(len(r.output_token_ids) > LEAD for r in streams):
            late = engine.add_request("prompt", [5] * asked["prompt_tokens"], params)

    assert decisions == virtual
    for request, marks in zip([*streams, late], [*result["streams"], result["prompt"]], strict=True):
        assert request.timeline.token_s == [result["steps"][i][1] for i in marks]  # to the digit
    assert late.timeline.admitted_s == result["admitted_s"]


# --- what holds for every setting --------------------------------------------------------------------------

@settings(max_examples=60)
@given(**SETTINGS)
def test_budget_decodes_first_and_nothing_lost(**asked):
    result = timeline(**asked)
    steps, budget = result["steps"], asked["max_num_batched_tokens"]
    scenario = Scenario(asked["streams"], asked["prompt_tokens"], asked["output_tokens"], asked["seed"])
    assert steps[0][0] == 0 and all(one[1] == other[0] for one, other in zip(steps, steps[1:]))
    assert all(start < end and 0 < decodes + prefill <= budget for start, end, decodes, prefill in steps)
    for marks in (*result["streams"], result["prompt"]):  # in every step from the first token to the last
        assert marks == list(range(marks[0], marks[0] + len(marks)))
        assert len(marks) == asked["output_tokens"] or marks[-1] == len(steps) - 1
    all_marks = [*result["streams"], result["prompt"]]
    assert sum(decodes + prefill for _, _, decodes, prefill in steps) == (
        sum(scenario.stream_prompts) + asked["prompt_tokens"] + sum(len(marks) - 1 for marks in all_marks))
    assert len(result["prompt"]) == min(TAIL + 1, asked["output_tokens"])


@settings(max_examples=60)
@given(**SETTINGS)
def test_the_numbers_follow_from_the_steps(**asked):
    result = timeline(**asked)
    steps, first = result["steps"], result["prompt"][0]
    arrived_in = next(i for i, step in enumerate(steps) if step[0] <= result["arrival_s"] < step[1])
    assert arrived_in == max(marks[LEAD] for marks in result["streams"])
    assert result["admitted_s"] == steps[arrived_in][1] and result["first_token_s"] == steps[first][1]
    assert result["ttft_s"] == pytest.approx(steps[first][1] - result["arrival_s"], abs=1e-12)
    quiet = steps[arrived_in][1] - steps[arrived_in][0]
    shared = [end - start for i, (start, end, decodes, prefill) in enumerate(steps) if arrived_in < i <= first and decodes and prefill]
    gaps = [steps[i][1] - steps[i][0] for marks in result["streams"] for i in marks[1:] if i > arrived_in]
    assert result["stalled_gaps"] == len(shared)
    assert result["quiet_gap_s"] == pytest.approx(quiet, abs=1e-12)
    assert result["longest_gap_s"] == pytest.approx(max(gaps, default=0), abs=1e-12)
    assert result["lost_s"] == pytest.approx(fsum(gap - quiet for gap in shared), abs=1e-9)


@settings(max_examples=30)
@given(**SETTINGS)
def test_equal_seeds_equal_events(**asked):
    one = timeline(**asked)
    assert json.dumps(timeline(**asked)) == json.dumps(one)
    assert json.loads(json.dumps(one)) == one  # nothing is lost on the way to a page
    other = Scenario(asked["streams"], 10, 10, asked["seed"] + 1), Scenario(asked["streams"], 10, 10, asked["seed"])
    assert len({(*s.stream_prompts, s.arrives_at) for s in other}) == 2
    assert all(STREAM_PROMPT[0] <= n <= STREAM_PROMPT[1] for s in other for n in s.stream_prompts)


def test_a_smaller_budget_makes_more_and_shorter_stalls_and_moves_their_sum_little():
    small, large = (timeline(max_num_batched_tokens=budget) for budget in (64, 512))
    assert small["stalled_gaps"] == 11 and large["stalled_gaps"] == 2  # 640 tokens in chunks of 61 and of 509
    assert small["longest_gap_s"] < large["longest_gap_s"] / 4 and small["ttft_s"] > large["ttft_s"]
    assert small["lost_s"] == pytest.approx(large["lost_s"], rel=0.01)


@pytest.mark.parametrize("asked, message", [
    ({"streams": 0}, "streams=0: use a whole number from 1 to 24"),
    ({"prompt_tokens": 2.5}, "prompt_tokens=2.5: use a whole number from 1 to 8192"),
    ({"seed": True}, "seed=True: use a whole number"),
    ({"output_tokens": "many"}, "output_tokens='many': use a whole number from 8 to 512"),
    ({"streams": 24, "max_num_batched_tokens": 16}, "max_num_batched_tokens=16 is below max_num_seqs=25: decodes would starve"),
    ({"cost": {"prefill_s": -1}}, "prefill_s=-1: use seconds, 0 or more"),
    ({"cost": {"base_s": 0}}, "base_s=0: use more than 0 seconds"),
    ({"cost": {"decode_s": float("nan")}}, "decode_s=nan: use seconds"),
])
def test_a_setting_that_cannot_be_is_a_sentence(asked, message):
    with pytest.raises(ValueError, match=message):
        timeline(**asked)
    assert answer(CALL, asked)["error"].startswith(message) and answer(CALL, asked)["settings"] == asked


def test_the_extremes_of_the_limits_come_to_an_end():
    least, most = ({name: pair[i] for name, pair in LIMITS.items()} for i in (0, 1))
    for asked in (least, most, {**most, "max_num_batched_tokens": 25}, {**least, "prompt_tokens": 8192}):
        assert timeline(**asked)["prompt"], asked


# --- the cost of a step and the clock ----------------------------------------------------------------------

def test_a_step_costs_what_its_parts_cost():
    def request(tokens, computed):
        r = Request(f"r{tokens}", [1] * tokens, SamplingParams(), max_model_len=10_000)
        r.num_computed_tokens = computed
        return r

    step = Step(decodes=[request(11, 10), request(100, 99)], prefills=[Chunk(request(50, 20), 5)])
    rows = [11, 100, 21, 22, 23, 24, 25]  # that each token attends to
    assert attended_pairs(step) == sum(rows)
    cost = StepCost(base_s=1.0, decode_s=0.25, prefill_s=0.125, attention_s=0.5)
    assert cost.seconds(step) == 1.0 + 2 * 0.25 + 5 * 0.125 + sum(rows) * 0.5
    assert cost.seconds(Step()) == 1.0
    with pytest.raises(ConfigError, match="base_s='1': use seconds"):
        StepCost(base_s="1")


def test_the_clock_adds_exactly_and_only_forward():
    clock = VirtualClock()
    for _ in range(1000):
        clock.advance(0.0001)
    clock.advance(0.0157)  # as a float a little below its whole number of nanoseconds
    assert clock() == 0.1157  # a sum of floats would miss it
    with pytest.raises(ValueError, match="goes forward"):
        clock.advance(-1e-9)
    with pytest.raises(ValueError, match="goes forward"):
        clock.advance(float("nan"))


# --- the files that a page runs ----------------------------------------------------------------------------

def test_the_files_of_the_page_stand_alone_and_answer_as_here(tmp_path):
    files = page_engine.closure()
    assert {"minengine/schedule.py", "minengine/kv/blocks.py", "minengine/kv/__init__.py", "minengine/simulate/timeline.py"} <= set(files)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"import json, sys; from minengine.simulate.answer import answer; print(json.dumps(answer({CALL!r}, {{'streams': 5}}))); " \
           "assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answer(CALL, {"streams": 5})


def test_an_import_that_a_page_has_not_is_named(tmp_path):
    def closure(**files):
        for name, text in {"__init__": "", **files}.items():
            (tmp_path / "m" / f"{name}.py").parent.mkdir(exist_ok=True)
            (tmp_path / "m" / f"{name}.py").write_text(text)
        return page_engine.closure(tmp_path, ("m.a",))

    assert set(closure(a="from .b import c\nimport json\n", b="def c():\n    import torch\n", unused="import torch\n")) == {
        "m/__init__.py", "m/a.py", "m/b.py"}  # what a function imports is not needed to import it
    assert "m/d.py" in closure(a="from . import d\n", d="")
    for text in ("import torch\n", "from torch import Tensor\n", "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
                 "class A:\n    import torch.nn\n"):
        with pytest.raises(page_engine.PageEngineError, match=r"m/a.py imports torch\S*, which a page's Python does not have"):
            closure(a=text)
