"""What is written comes back, whatever the order of bytes, the block size and the format."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.config import HEAD_DTYPES, KV_CACHE_LAYOUTS, LATENT_DTYPES, ConfigError, GlmConfig, LlamaConfig
from minengine.kv.cache import KVCache

COMMON = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32)
LLAMA = LlamaConfig(architecture="LlamaForCausalLM", num_key_value_heads=3, head_dim=32, **COMMON)
GLM = GlmConfig(
    architecture="GlmMoeDsaForCausalLM", q_lora_rank=16, kv_lora_rank=48, qk_nope_head_dim=8, qk_rope_head_dim=10, v_head_dim=8,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16, routed_scaling_factor=1.0, norm_topk_prob=True,
    n_group=1, topk_group=1, index_topk=8, index_n_heads=8, index_head_dim=30, indexer_types=("full", "shared", "full"),
    mlp_layer_types=("dense", "sparse", "sparse"), **COMMON,
)
CASES = [(LLAMA, name) for name in (*HEAD_DTYPES, "q8_0:q4_0", "bfloat16:int2")] + [(GLM, name) for name in LATENT_DTYPES]
each_case = pytest.mark.parametrize("config, kv_cache_dtype", CASES, ids=[f"{c.architecture[:3]}-{name}" for c, name in CASES])
each_layout = pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)


def fill(cache: KVCache, seed: int = 0) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Write every slot of every layer in a shuffled order; what should come back, by layer, in slot order."""
    torch.manual_seed(seed)
    heads, tokens = cache.kv_layout.num_heads, cache.num_blocks * cache.block_size
    expected = {}
    for layer in range(cache.kv_layout.num_layers):
        a, b = (torch.randn(tokens, heads, w) for w in cache.fmt.widths)
        slots = torch.randperm(tokens)
        cut = tokens // 3
        cache.write(layer, slots[:cut], a[slots[:cut]], b[slots[:cut]])
        cache.write(layer, slots[cut:], a[slots[cut:]], b[slots[cut:]])
        expected[layer] = cache.fmt.dequantize(cache.fmt.quantize(a, b))
    return expected


@each_case
@each_layout
@pytest.mark.parametrize("block_size", [16, 64])
def test_rows_come_back_by_block_and_by_slot(config, kv_cache_dtype, layout, block_size):
    cache = KVCache(config, kv_cache_dtype, layout, num_blocks=5, block_size=block_size)
    assert not cache.storage.any()
    expected = fill(cache)
    heads, n = config.kv_heads, block_size
    ids = torch.tensor([[4, 0], [2, 2], [0, 3]])
    slots = torch.randint(0, 5 * n, (7, 2))
    for layer, (a, b) in expected.items():
        for parts, got in zip((a, b), cache.read_blocks(layer, ids)):
            assert torch.equal(got, parts.view(5, n, heads, -1)[ids].flatten(1, 2))
        for parts, got in zip((a, b), cache.read_slots(layer, slots)):
            assert torch.equal(got, parts[slots])
        one = cache.read_blocks(layer, ids[2])
        assert [p.shape for p in one] == [(2 * n, heads, w) for w in config.kv_widths]


@pytest.mark.parametrize("kv_cache_dtype", LATENT_DTYPES)
@each_layout
def test_indexer_keys_live_beside_the_rows(kv_cache_dtype, layout):
    cache = KVCache(GLM, kv_cache_dtype, layout, num_blocks=4, block_size=16)
    rows = fill(cache)
    keys = torch.randn(2, 64, GLM.index_head_dim)
    slots = torch.randperm(64)
    for full in range(2):
        cache.write_indexer(full, slots, keys[full][slots])
    ids = torch.tensor([[3, 1, 1]])
    for full in range(2):
        kept = cache.indexer_fmt.dequantize(cache.indexer_fmt.quantize(keys[full]))
        got = cache.indexer_fmt.dequantize(cache.indexer_pages(full)[ids]).flatten(1, 2)
        assert got.shape == (1, 48, 30) and torch.equal(got, kept.view(4, 16, 30)[ids].flatten(1, 2))
    for layer, (a, b) in rows.items():
        got = cache.read_slots(layer, torch.arange(64))
        assert torch.equal(got[0], a) and torch.equal(got[1], b)


@each_case
@each_layout
def test_a_write_touches_its_own_row_only(config, kv_cache_dtype, layout):
    cache = KVCache(config, kv_cache_dtype, layout, num_blocks=3, block_size=16)
    fill(cache)
    before = cache.storage.clone()
    slot = torch.tensor([21])
    cache.write(1, slot, *(torch.full((1, config.kv_heads, w), 3.0) for w in config.kv_widths))
    changed = (cache.storage != before).nonzero()[:, 0]
    mine = torch.arange(cache.nbytes).as_strided(cache.kv_layout.shape, cache.kv_layout.strides)[1, 1, :, 5].flatten()
    assert len(changed) and torch.isin(changed, mine).all()


