"""The memory ladder: sums, what more of anything does, weights in few bits by hand, and what it says of the two capacities that the source left open."""
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LLAMA

from minengine.arithmetic import (CARDS, GLM_5_3, Card, beside_share, bytes_per_token, expert_buffer_bytes, indexer_bytes, kv_copies, memory_ladder,
                                  more_tokens, rank_weights, row_bytes, topology, untouched_state)
from minengine.arithmetic import memory
from minengine.config import ConfigError, model_config

GLM = model_config({**GLM_5_3, "architectures": ["GlmMoeDsaForCausalLM"]})
SMALL = model_config(LLAMA)
NAMES = ("TP1", "TP4", "TP8", "TEP8", "DEP8", "DEP16", "TP8+DCP4")
NATIVE, KEYS = "nvfp4_fp8_ds_mla", 21 * 132


@given(st.sampled_from(NAMES), st.sampled_from(sorted(CARDS)), st.sampled_from(["bfloat16", "fp8", "nvfp4"]), st.sampled_from(["bfloat16", "fp8", NATIVE]),
       st.integers(1, 16384), st.integers(0, 200), st.floats(0, 0.99))
def test_a_ladder_adds_up_and_its_tokens_are_the_most_that_fit(name, card, weights, row, step, untouched, beside):
    ladder = memory_ladder(GLM, name, card, kv_cache_dtype=row, weights=weights, step_tokens=step, untouched=untouched, beside=beside)
    assert sum(rung.nbytes for rung in ladder.rungs) + ladder.left_bytes == ladder.hbm_bytes == CARDS[card].hbm_bytes
    room, of_one = ladder.left_bytes * ladder.gpus, ladder.token_bytes * ladder.copies
    assert ladder.tokens * of_one <= max(0, room) < (ladder.tokens + 1) * of_one or ladder.tokens == 0 > room
    assert ladder.rank_tokens == ladder.tokens // topology(name).data
    assert (ladder.gpus, ladder.copies) == (topology(name).gpus, kv_copies(name))
    wider = replace(CARDS[card], hbm_bytes=CARDS[card].hbm_bytes + 10**9)
    assert memory_ladder(GLM, name, wider, kv_cache_dtype=row, weights=weights, step_tokens=step, untouched=untouched, beside=beside).tokens >= ladder.tokens
    for less in ({"weights": "float32"}, {"step_tokens": 2 * step}, {"untouched": untouched + 1}, {"kv_cache_dtype": "float32"}):
        asked = dict(kv_cache_dtype=row, weights=weights, step_tokens=step, untouched=untouched, beside=beside) | less
        assert memory_ladder(GLM, name, card, **asked).tokens <= ladder.tokens, less


def test_a_token_is_its_rows_and_keys_and_what_is_said_to_be_beside_them():
    assert memory_ladder(GLM, "TP4", kv_cache_dtype="fp8").token_bytes == bytes_per_token(576, 78, 1, 132, 21) == 47_700
    assert memory_ladder(GLM, "TP4", untouched=10).token_bytes == bytes_per_token(352, 78, 1, 132, 21) + 780
    assert memory_ladder(SMALL, "TP1", kv_cache_dtype="bfloat16", beside=0.1).token_bytes == SMALL.num_hidden_layers * SMALL.kv_heads * 4 * SMALL.head_dim


