"""Predictions beside what was reported: that the reported side is the registry's, and that the predicted side follows from the models."""
import json

import pytest
from hypothesis import given, strategies as st

from minengine.claims import read_claims
from minengine.config import ConfigError
from minengine.results import PREDICTIONS, RESULTS, ResultError
from minengine.simulate import prime, prime_cluster, prime_steady
from minengine.simulate.machine import machine
from minengine.simulate.prediction import Prediction, table
from minengine.simulate.prime_cluster import CLUSTER, Runs, at_bar
from minengine.simulate.prime_steady import ONE_BY_ONE, decoding_requests, itl_ms, steady
from minengine.simulate.rack_fit import Decoding, decode_model, itl_s, preset
from minengine.simulate.predictions import keep, stored
from minengine.workload.synthetic import write_agentx
from minengine.workload.traces import find_traces, read_agentx

GIVEN, GB200 = preset(), machine("gb200-nvl72")


def reported_as_registered(found):
    claims = read_claims()
    for one in found:
        assert (one.id in claims) == one.claimed == bool(one.claim), one.id
        if one.claimed:
            assert one.reported == pytest.approx(claims[one.id].value) if not isinstance(one.reported, str) else one.reported == claims[one.id].value
    assert len({one.id for one in found}) == len(found)


# --- one prediction ------------------------------------------------------------------------------------------------

def test_a_prediction_knows_its_error_and_whether_it_holds():
    one = Prediction(id="one", what="speed", unit="tok/s", reported=100, predicted=112.0, within=0.1, note="why", spread={"otherwise": 90.0})
    assert one.error == pytest.approx(0.12) and one.holds is False
    assert Prediction(id="one", what="", unit="", reported=100, predicted=109.0, within=0.1).holds is True
    assert Prediction(id="one", what="", unit="", reported=100, predicted=109.0).holds is None
    words = Prediction(id="one", what="", unit="", reported="1:4", predicted="1:3")
    assert words.error is None and words.holds is False
    shown = table([one, words])
    assert "+12.0%" in shown and "misses (10%)" in shown and "    why" in shown and "otherwise: 90" in shown
    assert json.loads(json.dumps(one.record()))["holds"] is False


# --- without the cluster -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def without_cluster():
    return list(steady(GB200, GIVEN))


def test_what_is_reported_is_the_registrys(without_cluster):
    reported_as_registered(without_cluster)
    assert len({one.what for one in without_cluster}) == len(without_cluster)


def test_only_what_was_asked_for_says_whether_it_holds(without_cluster):
    assert {one.id for one in without_cluster if one.within} == {"itl_tp8_ms", "itl_tp8_dcp4_ms"}


def test_nothing_moves_by_an_assumption_that_it_does_not_hang_on(without_cluster):
    spread = {one.id: set(one.spread) for one in without_cluster}
    assert spread["nvlink_minus_ib_ttft_ms"] == set() and spread["tokens_nvfp4"] == set()
    assert spread["dep8_over_tep8_prefix"] == {"8 bits beside the experts"}
    assert "90% of it" in spread["itl_tp8_dcp4_ms"]


def test_latency_and_requests_at_once_fit_each_other():
    for name, how in (("TP4", {}), ("TP8", {}), ("TP8+DCP4", ONE_BY_ONE)):
        requests, latency = decoding_requests(GB200, GIVEN, name, **how), itl_ms(GB200, GIVEN, name, **how) / 1e3
        engines = 16 / decode_model(GB200, name, GIVEN).shape.gpus
        assert latency == pytest.approx(itl_s(decode_model(GB200, name, GIVEN, **how), requests))
        assert engines * requests == pytest.approx(Decoding(GIVEN).requests(64, latency))
    assert itl_ms(GB200, GIVEN, "TP4") == pytest.approx(6.08, rel=1e-3)  # an input comes out again
    assert itl_ms(GB200, GIVEN, "TP4", 32) < itl_ms(GB200, GIVEN, "TP4", 64)


