"""The sparse-attention indexer: exact top-k with stable ties, scores against the formula and against Hugging Face, memory in runs."""
import dataclasses

import pytest
import torch
from glm_requests import GLM, directory
from hypothesis import given, strategies as st

from minengine.config import ConfigError
from minengine.kv.cache import KVCache
from minengine.model.batch import Batch, PrefillChunk
from minengine.model.indexer import Indexer
from minengine.model.rope import inverse_frequencies, rotations
from minengine.model.weights import SafetensorsSource, read_config
from minkernels import indexer as indexing
from minkernels.indexer import best_positions, runs

TOP_K, BLOCK = 24, 16
NEGATIVE_INFINITY = float("-inf")


# --- top-k ---------------------------------------------------------------------------------------------------

FEW_SCORES = st.sampled_from([NEGATIVE_INFINITY, -2.0, -1.0000001, -1.0, -1e-42, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 3e38])


@given(rows=st.integers(1, 3).flatmap(lambda q: st.integers(1, 40).flatmap(
    lambda s: st.lists(st.lists(FEW_SCORES, min_size=s, max_size=s), min_size=q, max_size=q))), data=st.data())
def test_best_positions_is_a_stable_sort(rows, data):
    k = data.draw(st.integers(1, len(rows[0])))
    got = best_positions(torch.tensor(rows), k)
    assert got.shape == (len(rows), k)
    for row, chosen in zip(rows, got.tolist()):
        row = torch.tensor(row).tolist()  # as float32
        order = sorted((p for p, s in enumerate(row) if s != NEGATIVE_INFINITY), key=lambda p: -row[p])  # Python's sort is stable
        assert sorted(p for p in chosen if p >= 0) == sorted(order[:k])
        assert chosen.count(-1) == max(0, k - len(order))


def test_best_positions_of_many_equal_scores_are_the_first():
    scores = torch.zeros(2, 5000)
    scores[1, ::2] = -0.0
    scores[1, 4321] = 1.0
    assert sorted(best_positions(scores, 100)[0].tolist()) == list(range(100))
    assert sorted(best_positions(scores, 100)[1].tolist()) == [*range(99), 4321]


# --- scores --------------------------------------------------------------------------------------------------