@each_case
@each_layout
def test_copying_regions_moves_blocks_between_pools(config, kv_cache_dtype, layout):
    """What a transfer does: the bytes of `regions`, one by one, into other blocks of another pool."""
    source = KVCache(config, kv_cache_dtype, layout, num_blocks=4, block_size=16)
    target = KVCache(config, kv_cache_dtype, layout, num_blocks=7, block_size=16)
    expected = fill(source)
    for (start, length), (to, _) in zip(source.kv_layout.regions([3, 1]), target.kv_layout.regions([0, 6]), strict=True):
        target.storage[to : to + length] = source.storage[start : start + length]
    for layer, parts in expected.items():
        for part, got in zip(parts, target.read_blocks(layer, torch.tensor([0, 6]))):
            assert torch.equal(got, part.view(4, 16, *part.shape[1:])[[3, 1]].flatten(0, 1))
        untouched, _ = target.read_blocks(layer, torch.tensor([1, 2, 3, 4, 5]))
        assert not untouched.any()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_many_writes_leave_the_last_in_every_layout(data):
    """Random writes with overwrites, one model in six orders: all read alike, and like a plain dict."""
    config, name = data.draw(st.sampled_from(CASES))
    caches = [KVCache(config, name, layout, num_blocks=3, block_size=16) for layout in KV_CACHE_LAYOUTS]
    fmt, model = caches[0].fmt, {}
    for step in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.lists(st.integers(0, 47), unique=True, max_size=9))
        generator = torch.Generator().manual_seed(step)
        a, b = (torch.randn(len(slots), config.kv_heads, w, generator=generator) for w in config.kv_widths)
        for cache in caches:
            cache.write(0, torch.tensor(slots, dtype=torch.int64), a, b)
        model.update({slot: fmt.quantize(a[i], b[i]) for i, slot in enumerate(slots)})
    empty = torch.zeros(config.kv_heads, fmt.storage_width, dtype=fmt.storage_dtype)
    a, b = fmt.dequantize(torch.stack([model.get(slot, empty) for slot in range(48)]))
    for cache in caches:
        got_a, got_b = cache.read_blocks(0, torch.arange(3))
        assert torch.equal(got_a, a) and torch.equal(got_b, b), cache.layout


@pytest.mark.parametrize("config, name", [(LLAMA, "nvfp4"), (GLM, "nvfp4_fp8_ds_mla"), (LLAMA, "bfloat16")])
def test_reads_have_the_compute_dtype(config, name):
    cache = KVCache(config, name, "LBNHC", 2, 16, dtype=torch.bfloat16)
    cache.write(0, torch.arange(4), *(torch.ones(4, config.kv_heads, w, dtype=torch.bfloat16) for w in config.kv_widths))
    for part in (*cache.read_blocks(0, torch.tensor([0])), *cache.read_slots(0, torch.tensor([3]))):
        assert part.dtype == torch.bfloat16 and part[3 % len(part)].float().sub(1).abs().max() < 0.15


def test_a_plain_read_copies_once():
    cache = KVCache(LLAMA, "float32", "LBNHC", 4, 16)
    a, b = cache.read_blocks(0, torch.tensor([1, 2]))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.untyped_storage().nbytes() == 2 * 16 * 3 * 64 * 4


def test_empty_reads_and_writes():
    for config, name in CASES:
        cache = KVCache(config, name, "BLHNC", 2, 16)
        none = torch.empty(0, dtype=torch.int64)
        cache.write(0, none, *(torch.zeros(0, config.kv_heads, w) for w in config.kv_widths))
        assert [p.shape for p in cache.read_blocks(0, none)] == [(0, config.kv_heads, w) for w in config.kv_widths]
        assert [p.shape for p in cache.read_slots(0, none)] == [(0, config.kv_heads, w) for w in config.kv_widths]
        assert not cache.storage.any()


def test_the_pool_is_as_large_as_asked():
    cache = KVCache(GLM, "nvfp4_fp8_ds_mla", "BLNHC", num_blocks=6, block_size=32)
    assert (cache.num_blocks, cache.block_size, cache.layout, cache.kv_cache_dtype) == (6, 32, "BLNHC", "nvfp4_fp8_ds_mla")
    assert cache.nbytes == cache.storage.nbytes == 6 * 32 * (3 * (24 + 10 + 3) + 2 * 34)


@pytest.mark.parametrize("config, name, words", [
    (LLAMA, "nvfp4_fp8_ds_mla", ["kv_cache_dtype='nvfp4_fp8_ds_mla'", "LlamaForCausalLM", "nvfp4", "q8_0"]),
    (GLM, "q8_0", ["kv_cache_dtype='q8_0'", "GlmMoeDsaForCausalLM", "fp8_ds_mla"]),
    (GLM, "int8", ["kv_cache_dtype='int8'", "bfloat16"]),
])
def test_a_format_that_does_not_fit_the_model_is_refused(config, name, words):
    with pytest.raises(ConfigError) as error:
        KVCache(config, name, "LBNHC", 2, 16)
    for word in words:
        assert word in str(error.value)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_layout='HND'.*BLHNC"):
        KVCache(LLAMA, "float32", "HND", 2, 16)
