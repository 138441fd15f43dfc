"""A model of agents whose lengths are scaled to the means of a set that it was not fitted to."""
import re
from dataclasses import replace

import pytest

from minengine.config import ConfigError
from minengine.workload.agent_scaling import SESSIONS, scaled_model, scaled_to
from minengine.workload.generator import AgentModel
from minengine.workload.stats import mean


def test_its_sessions_have_the_means_that_were_asked_for():
    found = [r for session in scaled_to(AgentModel.shipped(), 139_924, 446).sessions(SESSIONS) for r in session.requests]
    assert mean(r.input_tokens for r in found) == pytest.approx(139_924, rel=1e-3)
    assert mean(r.output_tokens for r in found) == pytest.approx(446, rel=1e-3)


def test_scaling_changes_lengths_and_nothing_else():
    model = AgentModel.shipped()
    longer = scaled_model(model, 2.0, 0.5)
    for before, after in ((model.session, longer.session), (model.subagent, longer.subagent)):
        for name, factor in (("first_tokens", 2), ("new_tokens", 2), ("output_tokens", 0.5)):
            ours, theirs = getattr(before, name), getattr(after, name)
            assert [value * factor for part in ours.parts for value in part] == pytest.approx([value for part in theirs.parts for value in part], abs=1e-6)
        assert [(2 * tokens, share) for tokens, share in before.anew] == list(after.anew)
        kept = {name: getattr(before, name) for name in ("first_tokens", "new_tokens", "output_tokens", "anew")}
        assert replace(after, **kept) == before
    assert replace(longer, session=model.session, subagent=model.subagent, fitted=model.fitted) == model
    assert longer.fitted == f"{model.fitted}, prompts times 2, answers times 0.5" and AgentModel.from_mapping(longer.mapping()) == longer


@pytest.mark.parametrize("factors, message", [
    ((0, 1), "scale=0"), ((1, -1), "output_scale=-1"), ((float("nan"), 1), "scale=nan"), ((1, float("inf")), "output_scale=inf"),
])
def test_a_factor_that_is_none_is_refused(factors, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        scaled_model(AgentModel.shipped(), *factors)
