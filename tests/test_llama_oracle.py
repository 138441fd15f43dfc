"""`LlamaForCausalLM` as the engine runs it, against Hugging Face's: tiny random models and smollm2's own weights.

Every logit of every token is compared: prompts in chunks, then decodes, requests of mixed lengths in one batch.
"""
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from model_harness import Requests, worst

from minengine.config import HEAD_DTYPES, KV_CACHE_LAYOUTS
from minengine.kv.cache import KVCache
from minengine.model import gqa, linear
from minengine.model.decoder import load_model
from minengine.model.rope import interleave_rows, inverse_frequencies, rotate_, rotations
from minengine.model.weights import open_model

TOLERANCE = 1e-4  # of the largest logit
LENGTHS = {"long": 150, "middle": 70, "short": 31, "tiny": 2}  # tokens
PROMPTS = {"long": 120, "middle": 40, "short": 9, "tiny": 1}  # of which this many are prefilled

LLAMA = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
             max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=True,
             bos_token_id=None, eos_token_id=None)
VARIANTS = {
    "grouped, tied": {},
    "one head a key": dict(num_key_value_heads=6, head_dim=8, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "one key for all": dict(num_attention_heads=4, num_key_value_heads=1, head_dim=20, rms_norm_eps=1e-2),
}


FOLDERS = TemporaryDirectory(prefix="minengine-llama-")  # one model each, gone with the process


@lru_cache
def directory(variant):
    """Saved random weights, large enough that the best token depends on the whole context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **VARIANTS[variant]}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(0.7, 1.3) if weight.dim() == 1 else weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
    folder = Path(FOLDERS.name) / str(len(list(Path(FOLDERS.name).iterdir())))
    model.save_pretrained(folder)
    return folder


@lru_cache
def tokens():
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randint(0, LLAMA["vocab_size"], (n,), generator=generator) for name, n in LENGTHS.items()}


@lru_cache
def oracle(variant):
    from transformers import LlamaForCausalLM

    return _logits(LlamaForCausalLM.from_pretrained(directory(variant), dtype=torch.float32), tokens())


@torch.inference_mode()
def _logits(model, token_ids):
    """Each request in one pass, without a cache: {name: (n, vocab)}."""
    return {name: model.eval()(ids[None], use_cache=False).logits[0] for name, ids in token_ids.items()}


def test_the_oracle_is_worth_comparing_with():
    for variant in VARIANTS:
        for logits in oracle(variant).values():
            assert 0.3 < logits.std() < 30 and len(logits.argmax(-1).unique()) > len(logits) // 4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout, block_size", [*((layout, 16) for layout in KV_CACHE_LAYOUTS), ("BLNHC", 32), ("LBNHC", 64), ("BHLNC", 256)])
def test_logits_equal_hugging_faces(variant, layout, block_size):
    requests = Requests(load_model(directory(variant)), tokens(), layout=layout, block_size=block_size, seed=block_size)
    got = requests.run(PROMPTS, seed=KV_CACHE_LAYOUTS.index(layout) + block_size)
    assert worst(got, oracle(variant)) <= TOLERANCE


@pytest.mark.parametrize("packed_from", [0, 1 << 60])
@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices_in_either_order_give_the_same(variant, packed_from, monkeypatch):
    """Reordered by oneDNN, as large ones are; plain, as CUDA and other processors run them."""
    monkeypatch.setattr(linear, "PACKED_FROM", packed_from)
    decoder = load_model(directory(variant))
    assert decoder.lm_head.packed == linear._packs(decoder.embedding) and (packed_from == 0 or not decoder.lm_head.packed)
    assert worst(Requests(decoder, tokens()).run(PROMPTS), oracle(variant)) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_as_close_as_hugging_faces(variant):
    from transformers import LlamaForCausalLM

    theirs = _logits(LlamaForCausalLM.from_pretrained(directory(variant), dtype=torch.bfloat16), tokens())
    ours = Requests(load_model(directory(variant), "bfloat16"), tokens(), kv_cache_dtype="bfloat16").run(PROMPTS)
    assert all(logits.dtype == torch.bfloat16 for logits in ours.values())
    assert _distance(ours, oracle(variant)) <= 1.2 * _distance(theirs, oracle(variant))


def _distance(got, expected):
    """Root mean square of the differences."""
    return torch.cat([(got[name].float() - expected[name]).flatten() for name in got]).square().mean().sqrt().item()


@pytest.mark.parametrize("kv_cache_dtype", [*HEAD_DTYPES, "bfloat16:q4_0"])
def test_the_cache_s_format_counts_and_the_chunks_do_not(kv_cache_dtype):
    """A query sees its own chunk's rows as the cache gives them back, so any cut gives the same numbers."""
    decoder = load_model(directory("grouped, tied"))
    whole, *cut = (Requests(decoder, tokens(), kv_cache_dtype=kv_cache_dtype, seed=seed).run(PROMPTS, seed, chunks)
                   for seed, chunks in enumerate([(150,), (1, 2), (7, 64)]))
    for got in cut:
        assert worst(got, whole) <= 5e-3  # sums differ in the last bit, and then a value may round the other way
    assert (worst(whole, oracle("grouped, tied")) <= TOLERANCE) == (kv_cache_dtype == "float32")


# --- decodes in runs ------------------------------------------------------------------------------------------

def _decodes_together(ends=(31, 50, 12, 40, 13, 33)):
    """Six prefixes of one text, prefilled but for three tokens, then decoded together; returns the runs' sizes."""
    ids = {str(n): tokens()["long"][:n] for n in ends}
    requests = Requests(load_model(directory("grouped, tied")), ids)
    requests.step({name: len(each) - 3 for name, each in ids.items()})
    for _ in range(3):
        requests.step({}, list(ids))
    got = {name: torch.cat(parts) for name, parts in requests.logits.items()}
    assert worst(got, {name: oracle("grouped, tied")["long"][: int(name)] for name in ids}) <= TOLERANCE


ROW = 2 * 32 * 2  # values of a token of that model


@pytest.mark.parametrize("run, split, sizes", [(1, 2**30, [1] * 6), (2 * 50 * ROW, 2**30, [2, 3, 1]),
                                               (2**30, 30 * ROW, [1, 3, 2]), (2**30, 2**30, [6])])
def test_runs_of_decodes_give_the_same(run, split, sizes, monkeypatch):
    """One request a run; full runs; runs of similar length (50, then 40 33 31, then 13 12); one run."""
    monkeypatch.setitem(gqa.RUN_VALUES, "cpu", run)
    monkeypatch.setattr(gqa, "SPLIT_VALUES", split)
    seen = []
    monkeypatch.setattr(gqa, "_similar", lambda *args, cut=gqa._similar: seen.append(cut(*args)) or seen[-1])
    _decodes_together()
    assert [len(members) for members, _ in seen[-1]] == sizes and len(seen) == 3  # one plan a step, shared by its layers


def test_runs_where_lengths_are_on_the_device(monkeypatch):
    """CUDA's even cut, made here by hand."""
    monkeypatch.setattr(gqa, "_similar", lambda lens, row: [(range(0, 4), max(lens)), (range(4, 6), max(lens))])
    _decodes_together()


def test_runs_cut_where_padding_costs_more_than_a_run(monkeypatch):
    monkeypatch.setitem(gqa.RUN_VALUES, "cpu", 4000)
    monkeypatch.setattr(gqa, "SPLIT_VALUES", 1000)
    assert gqa._similar([100, 90, 95], row=10) == [([0, 2, 1], 100)]  # 3 x 100 x 10 values, at most 5 x 2 x 10 of them padding
    assert gqa._similar([100, 10, 100], row=10) == [([0, 2, 1], 100)]  # padding one request by 90 x 10
    assert gqa._similar([100, 10, 100, 10], row=10) == [([0, 2], 100), ([1, 3], 10)]  # padding two
    assert gqa._similar([100] * 5, row=10) == [([0, 1, 2, 3], 100), ([4], 100)]  # full at 4000
    assert gqa._similar([9000], row=10) == [([0], 9000)]  # one request is a run, whatever its length


@pytest.mark.parametrize("block_size, by_slot", [(16, False), (256, True)])
def test_a_mostly_empty_block_is_not_read_whole(block_size, by_slot, monkeypatch):
    read = []
    monkeypatch.setattr(KVCache, "read_blocks", lambda *args, whole=KVCache.read_blocks: read.append("blocks") or whole(*args))
    monkeypatch.setattr(KVCache, "read_slots", lambda *args, some=KVCache.read_slots: read.append("slots") or some(*args))
    requests = Requests(load_model(directory("grouped, tied")), {"short": tokens()["short"]}, block_size=block_size)
    requests.step({"short": 30})
    requests.step({}, ["short"])
    assert set(read) == {"slots" if by_slot else "blocks"}


# --- rotations ------------------------------------------------------------------------------------------------

def test_rotation_by_hand():
    """theta = 100, 4 values: pairs turn by p and p / 10 radians."""
    cis = rotations(torch.tensor([0, 3]), inverse_frequencies(100.0, 4))  # (2, 1, 2)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]).repeat(2, 1, 1)
    out = rotate_(x, cis)
    angle = torch.tensor([3.0, 0.3])
    assert out.data_ptr() == x.data_ptr()
    torch.testing.assert_close(out[0, 0], torch.tensor([1.0, 0.0, 0.0, 2.0]))
    torch.testing.assert_close(out[1, 0], torch.stack((angle[0].cos(), angle[0].sin(), -2 * angle[1].sin(), 2 * angle[1].cos())))


def test_half_precision_rotates_in_float32():
    cis = rotations(torch.arange(5000, 5003), inverse_frequencies(1e4, 16))
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(rotate_(x.clone(), cis), rotate_(x.float(), cis).bfloat16(), rtol=0, atol=0)


def test_interleaved_rows_by_hand():
    """Two heads of 4: each head's rows 0 1 2 3 become 0 2 1 3."""
    rows = torch.arange(8.0).unsqueeze(1)
    assert interleave_rows(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# --- smollm2 --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    """The decoder, and Hugging Face's model on the same dequantised weights, Q and K rows back in its half-split order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, source = open_model("smollm2")
    state = {name: source.take(name) for name in source.names()}
    for name, weight in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            state[name] = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, tie_word_embeddings=True))
    model.load_state_dict(state, assign=True)
    rope = model.model.rotary_emb
    rope.inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)  # a buffer, not in the state
    return load_model("smollm2"), model


