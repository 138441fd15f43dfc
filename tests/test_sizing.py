"""A simulated deployment as a point, and the points that are stored: what they say, what is refused, and that they are today's."""
import json

import pytest
from bench import sizing as bench_sizing

from minengine.arithmetic import gpu_hours_per_million, gpus
from minengine.config import ConfigError
from minengine.results import ResultError
from minengine.simulate import Deployment, simulate
from minengine.simulate.grid import stored
from minengine.simulate.sizing import COUNTS, DEFAULTS, GIVEN, METRICS, point
from minengine.workload.generator import AgentModel

SHORT = {**bench_sizing.given(), "warm_s": 20, "window_s": 40}
FEW = {"sessions": 4, "decoders": 2}


def test_a_point_is_what_the_simulator_gives():
    found = point(**FEW, **SHORT, seed=2, gpu_hour_price=3.0)
    deployment = Deployment.of({**SHORT["deployment"], **{name: DEFAULTS[name] for name in ("prefill", "prefills", "decode", "kv_cache_dtype")}, "decoders": 2})
    agents = AgentModel.from_mapping(SHORT["agents"])
    result = simulate(deployment, agents.sessions(512, 2), concurrency=4, duration_s=60, warm_s=20, gap_cap_s=DEFAULTS["gap_cap_s"], seed=2,
                      **SHORT["loop"])
    assert {name: found[name] for name in METRICS} == {name: result.metrics[name] for name in METRICS} and found["digest"] == result.digest
    assert found["requests"] > 10 and found["gpus"] == gpus("DEP8", "TP4", 2) == 16
    assert found["gpu_hours_per_million"] == gpu_hours_per_million(found["output_tok_s_gpu"])
    assert found["cost_per_million"] == pytest.approx(3e6 * 16 / (3600 * found["output_tok_s"]))
    for what in ("requests", "tokens", "blocks"):
        assert found["counts"][f"{what}_in"] == found["counts"][f"{what}_out"] > 0
    assert found["counts"]["dummies"] > 0 and sum(found["hit_rate_by_tier"].values()) == pytest.approx(found["hit_rate"])


def test_the_same_arguments_give_the_same_point_by_way_of_json_too():
    sent = json.loads(json.dumps({**FEW, **SHORT}))
    assert point(**sent) == json.loads(json.dumps(point(**FEW, **SHORT)))
    assert point(**{**sent, "seed": 1})["digest"] != point(**sent)["digest"]


def test_sessions_of_one_s_own_are_replayed():
    own = list(AgentModel.shipped().sessions(6, seed=3))
    assert point(**FEW, **{**SHORT, "agents": own})["counts"]["requests_in"] > 10


@pytest.mark.parametrize("wrong, message", [
    *(({name: least - 1}, f"{name}={least - 1}: use a whole number from {least} to {most}") for name, (least, most) in COUNTS.items()),
    *(({name: value}, f"{name}={value!r}: use a whole number") for name in COUNTS for value in ("many", 2.5, True)),
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4': use one of"), ({"window_s": 0}, "window_s=0: use"), ({"warm_s": -1}, "warm_s=-1"),
    ({"prefill": "DEP"}, "DEP8"), ({"deployment": {"colour": 1}}, "colour is unknown"),
])
def test_what_cannot_be_is_refused_by_name(wrong, message):
    with pytest.raises(ConfigError) as error:
        point(**{**FEW, **SHORT, **wrong})
    assert message in str(error.value)


# --- the stored grid ----------------------------------------------------------------------------------------

def test_the_stored_grid_is_of_today_s_machine_deployment_and_agents():
    grid, remedy = stored(), "run python -m bench.sizing"
    assert json.loads(json.dumps(bench_sizing.given())) == grid.given, remedy
    assert [one["settings"] for one in grid.points] == list(bench_sizing.settings()), remedy
    assert len({json.dumps(one["settings"]) for one in grid.points}) == len(grid.points)


def test_a_stored_point_can_be_computed_again():
    grid = stored()
    cheapest = min(grid.points, key=lambda one: one["value"]["counts"]["tokens_out"])
    assert point(**cheapest["settings"], **grid.given) == cheapest["value"], "run python -m bench.sizing"


def test_nothing_got_lost_in_a_stored_point():
    for one in stored().points:
        counts = one["value"]["counts"]
        assert all(counts[f"{what}_in"] == counts[f"{what}_out"] for what in ("requests", "tokens", "blocks")), one["settings"]
        assert one["value"]["failed"] == 0 and one["value"]["requests"] > 100, one["settings"]


@pytest.mark.parametrize("text, message", [
    (None, "python -m bench.sizing writes it"), ("{", "is no JSON"), ("[]", "is no object"), ("{}", "field 'machine': is missing"),
])
def test_a_grid_that_cannot_be_read_says_how_to_get_one(tmp_path, text, message):
    path = tmp_path / "sizing.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ResultError, match=message):
        stored(path)


@pytest.mark.parametrize("change, message", [
    ({"given": {"agents": {}}}, "field 'given'"), ({"points": {}}, "field 'points'"),
    ({"points": [{"settings": {"sessions": 1}, "value": {}}]}, r"points\[0\], field 'settings'"),
    ({"points": [{"settings": DEFAULTS}]}, r"points\[0\], field 'value': is missing"), ({"more": 1}, "field 'more': is unknown"),
])
def test_a_grid_with_something_wrong_names_it(tmp_path, change, message):
    run = {"machine": "m", "versions": {"python": "3"}, "commit": "0" * 40, "command": "c", "date": "2026-11-30", "given": dict.fromkeys(GIVEN), "points": []}
    path = tmp_path / "sizing.json"
    path.write_text(json.dumps(run))
    assert stored(path).points == []
    path.write_text(json.dumps({**run, **change}))
    with pytest.raises(ResultError, match=message):
        stored(path)
