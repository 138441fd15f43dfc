"""`GlmMoeDsaForCausalLM` as the engine runs it, against Hugging Face's on tiny random models.

Every logit of every token is compared: prompts in chunks, then decode, requests of mixed lengths in one batch, contexts
several times `index_topk`.
"""
import json
import shutil

import pytest
import torch
from glm_requests import GLM, TOLERANCE, VARIANTS, Requests, directory, distance, error, load, oracle, prompts

from minengine.config import KV_CACHE_LAYOUTS, LATENT_DTYPES, ConfigError
from minengine.kv.cache import KVCache
from minengine.model import indexer as indexer_module
from minengine.model import mla
from minengine.model.batch import Batch, PrefillChunk
from minengine.model.decoder import load_model
from minengine.model.rope import interleave_rows, rotate_
from minkernels import indexer as indexing

# --- equality ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout, block_size", [*((layout, 16) for layout in KV_CACHE_LAYOUTS), ("BLNHC", 32), ("LBNHC", 64), ("BLHNC", 256)])
def test_logits_equal_hugging_faces(variant, layout, block_size):
    requests = Requests(load(variant), prompts(variant), layout=layout, block_size=block_size, seed=block_size)
    got = requests.run(seed=KV_CACHE_LAYOUTS.index(layout) + block_size)
    assert error(got, variant) <= TOLERANCE


def test_the_oracle_is_worth_comparing_with():
    for variant in VARIANTS:
        for logits in oracle(variant).values():
            assert 0.3 < logits.std() < 30 and len(logits.argmax(-1).unique()) > len(logits) // 4


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
@pytest.mark.parametrize("variant", ["shared", "grouped"])
def test_contexts_about_index_topk(variant, more):
    """Where attention becomes sparse: a chunk that ends there, decodes that cross it."""
    decoder, ids = load(variant), {"long": prompts(variant)["long"]}
    requests = Requests(decoder, ids)
    requests.step({"long": decoder.config.index_topk + more})
    for _ in range(3):
        requests.step({}, ["long"])
    got = torch.cat(requests.logits["long"])
    expected = oracle(variant)["long"][: len(got)]
    assert (got - expected).abs().max() <= TOLERANCE * expected.std()


def test_nothing_is_scored_until_a_choice_is_needed(monkeypatch):
    """Within index_topk tokens all are attended to; the keys written meanwhile serve the choices that follow."""
    decoder, ids = load("shared"), {"long": prompts("shared")["long"]}
    requests, top_k, scored = Requests(decoder, ids), decoder.config.index_topk, []
    monkeypatch.setattr(indexing, "indexer_scores", lambda *args, scores=indexing.indexer_scores: scored.append(1) or scores(*args))
    requests.step({"long": top_k - 1})
    requests.step({}, ["long"])
    assert not scored
    requests.step({}, ["long"])
    assert len(scored) == decoder.config.num_indexer_layers
    requests.step({"long": 10})
    assert len(scored) == 2 * decoder.config.num_indexer_layers
    got = torch.cat(requests.logits["long"])
    assert (got - oracle("shared")["long"][: len(got)]).abs().max() <= TOLERANCE * got.std()


@pytest.mark.parametrize("mask_up_to", [0, 1000], ids=["always gather", "always mask"])
def test_both_ways_of_prefill_are_right(mask_up_to, monkeypatch):
    monkeypatch.setattr(mla, "MASK_UP_TO", mask_up_to)
    assert error(Requests(load("shared"), prompts("shared")).run(), "shared") <= TOLERANCE


@pytest.mark.parametrize("values", [1, 5000])
def test_runs_of_queries_change_nothing(values, monkeypatch):
    monkeypatch.setitem(indexing.RUN_VALUES, "cpu", values)
    for variant in ("shared", "dense"):
        assert error(Requests(load(variant), prompts(variant)).run(), variant) <= TOLERANCE


# --- the comparison notices what it should --------------------------------------------------------------------

def scale(decoder, patch):
    for layer in decoder.layers:
        layer.attention.scale *= 1.02


def half_split_rope_in_attention(decoder, patch):
    patch.setattr(mla, "rotate_", half_split)


def half_split_rope_in_indexer(decoder, patch):
    patch.setattr(indexer_module, "rotate_", half_split)


def half_split(x, cis):
    """Rotates (x[i], x[i + d/2])."""
    width = x.shape[-1]
    order = interleave_rows(torch.arange(width).unsqueeze(1), 1).squeeze(1)
    return x.copy_(rotate_(x[..., order].clone(), cis)[..., order.argsort()])


def index_rope_last(decoder, patch):
    def rotate_last(x, cis):
        whole = x.as_strided((*x.shape[:-1], GLM["index_head_dim"]), x.stride(), x.storage_offset())
        rotate_(whole[..., -x.shape[-1]:], cis)
        return x

    patch.setattr(indexer_module, "rotate_", rotate_last)


