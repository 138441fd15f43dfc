"""Prices of this machine's steps: on an engine whose clock charges what LinearCosts say, the fit finds those again."""
import pytest
import yaml

from minengine.config import ConfigError
from minengine.simulate import calibrate as module
from minengine.simulate.calibrate import QUICK, Scenes, calibrate, main
from minengine.simulate.cost import StepCost
from minengine.simulate.machine import machine
from minengine.simulate.work import LinearCosts, Work

PRICED = {"base_s": 0.02, "decode_s": 0.003, "decode_attention_s": 1.3e-5, "prefill_s": 0.0005, "attention_s": 2e-6}


class Priced:
    """An engine's clock that a step moves by its price, once the step is computed."""

    now_s = 0.0

    def __call__(self):
        return self.now_s

    def attach(self, engine):
        execute = engine.runner.execute

        def charged(step):
            self.now_s += sum(price * amount for price, amount in zip(PRICED.values(), module._amounts(step)))
            return execute(step)

        engine.runner.execute = charged
        return engine


@pytest.fixture
def priced(monkeypatch):
    clock = Priced()
    make = module._engine
    monkeypatch.setattr("minengine.workload.open_loop.EngineClock", lambda: clock)
    monkeypatch.setattr(module, "_engine", lambda *args: clock.attach(make(*args)))


def test_the_fit_finds_the_prices_that_were_charged(priced):
    found = calibrate("glm-mini", scenes=QUICK, device="cpu")
    assert found.prices == pytest.approx(PRICED, rel=1e-3)
    assert found.errors.n > 40 and found.errors.maximum < 1e-3
    read = machine(found.mapping())
    assert read.cost.base_s == found.prices["base_s"] and read.others["decode_attention_s"] == found.prices["decode_attention_s"]


def test_every_scene_has_decodes_alone_and_a_prompt_among_decodes(priced, monkeypatch):
    seen = []
    fit = module.relative_fit
    monkeypatch.setattr(module, "relative_fit", lambda work, seconds, **how: seen.extend(work) or fit(work, seconds, **how))
    calibrate("glm-mini", scenes=QUICK, device="cpu")
    alone = [work for work in seen if work[1] and not work[3]]
    mixed = [work for work in seen if work[1] and work[3]]
    assert len(alone) >= QUICK.count * (QUICK.lead + QUICK.tail) and len(mixed) >= QUICK.count
    assert all(steps == 1 and decodes + prefill <= QUICK.budget[1] for steps, decodes, _, prefill, _ in seen)


def test_the_command_writes_a_file_that_says_where_it_was_measured(priced, tmp_path, capsys):
    out = tmp_path / "here.yml"
    assert main("glm-mini", str(out), quick=True) == 0
    written = yaml.safe_load(out.read_text())
    assert written["kind"] == "linear" and written["base_s"] == pytest.approx(0.02, rel=1e-3)
    assert written["measured"].keys() >= {"model", "cpu", "threads", "date", "steps", "median_error"} and written["measured"]["model"] == "glm-mini"
    assert "ms  a step" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no folder"):
        main("glm-mini", str(tmp_path / "none" / "here.yml"), quick=True)


def test_a_budget_that_the_streams_fill_is_refused():
    with pytest.raises(ConfigError, match="budget of 8 tokens"):
        calibrate("glm-mini", scenes=Scenes(count=1, streams=(1, 12), budget=(8, 64)), device="cpu")


def test_a_row_may_cost_a_decode_another_price_than_a_prompts_token():
    work = Work(decodes=2, context=50, prefill_tokens=3, prefill_pairs=7)
    prices = {name: PRICED[name] for name in ("base_s", "decode_s", "prefill_s", "attention_s")}
    alike, apart = LinearCosts(StepCost(**prices)), LinearCosts(StepCost(**prices), decode_attention_s=PRICED["decode_attention_s"])
    common = 20_000_000_000 + 2 * 3_000_000_000 + 3 * 500_000_000 + 7 * 2_000_000
    assert alike.rank_ps([work]) == [common + 50 * 2_000_000] and apart.rank_ps([work, Work()]) == [common + 50 * 13_000_000, 20_000_000_000]
