"""Every figure of the source article that closed formulas give, and the edges of those formulas."""
import subprocess
import sys

import pytest

from minengine.arithmetic import (
    GLM_5_3, RowBytes, bytes_per_token, cached_tokens, decode_tok_s, descriptors, excess, gpus, head_row_bytes, in_flight, indexer_bytes,
    interactivity, kv_copies, layer_kinds, mla_params_per_layer, moe_layers, naive_tok_s, roofline, row_bytes, session_bytes, sessions_held,
    share, staged_bytes, step_gain, topology, total_tok_s, untouched_state, wire_time_s,
)
from minengine.config import ConfigError, indexer_types

PROFILE_MS = {
    "moe_all_to_all": 150, "gemm": 110, "dsa_indexer": 105, "mla_sparse_attention": 57, "norm_rope_elementwise": 9, "moe_routing": 1, "other": 4,
}
FP8, NVFP4 = row_bytes("fp8").total, row_bytes("nvfp4_fp8_ds_mla").total

# (claim, what it must round to, digits after the point, the formula's value)
DERIVED = [
    ("c66_total_tok_s", 2400, 0, lambda: total_tok_s(100, gpus("DEP8", "TP4", 4))),
    ("c66_naive_tok_s", 6666, 0, lambda: naive_tok_s(66, 101)),
    ("c66_in_flight", 23.8, 1, lambda: in_flight(2400, 101)),
    ("c66_in_flight, of the sessions", 0.36, 2, lambda: share(in_flight(2400, 101), 66)),
    ("gpus_1_4", 24, 0, lambda: gpus("DEP8", "TP4", 4)),
    ("gpus_1_3", 20, 0, lambda: gpus("DEP8", "TP4", 3)),
    ("gpus_1_2", 16, 0, lambda: gpus("DEP8", "TP4", 2)),
    ("decode_tok_s", 164, 0, lambda: decode_tok_s(6.08e-3)),
    ("kv_lora_rank", 512, 0, lambda: row_bytes("fp8").parts["latent"]),
    ("qk_rope_head_dim", 64, 0, lambda: row_bytes("fp8").parts["rope"]),
    ("num_attention_heads", 64, 0, lambda: GLM_5_3["num_attention_heads"]),
    ("num_hidden_layers", 78, 0, lambda: sum(layer_kinds().values())),
    ("routed_experts", 256, 0, lambda: GLM_5_3["n_routed_experts"]),
    ("index_topk", 2048, 0, lambda: GLM_5_3["index_topk"]),
    ("indexer_full_layers", 21, 0, lambda: layer_kinds()["full"]),
    ("mla_params_per_layer, millions", 165.0, 1, lambda: mla_params_per_layer() / 1e6),
    ("mla_params_per_layer, GB a DEP rank at FP8", 13, 0, lambda: 78 * mla_params_per_layer() / 1e9),
    ("mla_params_per_layer, GB a TP8 rank", 1.6, 1, lambda: 78 * mla_params_per_layer() / 8 / 1e9),
    ("kv_copies_tp4", 4, 0, lambda: kv_copies("TP4")),
    ("kv_copies_tp8", 8, 0, lambda: kv_copies("TP8")),
    ("kv_copies_dep8", 1, 0, lambda: kv_copies("DEP8")),
    ("kv_copies_tp8_dcp4", 2, 0, lambda: kv_copies("TP8+DCP4")),
    ("kv copies of TEP8, whence the ideal 8x of DEP8", 8, 0, lambda: kv_copies("TEP8")),
    ("dep8_own_share", 0.60, 2, lambda: share(408, 678)),
    ("dep8_profile_sum_ms", 436, 0, lambda: sum(PROFILE_MS.values())),
    ("moe_layers", 75, 0, moe_layers),
    ("moe_layers, from the launches", 75, 0, lambda: 375 / 5),
    ("dep8_slower_than_tp4", 0.39, 2, lambda: excess(8.48, 6.08)),
    ("bubble_total_ms", 1347, 0, lambda: 444 + 476 + 427),
    ("row_fp8_bytes", 576, 0, lambda: FP8),
    ("row_nvfp4_bytes", 352, 0, lambda: NVFP4),
    ("row_ratio", 1.636, 3, lambda: FP8 / NVFP4),
    ("latent_fraction", 0.5625, 4, lambda: share(NVFP4 - row_bytes("nvfp4_fp8_ds_mla").parts["rope"], 512)),
    ("tokens_nvfp4 / tokens_fp8", 1.495, 3, lambda: 1.63e6 / 1.09e6),
    ("untouched_state_bytes", 100, -1, lambda: untouched_state(1.495)),
    ("untouched_state_bytes, explained", 0.35, 2, lambda: share(21 * indexer_bytes("fp8").total / 78, untouched_state(1.495))),
    ("indexer key", 132, 0, lambda: indexer_bytes("nvfp4_fp8_ds_mla").total),
    ("indexer key, a layer on average", 35.5, 1, lambda: share(21 * 132, 78)),
    ("session_tokens, GB in FP8", 6.6, 1, lambda: session_bytes(146_000, bytes_per_token(FP8, 78)) / 1e9),
    ("session_tokens, GB in NVFP4", 4.0, 1, lambda: session_bytes(146_000, bytes_per_token(NVFP4, 78)) / 1e9),
    ("session_tokens, sessions in FP8", 7, 0, lambda: sessions_held(1.09e6, 146_000)),
    ("session_tokens, sessions in NVFP4", 11, 0, lambda: sessions_held(1.63e6, 146_000)),
    ("session_tokens, sessions wanted", 16.5, 1, lambda: 66 / 4),
    ("bytes_staged", 1504, 0, staged_bytes),
    ("bytes_native", 352, 0, lambda: NVFP4),
    ("bytes_staged / bytes_native", 4.3, 1, lambda: staged_bytes(NVFP4, FP8) / NVFP4),
    ("kernel_step_gain", 0.01, 2, lambda: step_gain(0.08, 13.7, 12.0)),
    ("copies_200k, layer-major", 15_288, 0, lambda: descriptors("LBHNC", 200_000, 1024, 78)),
    ("copies_200k, block-major", 3_125, 0, lambda: descriptors("BLHNC", 200_000, 64, 78)),
    ("copies_200k, KB a piece", 360, 0, lambda: 1024 * NVFP4 / 1e3),
    ("copies_200k, MB a block", 1.8, 1, lambda: 64 * 78 * NVFP4 / 1e6),
    ("latent_200k_gb", 5.5, 1, lambda: session_bytes(200_000, bytes_per_token(NVFP4, 78)) / 1e9),
    ("descriptors, idealised drop", 4.9, 1, lambda: descriptors("LBHNC", 2**17, 1024, 78) / descriptors("BLHNC", 2**17, 64, 78)),
    ("descriptors, two regions a layer", 2 * 78 * 121, 0, lambda: descriptors("LBNHC", 121 * 1024, 1024, 78, regions_per_layer=2)),
]