def test_smollm2_equals_hugging_faces(smollm2):
    from minengine.tokenizer import load_tokenizer

    decoder, model = smollm2
    tokenizer = load_tokenizer("smollm2")
    texts = {"prose": "The cache lives where the attention is computed, and a copy of it costs what its bytes cost to move. " * 6,
             "code": "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n", "short": "Bread and"}
    token_ids = {name: torch.tensor(tokenizer.encode(text)) for name, text in texts.items()}
    expected = _logits(model, token_ids)
    prompts = {name: max(1, len(ids) - 8) for name, ids in token_ids.items()}
    got = Requests(decoder, token_ids, block_size=32, layout="BLNHC").run(prompts, seed=1, chunks=(17, 64))
    assert worst(got, expected) <= TOLERANCE


def test_smollm2_knows_the_capital_of_france(smollm2):
    from minengine.tokenizer import load_tokenizer

    decoder, tokenizer = smollm2[0], load_tokenizer("smollm2")
    ids = tokenizer.encode("The capital of France is")
    for _ in range(2):
        requests = Requests(decoder, {"it": torch.tensor(ids)})
        requests.step({"it": len(ids)})
        ids.append(int(requests.logits["it"][0][-1].argmax()))
    assert tokenizer.decode(ids[-2:]) == " Paris."
