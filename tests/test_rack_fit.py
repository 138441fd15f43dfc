"""Constants that are fitted to the source's figures, and to nothing else."""
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from minengine.claims import read_claims
from minengine.simulate.machine import machine
from minengine.simulate.rack_fit import FITTED, Decoding, decode_model, fit_rack, itl_s, prefill_model, preset, profile_parts

GIVEN, GB200 = preset(), machine("gb200-nvl72")


def test_the_inputs_are_the_registered_claims():
    claims, fixed = {name: claim.value for name, claim in read_claims().items()}, GIVEN["calibration"]
    parts, launches = claims["dep8_profile_ms"], claims["dep8_profile_launches"]
    profile = fixed["profile"]
    assert (profile["new_tokens"], profile["prefix_tokens"]) == (claims["dep8_chunk_new_tokens"], claims["dep8_chunk_prefix"])
    assert profile["ms"] == {"exchange": parts["moe_all_to_all"], "gemm": parts["gemm"], "indexer": parts["dsa_indexer"],
                             "attention": parts["mla_sparse_attention"], "rest": parts["norm_rope_elementwise"] + parts["moe_routing"] + parts["other"]}
    assert profile["launches"] == {"total": launches["total"], "exchange": launches["moe_all_to_all"], "gemm": launches["gemm"],
                                   "indexer": launches["dsa_indexer"], "attention": launches["mla_sparse_attention"]}
    counts = profile["launches"]
    assert GB200.launches == {"gemm": counts["gemm"], "indexer": counts["indexer"], "attention": counts["attention"],
                              "rest": 2 * counts["total"] - sum(counts.values())}
    assert fixed["itl"]["ms"] == {"TP4": claims["itl_tp4_ms"], "DEP8": claims["itl_dep8_ms"]}
    assert (fixed["retrieve_ms"], fixed["tokens_fp8"]) == (claims["bubble_retrieve_ms"], claims["tokens_fp8"])
    assert fixed["transfer"] == {"ms": claims["transfer_layer_major_ms"], "descriptors": claims["descriptors_layer_major"]}
    assert GIVEN["assumed"]["transferred_tokens"] == 64 * claims["descriptors_block_major"]


def test_the_file_has_what_the_fit_finds_and_starts_from_anywhere():
    elsewhere = GB200.but(**{name: GB200[name] * 0.7 for name in FITTED})
    for start in (GB200, elsewhere):
        fitted = fit_rack(start, GIVEN)
        assert [fitted[name] for name in FITTED] == pytest.approx([GB200[name] for name in FITTED], rel=5e-4)
    labels = {name: one.label for name, one in GB200.constants.items()}
    assert {name for name, label in labels.items() if label == "fitted"} == set(FITTED)


def test_with_the_fitted_constants_the_inputs_come_out():
    fitted, fixed = fit_rack(GB200, GIVEN), GIVEN["calibration"]
    assert {part: 1e3 * seconds for part, seconds in profile_parts(fitted, GIVEN).items()} == pytest.approx(fixed["profile"]["ms"], rel=1e-6)
    for name, engines in (("TP4", 4), ("DEP8", 2)):
        requests = Decoding(GIVEN).requests(64, fixed["itl"]["ms"][name] / 1e3) / engines
        assert 1e3 * itl_s(decode_model(fitted, name, GIVEN), requests) == pytest.approx(fixed["itl"]["ms"][name], rel=1e-6)
    model = prefill_model(fitted, "DEP8", GIVEN)
    token = 78 * 352 + 21 * 132
    assert model.retrieve_ps(140_000 * token) == pytest.approx(127e9, rel=1e-6)
    assert model.transfer_ps(19_559, 124_160 * token) == pytest.approx(146e9, rel=1e-6)


def test_figures_that_nothing_explains_are_refused():
    given_other = {**GIVEN, "calibration": {**GIVEN["calibration"], "itl": {"sessions": 64, "ms": {"TP4": 0.5, "DEP8": 8.48}}}}
    with pytest.raises(ValueError, match="ITL of TP4: no launch_s"):
        fit_rack(GB200, given_other)


@given(st.floats(1, 1000), st.floats(1e-4, 1))
def test_sessions_that_decode_at_once_are_fewer_than_there_are_and_more_if_tokens_take_longer(sessions, itl):
    loop = Decoding(GIVEN)
    assert 0 < loop.requests(sessions, itl) < loop.requests(sessions, 2 * itl) < 1.072 * sessions
    assert Decoding(GIVEN, wait_s=5.0).requests(sessions, itl) < loop.requests(sessions, itl)


def test_the_fit_prints_its_constants():
    shown = subprocess.run([sys.executable, "-m", "minengine.simulate.rack_fit"], capture_output=True, text=True, check=True).stdout
    assert [line.partition(":")[0] for line in shown.splitlines()] == list(FITTED)
