"""A trace in, a number of GPUs out: what is interpolated, rounded and sorted, and that the numbers are the simulator's."""
from types import SimpleNamespace

import pytest
from sim_scenes import StandIn, deployment, sessions

from minengine.config import ConfigError
from minengine.simulate import recipe, simulate
from minengine.simulate.recipe import carried, size

HOW = {"duration_s": 40.0, "costs": StandIn}


def falling(deployment, sessions, *, concurrency, seed=0, **rest):
    """200 tok/s for one, and so much less for each session more; a decoder more, or a luckier draw, and it falls more slowly."""
    speed = 200 - concurrency * 8 / (deployment.decoders + seed)
    return SimpleNamespace(metrics={"e2e_tok_s_user": speed, "output_tok_s_gpu": 1.0})


def test_between_two_points_the_speed_falls_on_a_line_and_groups_are_whole(monkeypatch):
    monkeypatch.setattr(recipe, "simulate", falling)
    one, two = (deployment(prefill="DEP2", decode="TP2", decoders=n) for n in (1, 2))
    [best, other] = size({"1:1": one, "1:2": two}, [], concurrency=60, bar=100, points=(5, 10, 20, 40), cases=({"seed": 0}, {"seed": 1}))
    # At 100 tok/s a group carries 100 * (decoders + seed) / 8 sessions: 12.5 and 25, or 25 and 37.5.
    assert best == ("1:2", 6, (25.0, 37.5), (2, 3), (12, 18), False) and best.holds
    assert other == ("1:1", 4, (12.5, 25.0), (3, 5), (12, 20), False) and other.holds  # cheaper a group, and dearer in the worst case


def test_what_carries_nobody_is_last_and_what_was_not_pushed_far_enough_is_open(monkeypatch):
    monkeypatch.setattr(recipe, "simulate", falling)
    slow, fast = deployment(decoders=1), deployment(decoders=9)
    found = {one.name: one for one in size({"slow": slow, "fast": fast}, [], concurrency=30, bar=190, points=(4, 8))}
    assert list(found) == ["fast", "slow"]
    assert not found["slow"].holds and found["slow"].gpus == (0, 0) and found["slow"].carried == (0, 0)
    assert found["fast"].holds and found["fast"].open and found["fast"].carried == (8, 8)


def test_its_speeds_are_the_simulators():
    traces, one = sessions(3, number=4), deployment(prefill="DEP2", decode="TP2", decoders=1)
    speeds = [simulate(one, traces, concurrency=n, **HOW).metrics["e2e_tok_s_user"] for n in (1, 4)]
    assert speeds[0] > speeds[1]
    middle = sum(speeds) / 2
    assert carried(one, traces, middle, (1, 4), **HOW).sessions == pytest.approx(2.5)
    assert carried(one, traces, speeds[0] * 1.01, (1, 4), **HOW) is None
    assert carried(one, traces, speeds[1] * 0.99, (1, 4), **HOW).open
    smaller = carried(one, traces, middle, (1, 4), max_num_batched_tokens=16, **HOW)  # a field of the deployment
    assert smaller is None or smaller.sessions != 2.5


@pytest.mark.parametrize("points", [(), (4, 4), (8, 2), (0, 3)])
def test_points_must_rise(points):
    with pytest.raises(ConfigError, match="points="):
        carried(deployment(), [], 100, points)
