"""The GGUF reader against the `gguf` package, and against files that are cut or corrupt."""
import random
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from minengine.config import ConfigError, LlamaConfig
from minengine.model.decoder import Decoder, load_model
from minengine.model.gguf import GGUFFile, GGUFSource, gguf_config
from minengine.model.weights import resolve_model
from minengine.tokenizer import load_tokenizer

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]
HIDDEN, HEADS, KV_HEADS, WIDTH, VOCAB = 32, 4, 2, 64, 40
TOKENS = [*"abcdefghijklmnopqrstuvwxyz0123456789", "\u0120", "ab", "\u0120ab", "<|end|>"]


def write(path, *, kind=Kind.Q4_1, metadata=(), skip=(), extra=()):
    """A one-layer llama with its tokenizer; `metadata` overrides fields, `skip` leaves tensors out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 39 + [3])
    writer.add_token_merges(["a b", "\u0120 ab"])
    writer.add_eos_token_id(39)
    for add, *fields in metadata:
        writer.kv_data[0].pop(fields[0], None)
        getattr(writer, add)(*fields)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,),
              "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN), "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
              "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (WIDTH, HIDDEN), "blk.0.ffn_up": (WIDTH, HIDDEN),
              "blk.0.ffn_down": (HIDDEN, WIDTH)}
    for name, shape in {**shapes, **dict(extra)}.items():
        if name not in skip:
            values = draw.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                writer.add_tensor(f"{name}.weight", values)
            else:
                writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def header_size(path):
    return min(info.start for info in GGUFFile(path).tensors.values())


# --- what is read ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
def test_every_type_equals_the_reference_bit_for_bit(kind, tmp_path):
    path = write(tmp_path / "tiny.gguf", kind=kind)
    file = GGUFFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        got = file.load(tensor.name)
        assert torch.equal(got.float(), expected) and got.shape == expected.shape, tensor.name


def test_smollm2_equals_the_reference():
    path = resolve_model("smollm2")
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    for tensor in random.Random(1).sample(reference.tensors, 12):
        expected = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        assert torch.equal(file.load(tensor.name), expected), tensor.name
    for name, field in reference.fields.items():
        if not name.startswith("GGUF.") and name != "llama.attention.layer_norm_rms_epsilon":
            assert file.metadata[name] == field.contents(), name
    assert set(file.tensors) == {tensor.name for tensor in reference.tensors}


def test_q4_0_and_q4_1_by_hand():
    """d = 2 (and m = 1): byte 0 holds weight 0 = 5 in its low nibble and weight 16 = 15 in its high one."""
    from minengine.model.gguf import dequantize

    codes = bytes([0xF5]) + bytes(15)
    q4_0 = dequantize("Q4_0", torch.frombuffer(bytearray(struct.pack("<e", 2.0) + codes), dtype=torch.uint8))
    q4_1 = dequantize("Q4_1", torch.frombuffer(bytearray(struct.pack("<ee", 2.0, 1.0) + codes), dtype=torch.uint8))
    assert q4_0[[0, 1, 16, 17]].tolist() == [(5 - 8) * 2, -16, (15 - 8) * 2, -16]
    assert q4_1[[0, 1, 16, 17]].tolist() == [5 * 2 + 1, 1, 15 * 2 + 1, 1]


def test_metadata_of_every_type(tmp_path):
    fields = [("add_uint8", 200), ("add_int8", -3), ("add_uint16", 60000), ("add_int16", -300), ("add_uint32", 2**31), ("add_int32", -2**31),
              ("add_float32", 0.5), ("add_bool", True), ("add_uint64", 2**63), ("add_int64", -2**62), ("add_float64", 0.1), ("add_string", "\u00e9"),
              ("add_array", [1, -2, 3]), ("add_array", ["a", "", "\u65e5"]), ("add_array", [0.5, 2.0]), ("add_array", [True, False])]
    path = write(tmp_path / "tiny.gguf", metadata=[(add, f"x.{n}", value) for n, (add, value) in enumerate(fields)])
    metadata = GGUFFile(path).metadata
    assert [metadata[f"x.{n}"] for n in range(len(fields))] == [value for _, value in fields]


def test_config_and_decoder(path):
    config = gguf_config(GGUFFile(path))
    assert config == LlamaConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=8, intermediate_size=WIDTH, rms_norm_eps=config.rms_norm_eps, rope_theta=5000.0,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(39,))
    assert config.rms_norm_eps == pytest.approx(1e-5)
    decoder = load_model(path)
    assert decoder.embedding.shape == (VOCAB, HIDDEN) and len(decoder.layers) == 1


def test_a_head_of_its_own_and_a_second_end(tmp_path):
    path = write(tmp_path / "tiny.gguf", extra=[("output", (VOCAB, HIDDEN))], metadata=[("add_eot_token_id", 1)])
    config = gguf_config(GGUFFile(path))
    assert not config.tie_word_embeddings and config.eos_token_ids == (39, 1)
    load_model(path)


def test_tensors_outlive_the_file(path):
    """A loaded tensor shares no memory with the map, which would keep the whole file resident."""
    file = GGUFFile(path)
    raw, loaded = file.raw("output_norm.weight"), file.load("output_norm.weight")
    before = loaded.clone()
    raw.zero_()
    assert torch.equal(loaded, before)
    assert torch.equal(GGUFFile(path).load("output_norm.weight"), before)  # and the file itself is never written


# --- what is refused ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes, words", [
    (dict(metadata=[("add_string", "general.architecture", "qwen2")]), "architecture 'qwen2' is not supported; use"),
    (dict(metadata=[("add_string", "llama.rope.scaling.type", "yarn")]), "llama.rope.scaling.type 'yarn' is not supported; use"),
    (dict(metadata=[("add_uint32", "llama.attention.head_count", 0)]), "'llama.attention.head_count' is 0"),
    (dict(metadata=[("add_string", "llama.block_count", "many")]), "'llama.block_count' is 'many'"),
    (dict(metadata=[("add_bool", "llama.block_count", True)]), "'llama.block_count' is True"),
    (dict(metadata=[("add_uint32", "llama.attention.head_count_kv", 3)]), "4 heads over 3 KV heads"),
    (dict(metadata=[("add_uint32", "llama.rope.dimension_count", 4)]), r"width 8 \(RoPE 4"),
    (dict(metadata=[("add_uint32", "llama.block_count", 2)]), "tensor 'model.layers.1.input_layernorm.weight' is missing"),
    (dict(metadata=[("add_uint32", "llama.embedding_length", 64)]), r"has shape \(40, 32\), its config implies \(40, 64\)"),
    (dict(skip=["token_embd"]), "'token_embd.weight' is missing"),
    (dict(skip=["blk.0.ffn_up"]), "tensor 'model.layers.0.mlp.up_proj.weight' is missing"),
    (dict(extra=[("rope_freqs", (4,))]), "tensor 'rope_freqs.weight' .* is not part of LlamaForCausalLM"),
])
def test_models_that_cannot_run_are_one_sentence(changes, words, tmp_path):
    path = write(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_type_that_is_not_read(tmp_path, path):
    with pytest.raises(ConfigError, match="has type Q5_0, which is not supported; use a file of types F32"):
        GGUFFile(write(tmp_path / "tiny.gguf", kind=Kind.Q5_0))


@pytest.mark.parametrize("data, words", [
    (b"", "cannot be read"), (b"GGML" + bytes(40), "not a GGUF file"), (b"GG", "truncated"), (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "truncated"), (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "truncated"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated"),
    (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "truncated"),
    (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "truncated"),
    (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "corrupt: an array of metadata type 9"),
    (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "corrupt: metadata type 77"),
    (b"GGUF" + struct.pack("<IQQQ2s", 3, 0, 1, 2, b"\xff\xff"), "corrupt: the text before byte 34 is not UTF-8"),
    (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "corrupt: tensor 't' has 9 dimensions"),
    (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), r"dimensions \(0,\)"),
    (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), r"dimensions \(33,\), which Q4_0 cannot store"),
    (b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 2, 2**62, 2**62, 0, 0), "truncated: tensor 't'"),
    (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 1, 0, 5) + bytes(64), "corrupt: tensor 't' is listed twice or at an odd offset"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 0) + bytes(64), "corrupt: tensor 't' is listed twice"),
    (b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 12), "corrupt: general.alignment is 12"),
])
def test_damaged_headers(data, words, tmp_path):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        GGUFFile(tmp_path / "x.gguf")
    assert "download it again" in str(caught.value) or "use" in str(caught.value)


def test_truncated_anywhere(path, tmp_path):
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    head = header_size(path)
    ends = sorted({*range(0, head, 7), *random.Random(0).sample(range(head, len(data)), 60), len(data) - 1})
    for end in ends:
        cut.write_bytes(data[:end])
        with pytest.raises(ConfigError) as caught:
            GGUFFile(cut)
        assert "download it again" in str(caught.value), end


@pytest.mark.parametrize("seed", range(4))
def test_corrupt_anywhere_loads_or_is_a_config_error(seed, path, tmp_path):
    """Bytes and whole words of the header replaced: whatever the file then says, no other exception."""
    data, damaged, draw = path.read_bytes(), tmp_path / "damaged.gguf", random.Random(seed)
    head, refused = header_size(path), 0
    for _ in range(250):
        mutant = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 4))):
            at = draw.randrange(head - 8)
            if draw.random() < 0.5:
                mutant[at] = draw.randrange(256)
            else:
                mutant[at: at + 8] = struct.pack("<Q", draw.choice((0, 1, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        damaged.write_bytes(mutant)
        for load in (load_model, load_tokenizer):
            try:
                load(damaged)
            except ConfigError:
                refused += 1
    assert refused > 100


def test_source_names_what_is_missing(path):
    source = GGUFSource(GGUFFile(path))
    assert "model.embed_tokens.weight" in source and "lm_head.weight" not in source
    with pytest.raises(ConfigError, match="tiny.gguf: tensor 'lm_head.weight' is missing"):
        source.take("lm_head.weight")
    config = gguf_config(GGUFFile(path))
    Decoder(config, source)
    assert source.left() == []