def test_the_window_is_a_chunk_and_its_dummies_and_more_costly_if_ranks_meet_more_slowly():
    assert prime_steady.dummy_window_ms(GB200, GIVEN) == pytest.approx(436 + 15 * prime_steady.dummy_forward_ms(GB200, GIVEN))
    slower = GB200.but(far_meeting_s=GB200["far_meeting_s"] + 1e-6)
    assert prime_steady.dummy_forward_ms(slower, GIVEN) - prime_steady.dummy_forward_ms(GB200, GIVEN) == pytest.approx(225e-3)


def test_copies_cost_by_their_number():
    assert prime_steady.copies_ms(GB200, GIVEN) == pytest.approx(32_000 * 1e3 * GB200["copy_s"])
    assert prime_steady.nvlink_extra_ms(GB200, GIVEN) < prime_steady.copies_ms(GB200, GIVEN)


# --- with it -------------------------------------------------------------------------------------------------------

def test_the_headlines_deployment_and_load():
    one = prime.deployment()
    assert (one.gpus, one.prefill, one.decode, one.decoders) == (24, "DEP8", "TP4", 4)
    assert one.model_options == {"weights": "bfloat16", "experts": "nvfp4", "draft_tokens": 4, "tokens_per_step": 3.33}
    assert prime.deployment(decoders=2, kv_cache_dtype="fp8").gpus == 16
    assert prime.loop()["gap_cap_s"] == 10 and prime.loop(concurrency=7)["concurrency"] == 7


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(1, 300)), max_size=6, unique_by=lambda one: one[0]))
def test_sessions_at_the_bar_lie_between_points_on_both_sides_of_it(points):
    found = at_bar(points, 100.0)
    points.sort()
    crossings = [(a, b) for (a, fast), (b, slow) in zip(points, points[1:]) if fast >= 100 > slow]
    assert (found is None) == (not crossings)
    if crossings:
        assert crossings[0][0] <= found <= crossings[0][1]


def test_sessions_at_the_bar_by_hand():
    assert at_bar([(96, 90.0), (66, 110.0)]) == 81.0
    assert at_bar([(10, 200.0), (20, 150.0)]) is None


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agentx")
    write_agentx(folder)
    return [one for path in sorted(folder.glob("*.json")) for one in read_agentx(path)]


def test_what_is_replayed_has_the_means_of_the_whole_set_and_the_gaps_that_were_recorded(sessions):
    found, workload = prime.replayed(sessions), GIVEN["workload"]
    requests = [request for session in found for request in session.requests]
    for name in ("input_tokens", "output_tokens"):
        assert sum(getattr(one, name) for one in requests) / len(requests) == pytest.approx(workload[name], rel=1e-3)
    assert [one.think_time_s for one in requests] == [one.think_time_s for session in sessions for one in session.requests]