def shared_layers_see_everything(decoder, patch):
    for layer in decoder.layers:
        if layer.attention.indexer is None:
            layer.attention.top_k = 10**6


def a_shared_layer_chooses_itself(decoder, patch):
    decoder.layers[2].attention.indexer = decoder.layers[1].attention.indexer


def a_full_layer_reuses(decoder, patch):
    decoder.layers[3].attention.indexer = None


def without_relu(queries, head_weights, pages, tables, positions):
    keys = pages[tables].flatten(1, 2)[:, :positions].float()  # (B, S, d), plain keys
    return torch.einsum("bqhd,bqh,bsd->bqs", queries, head_weights, keys)


def no_relu(decoder, patch):
    patch.setattr(indexing, "indexer_scores", without_relu)


def key_norm_without_bias(decoder, patch):
    for layer in decoder.layers:
        if layer.attention.indexer:
            layer.attention.indexer.key_norm[1].zero_()


def one_row_more(decoder, patch):
    for layer in decoder.layers:
        layer.attention.top_k += 1
        if layer.attention.indexer:
            layer.attention.indexer.top_k += 1


def low_rank_norms_use_rms_norm_eps(decoder, patch):
    patch.setattr(mla, "LATENT_NORM_EPS", decoder.config.rms_norm_eps)


def unscaled_experts(decoder, patch):
    for layer in decoder.layers[2:]:
        layer.mlp.router.scaling = 1.0


def uncorrected_routing(decoder, patch):
    for layer in decoder.layers[2:]:
        layer.mlp.router.bias.zero_()