def test_weights_in_few_bits_keep_tables_and_norms_in_sixteen():
    wide, narrow = (rank_weights(GLM, "DEP8", 3, *formats) for formats in (("bfloat16",), ("fp8", "nvfp4")))
    assert {part for part in wide if wide[part] == narrow[part]} == {"vocabulary", "norms", "routers"}
    assert narrow["experts"] == 75 * 32 * 3 * 6144 * 2048 * 9 // 16  # four bits, and an eight-bit scale for sixteen
    assert (narrow["attention"], narrow["mlp"], narrow["shared experts"]) == tuple(wide[part] // 2 for part in ("attention", "mlp", "shared experts"))
    assert rank_weights(GLM, "DEP8", 3, "float32")["vocabulary"] == 2 * wide["vocabulary"]  # not where the rest has more than sixteen
    assert rank_weights(SMALL, "TP1", 0, "nvfp4")["mlp"] * 32 == rank_weights(SMALL, "TP1", 0)["mlp"] * 4.5
    for field, formats in (("dtype='int4'", ("int4",)), ("experts='fp4'", ("fp8", "fp4"))):
        with pytest.raises(ConfigError, match=f"{field}.*use one of float32, bfloat16, fp8, nvfp4"):
            rank_weights(GLM, "DEP8", 0, *formats)


def test_buffers_by_hand():
    row = 2 * 6144
    assert expert_buffer_bytes(GLM, "TP4", 0, 100) == expert_buffer_bytes(GLM, "TEP8", 0, 100) == 100 * 8 * row
    assert expert_buffer_bytes(GLM, "DEP8", 0, 100) == 800 * (8 + 2) * row
    assert expert_buffer_bytes(replace(GLM, n_routed_experts=16), "DEP8", 0, 100) == 800 * (2 + 2) * row  # two of a token's eight can be here
    assert expert_buffer_bytes(SMALL, "TP1", 0, 100) == 0


# --- what the source left open -----------------------------------------------------------------------------------

@pytest.mark.parametrize("weights", ["fp8", "bfloat16"])
@pytest.mark.parametrize("step", [1, 4096, 8192])
def test_the_one_capacity_that_is_taken_as_given_comes_back(weights, step):
    ladder = memory_ladder(GLM, "TP4", kv_cache_dtype="fp8", weights=weights, step_tokens=step)
    assert abs(ladder.tokens - memory.SOURCE_TOKENS) <= 1 and 0.1 < beside_share(weights, step_tokens=step) < 0.2


@pytest.mark.parametrize("weights", ["fp8", "bfloat16"])
def test_in_four_bits_keys_alone_leave_the_prediction_above_the_reported_capacity(weights):
    """What is fitted cancels: it is (576 + keys) / (352 + keys), whatever the weights."""
    predicted = memory_ladder(GLM, "TP4", weights=weights).tokens
    assert predicted == pytest.approx(1_090_000 * (78 * 576 + KEYS) / (78 * 352 + KEYS), abs=2) and predicted / 1.63e6 - 1 == pytest.approx(0.055, abs=5e-4)
    missing = untouched_state(1.63 / 1.09) - 21 * indexer_bytes(NATIVE).total / 78
    assert memory_ladder(GLM, "TP4", weights=weights, untouched=missing).tokens == pytest.approx(1.63e6, rel=1e-4)


def times(**options):
    return more_tokens("DEP8", "TEP8", **options)


def test_eight_copies_against_one_are_five_to_six_and_a_half_times_the_tokens():
    assert times(weights="fp8", step_tokens=4096) == pytest.approx(6.47, abs=0.005)
    assert times(weights="bfloat16", step_tokens=4096) == pytest.approx(5.51, abs=0.005)
    assert times(weights="bfloat16", step_tokens=8192) == pytest.approx(5.24, abs=0.005)
    assert times(weights="bfloat16", kv_cache_dtype="fp8") == pytest.approx(times(weights="bfloat16"), rel=1e-6)  # whatever the row


def test_the_draft_layer_is_one_more_layer_and_changes_neither_answer():
    plain, drafting = (memory_ladder(GLM, "DEP8", weights="bfloat16", draft_layers=count) for count in (0, 1))
    assert drafting.token_bytes - plain.token_bytes == 352 + 132
    whole = memory_ladder(GLM, "TP1", draft_layers=1, beside=0.0).weights["draft layer"]
    assert whole / 1e9 == pytest.approx(19.9, abs=0.05)  # as those say who publish checkpoints with it in 16 bits
    assert times(draft_layers=1) == pytest.approx(times(), rel=0.01)
    assert memory_ladder(GLM, "TP4", draft_layers=1).tokens == pytest.approx(memory_ladder(GLM, "TP4").tokens, rel=2e-3)


@pytest.mark.parametrize("hbm", [170_000_000_000, 186_000_000_000])
def test_how_much_memory_a_card_has_cancels(monkeypatch, hbm):
    before = times(weights="bfloat16")
    monkeypatch.setitem(CARDS, "GB200", replace(CARDS["GB200"], hbm_bytes=hbm))
    assert times(weights="bfloat16") == pytest.approx(before, rel=1e-6)


def test_what_is_beside_is_the_same_share_of_another_card_and_called_assumed_there():
    here, there, given = memory_ladder(GLM, "DEP8"), memory_ladder(GLM, "DEP8", "H200"), memory_ladder(GLM, "DEP8", beside=0.1)
    assert there.beside_bytes / there.hbm_bytes == pytest.approx(here.beside_bytes / here.hbm_bytes, rel=1e-9)
    assert [ladder.rungs[-1].label for ladder in (here, there, given)] == ["reasoned", "assumed", "assumed"]
    assert memory_ladder(GLM, "TP1", "RTX4090").tokens == 0 > memory_ladder(GLM, "TP1", "RTX4090").left_bytes
    assert here.sessions(146_000) == here.tokens // 146_000 > 0


@pytest.mark.parametrize("ask, words", [
    (dict(card="A100"), "card='A100': its memory is not known; use one of GB200"),
    (dict(card=Card("mine", 1e12, 1e12, "")), "card='mine': its memory is not known"),
    (dict(card=5), "card=5: its memory is not known"), (dict(name=4), "topology='4': use TP"), (dict(config=None), "config=None: use a ModelConfig"),
    (dict(step_tokens="x"), "step_tokens='x': use a number"), (dict(untouched=None), "untouched=None: use a number"), (dict(beside="x"), "beside='x': use a number"),
    (dict(step_tokens=0), "step_tokens=0: use at least 1"),
    (dict(untouched=-1), "untouched=-1: use bytes from 0 up"),
    (dict(untouched=float("nan")), "untouched=nan: use bytes"),
    (dict(draft_layers=2), "draft_layers=2: use 0, or 1"),
    (dict(config=SMALL, name="TP1", draft_layers=1), "draft_layers=1: use 0, or 1 for a Glm"),
    (dict(beside=1.0), "beside=1.0: use a share"),
    (dict(experts="bfloat16"), "experts='bfloat16'.*would then not hold the 1,090,000 tokens.*give `beside`"),
    (dict(kv_cache_dtype="q8_0"), "kv_cache_dtype='q8_0' keeps no indexer keys"),
    (dict(name="DEP512"), "n_routed_experts=256.*use fewer ranks"),
    (dict(name="TP3"), "num_attention_heads=64"),
])
def test_what_cannot_be_is_refused_by_name(ask, words):
    with pytest.raises(ConfigError, match=words):
        memory_ladder(**{"config": GLM, "name": "DEP8", **ask})


def test_the_source_row_widths_are_those_of_its_model():
    assert (row_bytes("fp8").total, row_bytes(NATIVE).total, indexer_bytes(NATIVE).total) == (576, 352, 132)