class Scene:
    """One request's tokens, written to shuffled blocks through one indexer of the tiny model."""

    def __init__(self, tokens, seed=0, kv_cache_dtype="float32", layer=3, dtype=torch.float32, **changes):
        self.config = dataclasses.replace(read_config(directory()), **changes)
        self.indexer = Indexer(self.config, layer, SafetensorsSource(directory(), dtype))
        generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens
        self.x = torch.randn(tokens, GLM["hidden_size"], generator=generator, dtype=dtype)
        self.c_q = torch.randn(tokens, GLM["q_lora_rank"], generator=generator, dtype=dtype)
        self.cis = rotations(torch.arange(tokens), inverse_frequencies(self.config.rope_theta, self.config.qk_rope_head_dim))
        self.kv = KVCache(self.config, kv_cache_dtype, "BLHNC", 40, BLOCK, dtype=dtype)
        self.blocks = torch.randperm(40, generator=generator)[: -(-tokens // BLOCK)]
        positions = torch.arange(tokens)
        self.slots = self.blocks[positions // BLOCK] * BLOCK + positions % BLOCK
        self.indexer.write(self.x, self.cis, self.slots, self.kv)

    def chunk(self, start, end):
        part = slice(start, end)
        chunk = PrefillChunk(0, end - start, start, self.blocks[: -(-end // BLOCK)])
        return self.indexer.choose_for_chunk(self.x[part], self.c_q[part], self.cis[part], chunk, self.kv)

    def decodes(self, positions, width=None):
        """Each position as if it were the new token of a request with this prefix."""
        at = torch.tensor(positions)
        longest = max(positions) + 1
        tables = torch.zeros(len(positions), width or -(-longest // BLOCK), dtype=torch.int64)
        for row, position in enumerate(positions):
            own = self.blocks[: position // BLOCK + 1]
            tables[row, : len(own)] = own
        batch = Batch(at, at, self.slots[at], at, len(positions), tables, at + 1, tables.shape[1] * BLOCK if width else longest)
        return self.indexer.choose_for_decodes(self.x[at], self.c_q[at], self.cis[at], batch, self.kv)


def as_sets(choice):
    return [{p for p in row if p >= 0} for row in choice.tolist()]


def assert_alike(some, others):
    """Equal sets, but for a rare near-tie at the cut-off that two orders of summation may decide differently."""
    differing = [(a, b) for a, b in zip(some, others, strict=True) if a != b]
    assert len(differing) <= len(some) // 50, differing
    assert all(len(a - b) == len(b - a) == 1 for a, b in differing), differing


def scores_by_formula(scene, position):
    """One query's scores of what it sees, from the docstring's formula in float64, one token and head at a time."""
    weights, config = SafetensorsSource(directory(), torch.float64), scene.config
    name = "model.layers.3.self_attn.indexer."
    take = {n: weights.take(name + n) for n in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")}
    heads, d, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim

    def rotate(vector, at):
        out = vector.clone()
        for i in range(rope // 2):
            angle = torch.tensor(at * config.rope_theta ** (-2 * i / rope), dtype=torch.float64)
            a, b = vector[2 * i], vector[2 * i + 1]
            out[2 * i], out[2 * i + 1] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return out

    x, c_q = scene.x.double(), scene.c_q.double()
    query = (take["wq_b.weight"] @ c_q[position]).view(heads, d)
    w = take["weights_proj.weight"] @ x[position] / heads**0.5
    scores = []
    for t in range(position + 1):
        key = take["wk.weight"] @ x[t]
        key = (key - key.mean()) / (key.var(correction=0) + 1e-6).sqrt() * take["k_norm.weight"] + take["k_norm.bias"]
        key = rotate(key, t)
        scores.append(sum(w[h] * torch.relu(rotate(query[h], position) @ key / d**0.5) for h in range(heads)).item())
    return scores


def by_formula(scene, position):
    scores = scores_by_formula(scene, position)
    return set(sorted(range(position + 1), key=lambda t: (-scores[t], t))[:TOP_K])


@torch.inference_mode()
def test_scores_follow_the_formula():
    scene = Scene(40)
    queries, head_weights = scene.indexer.queries(scene.x, scene.c_q, scene.cis)
    scores = indexing.indexer_scores(queries[None], head_weights[None], scene.kv.indexer_pages(scene.indexer.index), scene.blocks[None], 40)[0]  # (40, 40)
    for position in (0, 7, 39):
        expected = torch.tensor(scores_by_formula(scene, position))
        assert (scores[position, : position + 1] - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.inference_mode()
def test_the_choice_follows_the_formula():
    scene = Scene(60)
    chosen = as_sets(scene.chunk(20, 60))
    assert_alike([chosen[position - 20] for position in range(20, 60, 3)], [by_formula(scene, position) for position in range(20, 60, 3)])


@torch.inference_mode()
def test_the_choice_equals_hugging_faces():
    from safetensors.torch import load_file
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, GlmMoeDsaRotaryEmbedding

    scene, config = Scene(200, seed=4), GlmMoeDsaConfig(**GLM)
    theirs, prefix = GlmMoeDsaIndexer(config, 3), "model.layers.3.self_attn.indexer."
    theirs.load_state_dict({n.removeprefix(prefix): t for n, t in load_file(directory() / "model.safetensors").items() if n.startswith(prefix)})
    rotary = GlmMoeDsaRotaryEmbedding(config)(scene.x[None], torch.arange(200)[None])
    causal = torch.ones(1, 200, 200, dtype=torch.bool).tril()
    expected = theirs(scene.x[None], scene.c_q[None], rotary, causal, None)[0]
    mine = as_sets(scene.chunk(0, 200))
    assert_alike(mine[TOP_K:], [set(row) for row in expected[TOP_K:].tolist()])


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8", "nvfp4_fp8_ds_mla"])
@torch.inference_mode()
def test_chunks_and_decodes_choose_alike(kv_cache_dtype):
    scene = Scene(150, kv_cache_dtype=kv_cache_dtype)
    whole = as_sets(scene.chunk(0, 150))
    pieces = [s for start, end in ((0, 40), (40, 41), (41, 97), (97, 150)) for s in as_sets(scene.chunk(start, end))]
    assert_alike(whole, pieces)
    positions = [*range(149, 60, -1), 0, 30, 23, 24, 25]
    for width in (None, 13):  # exact tables, and a CUDA graph's: wider than any request
        assert_alike(as_sets(scene.decodes(positions, width)), [whole[p] for p in positions])


@torch.inference_mode()
def test_a_short_request_chooses_all_it_sees():
    scene = Scene(150)
    chosen = scene.decodes([5, 149])
    assert chosen.shape == (2, TOP_K)
    assert sorted(chosen[0].tolist()) == [-1] * (TOP_K - 6) + list(range(6))
    assert [len(s) for s in as_sets(scene.chunk(0, 150))] == [min(p + 1, TOP_K) for p in range(150)]


@torch.inference_mode()
def test_packed_keys_choose_nearly_the_same():
    """An E4M3 key is off by up to 1/16 of its value: most of the choice survives, not all of it."""
    exact = as_sets(Scene(200).chunk(0, 200))
    packed = as_sets(Scene(200, kv_cache_dtype="fp8").chunk(0, 200))
    kept = [len(a & b) / TOP_K for a, b in zip(exact[TOP_K:], packed[TOP_K:])]
    assert 0.85 < sum(kept) / len(kept) < 1.0


# --- memory --------------------------------------------------------------------------------------------------

@given(queries=st.integers(1, 300), values=st.integers(1, 2**21))
def test_runs_cover_the_queries_within_the_bound(queries, values):
    cut = runs(queries, values, torch.device("cpu"))
    assert [i for run in cut for i in range(run.start, run.stop)] == list(range(queries))
    assert all((run.stop - run.start) * values <= indexing.RUN_VALUES["cpu"] or run.stop - run.start == 1 for run in cut)


@torch.inference_mode()
def test_scoring_in_runs_changes_nothing_and_stays_within_the_bound(monkeypatch):
    scene = Scene(150)
    whole, decoded = as_sets(scene.chunk(60, 150)), as_sets(scene.decodes([149, 30, 148, 147]))
    bound = 7 * 150
    sizes = []

    def watched(queries, head_weights, pages, tables, positions, scores=indexing.indexer_scores):
        sizes.append(queries[..., 0, 0].numel() * positions)  # the run's scores
        return scores(queries, head_weights, pages, tables, positions)

    monkeypatch.setattr(indexing, "indexer_scores", watched)
    monkeypatch.setitem(indexing.RUN_VALUES, "cpu", bound)
    assert_alike(as_sets(scene.chunk(60, 150)), whole)
    assert len(sizes) >= -(-90 // 7) and max(sizes) <= bound
    monkeypatch.setitem(indexing.RUN_VALUES, "cpu", 1)
    assert as_sets(scene.decodes([149, 30, 148, 147])) == decoded


def test_an_index_head_narrower_than_its_rope_is_refused():
    with pytest.raises(ConfigError, match="index_head_dim=4 is less than qk_rope_head_dim=8"):
        Scene(1, index_head_dim=4)
