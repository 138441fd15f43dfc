"""The registry covers the source article, and a cell's own value reaches the outputs that the ledger reads."""
import sys
from types import SimpleNamespace

import pytest

from minengine import claims as registry
from minengine.claims import RECORD_MIME, ClaimError, derive, number, read_claims, record

# Every figure of the source article, by the ids of its list of claims.
SOURCE_IDS = """
turn_new_tokens turn_prefix_tokens sla_e2e_tok_s_user c66_tok_s_user c66_tok_s_gpu c66_total_tok_s c66_naive_tok_s c66_in_flight gpus_1_4 gpus_1_3
gpus_1_2 pareto_labels_1_4 pareto_labels_1_3 pareto_labels_1_2 best_ratio decode_tok_s pd_p90_itl_cut kv_lora_rank qk_rope_head_dim
num_attention_heads num_hidden_layers routed_experts index_topk indexer_full_layers mla_params_per_layer kv_copies_tp4 kv_copies_tp8 kv_copies_dep8
kv_copies_tp8_dcp4 dep8_over_tep8_prefix dep8_chunk_new_tokens dep8_chunk_prefix dep8_own_forward_ms dep8_window_ms dep8_dummy_forwards
dep8_profile_ms dep8_profile_launches dep8_own_share dep8_profile_sum_ms moe_layers dep16_over_2x_dep8 itl_tp4_ms itl_tp8_ms itl_dep8_ms
dep8_slower_than_tp4 itl_tp8_dcp4_ms bubble_retrieve_ms bubble_poll_ms bubble_handoff_ms bubble_admit_ms queue_wait_8k_ms queue_wait_4k_ms
bubble_total_ms ttft_cut_4k row_fp8_bytes row_nvfp4_bytes row_ratio latent_fraction tokens_fp8 tokens_nvfp4 untouched_state_bytes session_tokens
bytes_staged bytes_native kernel_native_us kernel_staged_us kernel_fp8_us minus_one_before_us minus_one_after_us attention_share kernel_step_gain
deepswe gsm8k mmlu humaneval humaneval_plus nvlink_minus_ib_ttft_ms copies_200k latent_200k_gb descriptors_layer_major descriptors_block_major
transfer_layer_major_ms transfer_block_major_ms nvlink_tb_s tool_error_rate tokens_a_day trillion_a_day openrouter_rank flashinfer_pr
""".split()


def test_every_figure_of_the_source_is_there():
    assert set(SOURCE_IDS) <= set(read_claims())
    assert len(SOURCE_IDS) == len(set(SOURCE_IDS)) == 89


@pytest.mark.parametrize("name, own", [
    ("c66_in_flight", 23.76), ("untouched_state_bytes", 100.15), ("mla_params_per_layer", 165.02), ("descriptors_drop_ideal", 4.875),
    ("bytes_staged", 1504), ("copies_layer_major", 15_288), ("copies_block_major", 3_125), ("gpus_1_3", 20), ("session_fp8_gb", 6.56),
])
def test_derived_values_before_they_are_rounded(name, own):
    assert derive(read_claims(), name) == pytest.approx(own, rel=1e-3)


def test_a_bound_may_be_a_pair():
    claims = read_claims()
    assert derive(claims, "copies_200k") == [15_288, 2 * 15_288]
    assert derive(claims, "dep8_over_tep8_prefix") == pytest.approx([5.24, 6.47], abs=0.005) and derive(claims, "wire_200k_ms") < 10


@pytest.mark.parametrize("value, text", [
    (6666, "6,666"), (23.8, "23.8"), (1.09e6, "1.09 million"), (600.0e9, "600 billion"), (1.0e12, "1 trillion"), ([0.93, 0.96], "0.93 to 0.96"),
    ({"fp8": 68.47, "moe_all": 7}, "fp8 68.47, moe all 7"), ("near zero", "near zero"), (0.40, "0.4"), (4.0, "4.0"), (12.0, "12.0"), (15288, "15,288"),
])
def test_values_as_prose_writes_them(value, text):
    assert number(value) == text


def test_own_values_are_cut_to_the_decimals_asked_for():
    assert [number(23.76237, 3), number(352, 2), number(1.63636, 0), number(4.008, 2)] == ["23.762", "352", "2", "4.01"]


@pytest.fixture
def shown(monkeypatch):
    """What a cell would have in its outputs."""
    outputs = []
    shell = SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=lambda data, raw: outputs.append(data)))
    return outputs


def test_a_record_is_an_output_of_its_cell(shown):
    assert record("set_hit", 0.947, n=1234, spread=(0.9, 0.97), holds=True, note="a sample") is None  # else a cell that ends with it would print it
    (output,) = shown
    assert output[RECORD_MIME] == {"id": "set_hit", "value": 0.947, "label": "measured", "n": 1234, "spread": [0.9, 0.97], "holds": True, "note": "a sample"}
    assert output["text/plain"] == "for the ledger: Ideal block hit of agent sessions (a bracket over the whole set), 0.947 of the blocks (measured)"


def test_numbers_of_numpy_are_written_as_plain_ones(shown):
    numpy = pytest.importorskip("numpy")
    record("set_input_mean", numpy.float32(140000.0), spread=numpy.array([1, 2.5]), holds=numpy.bool_(True))
    kept = shown[0][RECORD_MIME]
    assert (kept["value"], kept["spread"], kept["holds"]) == (140_000, [1, 2.5], True)
    assert [type(v) for v in (kept["value"], *kept["spread"], kept["holds"])] == [int, int, float, bool]


def test_outside_a_notebook_a_record_is_only_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    record("mooncake_hit", 0.37)
    with pytest.raises(ClaimError):
        record("mooncake_hit", None)


@pytest.mark.parametrize("arguments, options, message", [
    (("no_such", 1), {}, "record 'no_such': there is no such claim"),
    (("row_ratio", 1.6), {}, "record 'row_ratio': its own value comes by book: derive"),
    (("deepswe", 70), {}, "record 'deepswe': its own value comes by book: open"),
    (("mooncake_hit", "0.37"), {}, "value='0.37': use a finite number"),
    (("mooncake_hit", float("nan")), {}, "value=nan: use a finite number"),
    (("mooncake_hit", True), {}, "value=True: use a finite number"),
    (("mooncake_hit", 0.37), {"label": "guessed"}, "label='guessed': use one of measured"),
    (("mooncake_hit", 0.37), {"n": 0}, "n=0: use at least 1"),
    (("mooncake_hit", 0.37), {"spread": (0.3, None)}, "spread=None: use a finite number"),
])
def test_a_record_that_says_nothing_is_refused(shown, arguments, options, message):
    with pytest.raises(ClaimError, match=message):
        record(*arguments, **options)
    assert not shown


def test_labels_of_records_are_kinds_of_numbers_and_the_invented_one():
    assert set(registry.RECORD_LABELS) - set(registry.LABELS) == {"invented"}