@pytest.mark.parametrize("variant, fault", [
    ("shared", scale), ("shared", half_split_rope_in_attention), ("shared", half_split_rope_in_indexer), ("shared", index_rope_last),
    ("shared", shared_layers_see_everything), ("shared", a_shared_layer_chooses_itself), ("shared", a_full_layer_reuses), ("shared", no_relu),
    ("shared", key_norm_without_bias), ("shared", one_row_more), ("grouped", low_rank_norms_use_rms_norm_eps), ("shared", unscaled_experts),
    ("shared", uncorrected_routing), ("grouped", uncorrected_routing),
], ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_fault_shows(variant, fault, monkeypatch):
    decoder = load(variant)
    with torch.inference_mode():
        fault(decoder, monkeypatch)
    assert error(Requests(decoder, {"long": prompts(variant)["long"]}).run(), variant) > 20 * TOLERANCE


# --- the absorbed form ---------------------------------------------------------------------------------------

@torch.inference_mode()
def test_absorbed_equals_expanded_in_float64():
    """Keys and values of every head made from the cached rows, as the papers write attention before absorption."""
    decoder = load("dense", torch.float64)
    attention, config, tokens = decoder.layers[1].attention, decoder.config, 40
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, config.hidden_size, dtype=torch.float64, generator=generator)
    cis = torch.polar(torch.ones(tokens, 1, rope // 2), torch.rand(tokens, 1, rope // 2, generator=generator) * 6)
    kv = KVCache(config, "float32", "LBNHC", 4, 16, dtype=torch.float64)
    blocks = torch.tensor([2, 0, 3])
    positions = torch.arange(tokens)
    slots = blocks[positions // 16] * 16 + positions % 16
    batch = Batch(positions, positions, slots, positions, prefills=[PrefillChunk(0, tokens, 0, blocks)])
    got = attention(x, cis, batch, kv, torch.zeros_like(x))

    weights = {name: t.double() for name, t in stored("dense").items() if name.startswith("model.layers.1.self_attn.")}
    take = lambda name: weights[f"model.layers.1.self_attn.{name}.weight"]
    low = x @ take("q_a_proj").T
    low = low / (low.square().mean(-1, keepdim=True) + 1e-6).sqrt() * take("q_a_layernorm")
    q = (low @ take("q_b_proj").T).view(tokens, heads, nope + rope) * (nope + rope) ** -0.5
    rotate_(q[..., nope:], cis)  # the engine's own, and after scaling as there, since it rounds to float32
    latent, k_rope = (part[:tokens, 0] for part in kv.read_blocks(1, blocks))  # (T, R), (T, rope)
    keys_values = (latent @ take("kv_b_proj").T).view(tokens, heads, -1)
    keys = torch.cat((keys_values[..., :nope], k_rope.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", q, keys)
    scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), keys_values[..., nope:])
    expected = out.flatten(1) @ take("o_proj").T
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


def stored(variant):
    from safetensors.torch import load_file

    return load_file(directory(variant) / "model.safetensors")


@torch.inference_mode()
def test_a_query_that_sees_nothing_gives_zero():
    generator = torch.Generator().manual_seed(0)
    q_latent, q_rope, latent, rope = (torch.randn(2, n, d, generator=generator) for n, d in ((6, 16), (6, 4), (9, 16), (9, 4)))
    absent = torch.rand(2, 3, 9, generator=generator) < 0.5
    absent[0, 1] = absent[1, 2] = True
    out = mla.attend(q_latent, q_rope, latent, rope, absent).view(2, 2, 3, 16)  # (B, H, n, R)
    assert out.isfinite().all()
    empty = absent.all(-1)  # (B, n)
    assert empty.sum() >= 2 and (out.transpose(1, 2)[empty] == 0).all() and (out.transpose(1, 2)[~empty] != 0).any(-1).all()


def test_the_mask_of_a_choice_ignores_its_absent_entries():
    unchosen = mla.unchosen(torch.tensor([[2, -1, 4], [-1, -1, -1], [0, 1, 3]]), 5)
    assert [[p for p in range(5) if not row[p]] for row in unchosen] == [[2, 4], [], [0, 1, 3]]


# --- packed rows, other dtypes, devices ----------------------------------------------------------------------

def test_packed_rows_stay_near_in_the_order_of_their_bits():
    """A row is off by about .2% (bfloat16), 2.6% (E4M3) and 10% (E2M1) of its size; five random layers make that some five times as much."""
    name = "without experts"
    errors = {kind: distance(Requests(load(name), prompts(name), kv_cache_dtype=kind).run(), oracle(name)) for kind in LATENT_DTYPES}
    assert errors["float32"] < 1e-5
    assert 0.002 < errors["bfloat16"] < 0.02
    assert 0.05 < errors["fp8_ds_mla"] < errors["fp8"] < 0.25
    assert 0.3 < errors["nvfp4_fp8_ds_mla"] < 0.6


@pytest.mark.parametrize("kv_cache_dtype", LATENT_DTYPES)
def test_packed_rows_do_not_depend_on_the_schedule(kv_cache_dtype):
    """A token's own row, too, is attended to as it was packed: chunks, decodes and one pass see the same rows."""
    name = "without experts"
    ids = {"middle": prompts(name)["middle"]}
    one_pass = Requests(load(name), ids, kv_cache_dtype=kv_cache_dtype)
    one_pass.step({"middle": 97})
    pieces = Requests(load(name), ids, kv_cache_dtype=kv_cache_dtype, layout="BLHNC", block_size=32).run()
    # Values at a rounding edge may fall either way, so that a few rows differ by a step: far less than packing all of them costs.
    assert distance(pieces, {"middle": one_pass.logits["middle"][0]}) < {"float32": 1e-5, "bfloat16": 1e-3}.get(kv_cache_dtype, 0.02)


@pytest.mark.parametrize("kv_cache_dtype", [name for name in LATENT_DTYPES if name not in ("int3", "int2")])  # they leave nothing to compare
def test_packed_rows_work_with_sparse_attention(kv_cache_dtype):
    got = Requests(load("shared"), prompts("shared"), kv_cache_dtype=kv_cache_dtype, layout="BLNHC").run()
    assert distance(got, oracle("shared")) < 1.0  # other experts and other rows are chosen; unrelated logits would be off by 1.4


def test_a_bfloat16_model_stays_near():
    name = "without experts"
    requests = Requests(load(name, torch.bfloat16), prompts(name), kv_cache_dtype="bfloat16")
    assert distance({name: t.float() for name, t in requests.run().items()}, oracle(name)) < 0.1


@pytest.mark.parametrize("kv_cache_dtype", LATENT_DTYPES)
def test_a_decode_step_never_asks_the_device(kv_cache_dtype):
    """Fake tensors have shapes but no values: whatever reads one (item, tolist, nonzero) raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    decoder = load("shared")
    for layer in decoder.layers[1:]:
        layer.mlp.avoids_sync = True
    kv = KVCache(decoder.config, kv_cache_dtype, "BLHNC", 20, 16)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        for requests, width in ((1, 1), (1, 7), (5, 1), (5, 7)):  # within index_topk, and past it
            rows = torch.zeros(requests, dtype=torch.int64)
            batch = Batch(rows, rows, rows, rows, requests, torch.zeros(requests, width, dtype=torch.int64), rows + 1, width * 16)
            assert decoder.logits(decoder.forward(batch, kv)).shape == (requests, GLM["vocab_size"])
        for layer in decoder.layers[1:]:
            layer.mlp.avoids_sync = False
        with pytest.raises(Exception, match="data-dependent|DataDependent|aten._local_scalar_dense|bincount"):
            decoder.forward(batch, kv)


def test_a_model_that_starts_on_a_shared_layer_is_refused(tmp_path):
    folder = shutil.copytree(directory("shared"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["indexer_types"][0] = "shared"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"indexer_types\[0\]='shared'.*start with 'full'"):
        load_model(folder)