@pytest.mark.parametrize("expected, digits, formula", [row[1:] for row in DERIVED], ids=[row[0] for row in DERIVED])
def test_the_articles_figure_follows(expected, digits, formula):
    assert round(formula(), digits) == expected


def test_the_wire_is_not_what_takes_146_ms():
    """nvlink_tb_s: 1.8 TB/s counts both directions; one way, 5.5 GB take 6 ms."""
    assert wire_time_s(session_bytes(200_000, bytes_per_token(NVFP4, 78)), 1.8e12 / 2) == pytest.approx(6.1e-3, rel=0.01)


def test_which_layers_score_for_themselves():
    full = [i for i, kind in enumerate(indexer_types(78, freq=4, offset=3)) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert layer_kinds() == {"full": 21, "shared": 57}


@pytest.mark.parametrize("name, parts", [
    ("float32", {"latent": 2048, "rope": 256}),
    ("bfloat16", {"latent": 1024, "rope": 128}),
    ("fp8", {"latent": 512, "rope": 64}),
    ("fp8_ds_mla", {"latent": 512, "scales": 16, "rope": 128}),
    ("nvfp4_fp8_ds_mla", {"latent": 256, "rope": 64, "scales": 32}),
])
def test_a_latent_row_part_by_part(name, parts):
    row = row_bytes(name)
    assert row == RowBytes(name, parts) and list(row.parts) == list(parts)  # in storage order
    assert row.total == {"float32": 2304, "bfloat16": 1152, "fp8": 576, "fp8_ds_mla": 656, "nvfp4_fp8_ds_mla": 352}[name]
    edges = [(row.span(part).start, row.span(part).stop) for part in parts]
    assert edges[0][0] == 0 and edges[-1][1] == row.total and all(a[1] == b[0] for a, b in zip(edges, edges[1:]))
    with pytest.raises(KeyError, match="no part 'value'"):
        row.span("value")


def test_other_ranks_and_heads():
    assert row_bytes("fp8_ds_mla", 144, 16).parts == {"latent": 144, "scales": 8, "rope": 32}
    assert row_bytes("nvfp4_fp8_ds_mla", 16, 8).total == 8 + 8 + 1
    assert {n: head_row_bytes(n, 64).total for n in ("float32", "bfloat16", "fp8", "nvfp4", "q8_0", "q4_0")} == {
        "float32": 512, "bfloat16": 256, "fp8": 128, "nvfp4": 72, "q8_0": 136, "q4_0": 72}
    assert head_row_bytes("int3", 64).parts == {"key": 24, "key_scale": 4, "value": 24, "value_scale": 4}
    assert head_row_bytes("q8_0:nvfp4", 64).parts == {"key": 68, "value": 32, "value_scales": 4}
    assert indexer_bytes("float32", 32).total == 128 and indexer_bytes("bfloat16", 32).total == 64


def test_bytes_of_a_token_with_indexer_keys():
    assert bytes_per_token(NVFP4, 78, indexer=132, indexer_layers=21) == 78 * 352 + 21 * 132
    assert bytes_per_token(head_row_bytes("bfloat16", 64).total, 30, heads=3) == 30 * 3 * 256


def test_capacity_divides_by_copies():
    token = bytes_per_token(FP8, 78)
    assert cached_tokens(100e9, token, 8, kv_copies("DEP8")) == 8 * 100_000_000_000 // token
    assert cached_tokens(100e9, token, 8, kv_copies("TEP8")) == 100_000_000_000 // token


@pytest.mark.parametrize("name, heads, copies", [("TP8", 8, 1), ("TP8", 2, 4), ("TP4", 8, 1), ("TP8+DCP2", 2, 2), ("DEP8", 3, 1), ("TP1", 3, 1)])
def test_heads_are_what_tensor_parallelism_can_split(name, heads, copies):
    assert kv_copies(name, heads) == copies


@pytest.mark.parametrize("name, tensor, data, context", [("TP4", 4, 1, 1), ("TEP8", 8, 1, 1), ("DEP16", 1, 16, 1), ("TP8+DCP4", 8, 1, 4)])
def test_topologies_are_read(name, tensor, data, context):
    shape = topology(name)
    assert (shape.tensor, shape.data, shape.context, shape.gpus) == (tensor, data, context, tensor * data)


@pytest.mark.parametrize("call, words", [
    (lambda: topology("tp4"), ["topology='tp4'", "TP4"]),
    (lambda: topology("TP0"), ["topology='TP0'"]),
    (lambda: topology("DEP8+DCP2"), ["topology='DEP8+DCP2'"]),
    (lambda: kv_copies("TP8+DCP3"), ["DCP3", "8 tensor-parallel ranks"]),
    (lambda: kv_copies("TP8", 3), ["kv_heads=3", "'TP8'"]),
    (lambda: kv_copies("TP8+DCP8", 2), ["DCP8", "4 copies"]),
    (lambda: descriptors("HND", 1, 16, 1), ["kv_cache_layout='HND'", "BLHNC"]),
    (lambda: row_bytes("int8"), ["kv_cache_dtype='int8'"]),
    (lambda: head_row_bytes("q8_0", 40), ["head_dim=40", "multiple of 32"]),
    (lambda: head_row_bytes("int8", 64), ["kv_cache_dtype='int8'", "q4_0"]),
    (lambda: head_row_bytes("int4:int8", 64), ["kv_cache_dtype='int4:int8'", "'int8' is no format of V"]),
    (lambda: row_bytes("fp8", 24), ["kv_lora_rank=24", "multiple of 16"]),
    (lambda: indexer_bytes("nvfp4"), ["kv_cache_dtype='nvfp4'"]),
    (lambda: untouched_state(1.7), ["capacity_ratio=1.7", "1.636"]),
    (lambda: untouched_state(1.0), ["capacity_ratio=1.0"]),
])
def test_what_has_no_answer_is_refused(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert isinstance(error.value, ConfigError) or "capacity_ratio" in words[0]
    for word in words:
        assert word in str(error.value)


def test_untouched_state_inverts_its_definition():
    for x in (0.0, 35.5, 100.0, 400.0):
        assert untouched_state((576 + x) / (352 + x)) == pytest.approx(x, abs=1e-9)


def test_interactivity_counts_the_whole_request():
    assert interactivity(446, 4.46) == pytest.approx(100)
    assert interactivity(101, 0.5 + 100 * 6.08e-3) < decode_tok_s(6.08e-3)


def test_roofline_takes_the_slower_of_the_two():
    memory = roofline(flops=1e9, nbytes=1e9, peak_flops_s=1e15, bandwidth_bytes_s=1e12)
    compute = roofline(flops=1e13, nbytes=1e9, peak_flops_s=1e15, bandwidth_bytes_s=1e12)
    assert (memory.bound, memory.time_s) == ("memory", pytest.approx(1e-3))
    assert (compute.bound, compute.time_s) == ("compute", pytest.approx(1e-2))


def test_formulas_need_neither_torch_nor_numpy():
    code = "import sys, minengine.arithmetic; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