def test_every_figure_of_the_cluster_comes_from_runs_of_the_headline_with_one_change_and_equal_runs_once(sessions):
    began = []
    def few(**changes):
        asked = prime.loop(**changes)
        return {**asked, "concurrency": asked["concurrency"] // 8}

    runs = Runs(prime.deployment, few, prime.replayed(sessions), recorded=sessions, faster=0.01, progress=began.append)
    found = [one for figures in CLUSTER for one in figures(runs)]
    reported_as_registered(found)
    assert all(one.label == "simulated" for one in found)
    numbers, what = zip(*(one.split(": ", 1) for one in began))
    assert len(what) == len(set(what)) and "the headline" in what
    assert list(numbers) == [f"{i} of {runs.total}" for i in range(1, runs.total + 1)], "all are counted before the first has begun"
    assert runs() is runs({"decoders": 4}, concurrency=66) and runs() is not runs(seed=2)
    assert began[-1].endswith(": seed=2")


def test_the_command_prints_what_needs_no_sessions_where_there_are_none_and_writes_json(monkeypatch, tmp_path, capsys):
    write_agentx(tmp_path / "agentx")
    out = tmp_path / "prime.json"
    monkeypatch.setattr(prime_cluster, "CLUSTER", (lambda runs: iter([Prediction(id="one", what="a run", unit="", reported=1, predicted=len(runs.sessions))]),))
    assert prime.main(traces=str(tmp_path / "agentx"), out=str(out)) == 0
    assert "a run" in capsys.readouterr().out
    kept = stored(out)
    assert kept.preset == json.loads(json.dumps(GIVEN)) and kept.rack == json.loads(json.dumps(GB200.mapping())) and kept["one"].predicted == 6
    assert kept.command == "minengine simulate --preset prime-inference"
    with pytest.raises(ConfigError, match="no \\*.json"):
        prime.main(traces=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot be written"):
        prime.main(traces=str(tmp_path / "agentx"), out=str(tmp_path / "no" / "such.json"))


def test_invented_sessions_predict_nothing(monkeypatch, tmp_path, capsys):
    from minengine.workload import traces

    monkeypatch.delenv("MINENGINE_TRACES", raising=False)
    monkeypatch.setattr(traces, "BESIDE_CHECKOUT", tmp_path)
    monkeypatch.setattr(prime_cluster, "CLUSTER", ())
    assert prime.main() == 0
    assert "no recorded sessions" in capsys.readouterr().out


# --- what is kept --------------------------------------------------------------------------------------------------

def test_a_table_that_is_kept_is_read_as_it_was_and_a_spoiled_one_is_refused(tmp_path, without_cluster):
    path = tmp_path / "predictions.json"
    keep(path, without_cluster, command="a command", preset=GIVEN, rack=GB200.mapping())
    kept = stored(path)
    assert list(kept.predictions) == without_cluster
    run = json.loads(path.read_text())
    for spoil, words in (({"predictions": []}, "predictions"), ({"rack": 1}, "rack"), ({"more": 1}, "more"), ({"commit": ""}, "commit")):
        path.write_text(json.dumps({**run, **spoil}))
        with pytest.raises(ResultError, match=words):
            stored(path)
    path.write_text(json.dumps({**run, "predictions": [{**run["predictions"][0], "unit": "ms", "id": ""}]}))
    with pytest.raises(ResultError, match=r"predictions\[0\], field 'id'"):
        stored(path)
    path.write_text("{")
    with pytest.raises(ResultError, match="no JSON"):
        stored(path)
    with pytest.raises(ResultError, match="cannot be opened"):
        stored(tmp_path / "none.json")


@pytest.mark.skipif(not (RESULTS / PREDICTIONS).is_file(), reason="the table is not kept yet")
def test_the_kept_table_is_what_this_code_predicts(without_cluster):
    kept = stored()
    assert kept.preset == json.loads(json.dumps(GIVEN)) and kept.rack == json.loads(json.dumps(GB200.mapping()))
    for one in without_cluster:
        assert kept[one.id].predicted == (pytest.approx(one.predicted) if isinstance(one.predicted, float) else one.predicted), one.id
        assert kept[one.id].spread == pytest.approx(one.spread) and kept[one.id].note == one.note
    source = find_traces()
    if source.synthetic:
        pytest.skip("no recorded sessions here")
    recorded = [one for path in sorted(source.agentx.glob("*.json")) for one in read_agentx(path)]
    found = Runs(prime.deployment, prime.loop, prime.replayed(recorded), recorded=recorded)(gap_cap_s=300.0)  # the run with least in it
    for name, metric in (("c66_tok_s_user", "e2e_tok_s_user"), ("c66_tok_s_gpu", "output_tok_s_gpu"), ("c66_in_flight", "in_flight_mean")):
        assert kept[name].spread["gaps of up to 300 s"] == found[metric]
