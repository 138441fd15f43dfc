"""What a simulation cannot be asked for: each is refused by its name, with the remedy, before anything begins."""
import re

import pytest
from sim_scenes import StandIn, deployment, sessions

from minengine.arithmetic.copies import topology
from minengine.config import ConfigError
from minengine.simulate import Deployment, simulate
from minengine.simulate.machine import machine
from minengine.simulate.recipe import carried, size
from minengine.workload.traces import Session, TraceRequest


def run(how=None, **options):
    return simulate(deployment(**{"prefill": "DEP2", "decode": "TP2", "decoders": 2, **(how or {})}), sessions(0), **{"concurrency": 3, "duration_s": 12.0, "warm_s": 3.0, "costs": StandIn, **options})


@pytest.mark.parametrize("changes, says", [
    ({"machine": [1]}, "machine=[1]: use a name"),
    ({"machine": 5}, "machine=5: use a name"),
    ({"model": ["glm-5.3"]}, "model=['glm-5.3']: use a name"),
    ({"model_options": {"x": 1}}, "x is unknown; use weights"),
    ({"model_options": [1]}, "use a mapping"),
    ({"model_options": {"draft_tokens": True}}, "draft_tokens: use a whole number"),
    ({"model_options": {"tokens_per_step": "3"}}, "tokens_per_step: use a number"),
    ({"model_options": {"experts": 4}}, "experts: use a format"),
    ({"router_options": 5}, "use a mapping"),
    ({"router_options": {"temperature": "warm"}}, "temperature: use a number"),
    ({"router_options": {"recent_requests": 0}}, "recent_requests: use a number, 1 or more"),
    ({"router_options": {"sticky": "yes"}}, "sticky: use true, false or null"),
    ({"host_tier_bytes": 1000}, "a block takes 1,934,592 bytes"),
    ({"decoders": 10_000}, "40,008 GPUs; use 10,000 at most"),
    ({"topology": "TP100000"}, "100,000 GPUs"),
])
def test_what_is_wrong_with_a_deployment_is_said(changes, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Deployment(**changes)


def test_a_deployment_is_made_of_a_mapping():
    with pytest.raises(ConfigError, match="deployment=None: use a mapping"):
        Deployment.of(None)
    with pytest.raises(ConfigError, match="topology='4': use TP"):
        topology(4)


@pytest.mark.parametrize("given, says", [
    ({"kind": "model", "card": ["GB200"]}, "card=['GB200']: use one of"),
    ({"kind": "model", "card": "GB200", "constants": 5}, "constants=5: use a mapping"),
    ({"kind": "model", "card": "GB200", "constants": {1: 2}}, "is missing"),
    ({"kind": "linear", 1: 2, "base": 3}, "1 is unknown"),
    ({"kind": "linear", "measured": 5}, "measured=5: use a mapping"),
])
def test_a_machine_of_wrong_kinds(given, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        machine(given)


def test_a_machine_s_file_that_is_no_text(tmp_path):
    (tmp_path / "m.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        machine(str(tmp_path / "m.yml"))


@pytest.mark.parametrize("options, says", [
    ({"duration_s": float("inf")}, "duration_s=inf: use a number from 0 to 10,000,000"),
    ({"duration_s": "x"}, "duration_s='x': use a number"),
    ({"duration_s": "1e3"}, "write 1000"),
    ({"duration_s": 0.0, "warm_s": 0.0}, "use a time"),
    ({"warm_s": float("nan")}, "warm_s=nan"),
    ({"gap_cap_s": None}, "gap_cap_s=None"),
    ({"concurrency": True}, "concurrency=True: use a whole number from 1 to 5,000"),
    ({"concurrency": 100_000}, "concurrency=100000"),
    ({"seed": "a"}, "seed='a': use a whole number, 0 or more"),
    ({"seed": -1}, "seed=-1"),
    ({"cold_per_s": "q"}, "cold_per_s='q'"),
    ({"cold_per_s": 1e9, "cold_tokens": 1, "cold_output_tokens": 1}, "cold_per_s=1000000000.0: use a number from 0 to 1,000"),
    ({"cold_per_s": 900, "duration_s": 9000, "cold_tokens": 1, "cold_output_tokens": 1}, "makes 8,100,000 requests"),
    ({"cold_per_s": 1.0, "cold_tokens": 1.5, "cold_output_tokens": 1}, "cold_tokens=1.5: use a whole number"),
    ({"gaps": 7}, "gaps=7: use recorded"),
    ({"nope": 1}, "nope is unknown; use slo, duration_s"),
    ({"slo": 5}, "slo=5: use a Slo"),
])
def test_what_is_wrong_with_a_run_is_said_before_it_begins(options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run(costs=None, **options)


@pytest.mark.parametrize("given, says", [((deployment(), None), "sessions=None: use Sessions"), ((deployment(), "agentx"), "sessions='agentx'"),
                                         ((deployment(), [1]), "sessions: 1 is no Session"), (({}, []), "deployment={}: use a Deployment")])
def test_what_is_simulated_is_a_deployment_and_sessions(given, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        simulate(*given, costs=StandIn)


def test_requests_that_are_all_refused_end_at_last():
    """Nothing takes time then: one follows the other without end."""
    only = [Session("long", 16, (TraceRequest(0.0, 4000, 5, tuple(range(250)), 16),))]
    with pytest.raises(ConfigError, match="prompt: 4000 tokens need 250 blocks and the smallest pool has 60; and so with all 10,000 requests so far"):
        simulate(deployment(), only, concurrency=1, duration_s=1.0, costs=StandIn)


def test_costs_and_pools_are_looked_up_once_for_all_engines_of_a_kind(monkeypatch):
    """A machine's file is read for each: with many engines nothing would be seen to begin."""
    asked, looked = [], Deployment.tokens_cached
    monkeypatch.setattr(Deployment, "tokens_cached", lambda self, name, role: asked.append(role) or looked(self, name, role))
    run(how={"prefills": 3, "decoders": 4}, costs=lambda name, role: asked.append(name) or StandIn(name, role))
    assert asked == ["DEP2", "prefill", "TP2", "decode"]


@pytest.mark.parametrize("changes, says", [
    ({"metric": "nope"}, "metric='nope': use one of e2e_tok_s_user"),
    ({"metric": "ttft_s_p50"}, "metric='ttft_s_p50'"),
    ({"cases": []}, "cases=[]: use at least one"),
    ({"cases": [1]}, "cases=[1]"),
    ({"bar": "x"}, "bar='x': use tok/s"),
    ({"bar": 0}, "bar=0"),
    ({"concurrency": 0}, "concurrency=0: use a whole number"),
    ({"candidates": {}}, "candidates={}: use at least one"),
    ({"candidates": {"one": {}}}, "deployment={}: use a Deployment"),
    ({"points": (1, "2")}, "points=(1, '2')"),
    ({"points": 4}, "points=4"),
])
def test_what_a_recipe_cannot_be_asked_for(changes, says):
    asked = {"candidates": {"one": deployment()}, "sessions": sessions(0), "concurrency": 3, "bar": 100, "points": (1, 2), "costs": StandIn, "duration_s": 1.0,
             **changes}
    asked |= changes
    with pytest.raises(ConfigError, match=re.escape(says)):
        size(asked.pop("candidates"), asked.pop("sessions"), **asked)
    if not {"cases", "concurrency", "candidates"} & set(changes):
        with pytest.raises(ConfigError, match=re.escape(says)):
            carried(deployment(), [], asked["bar"], asked["points"], metric=asked.get("metric", "e2e_tok_s_user"))
