"""Every topology computes what one rank computes: all logits of requests of all lengths, prefilled in chunks and decoded."""
from functools import lru_cache

import pytest
import torch
from model_harness import Requests, worst
from ranks import logits_with, run
from tiny_directories import write_tiny

from minengine.arithmetic import rank_weights, topology
from minengine.model.decoder import load_model
from minengine.model.weights import open_model
from minengine.parallel.ranks import Ranks
from minengine.parallel.shard import ShardedSource

SCALE = 1e-4  # of the largest logit
ROUNDED = 5e-3  # with packed rows: what differs in its last bit may be rounded to a neighbour
LENGTHS = {"long": 150, "middle": 97, "short": 31, "tiny": 3, "one": 1}
PROMPTS = {"long": 142, "middle": 87, "short": 24, "tiny": 2, "one": 1}
# 7 experts go to 2 and 4 ranks unevenly, 211 tokens of a vocabulary too.
MODELS = {"tiny": dict(n_routed_experts=7), "dense": dict(index_topk=512, n_routed_experts=5)}
TOPOLOGIES = ["TP2", "TP4", "TEP2", "TEP4", "DEP2", "DEP4", "TP2+DCP2", "TP4+DCP2", "TP4+DCP4", "TEP4+DCP2"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"glm-mini": "glm-mini", "llama": write_tiny(folder / "llama", "llama", num_attention_heads=8, num_key_value_heads=4),
            **{name: write_tiny(folder / name, "glm", **changes) for name, changes in MODELS.items()}}


@lru_cache
def token_ids(vocab):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randint(0, vocab, (length,), generator=generator) for name, length in LENGTHS.items()}


@lru_cache
def alone(directory, **options):
    """One rank's logits: {name: (n, vocab)}."""
    decoder = load_model(directory)
    return Requests(decoder, token_ids(decoder.config.vocab_size), **options).run(PROMPTS)


def check(name, directory, scale=SCALE, **options):
    expected = alone(directory, **options)
    parts = run(logits_with, name, directory, token_ids(expected["one"].shape[-1]), PROMPTS, options)
    if name.startswith("DEP"):
        got = {request: part for rank in parts for request, part in rank.items()}
        assert got.keys() == expected.keys()
        assert worst(got, expected) <= scale
    else:
        for got in parts:
            assert got.keys() == expected.keys()
            assert worst(got, expected) <= scale


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_logits_are_one_ranks(name, directories):
    check(name, directories["tiny"])


@pytest.mark.parametrize("name", ["TP2", "TEP4", "DEP4", "TP4+DCP2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("TP4", "TEP2", "DEP2", "TP2+DCP2"))])
def test_logits_of_the_model_that_is_shipped(name, directories):
    check(name, directories["glm-mini"])


@pytest.mark.parametrize("name, options, scale", [
    ("TP4+DCP2", dict(block_size=32, layout="BLHNC"), SCALE), ("TP2+DCP2", dict(kv_cache_dtype="fp8"), ROUNDED),
    ("TP2", dict(kv_cache_dtype="nvfp4_fp8_ds_mla"), ROUNDED),
])
def test_any_row_and_layout(name, options, scale, directories):
    check(name, directories["dense"], scale, **options)


@pytest.mark.parametrize("name", ["TP4", "TEP4", "DEP4"])
def test_a_rank_reads_no_more_than_its_part(name, directories, monkeypatch):
    """From safetensors: what is split is never read whole, and other ranks' experts not at all."""
    config, source = open_model(directories["tiny"])
    whole, load = [], source.load
    monkeypatch.setattr(source, "load", lambda tensor: whole.append(tensor) or load(tensor))
    for rank in range(4):
        here = ShardedSource(source, Ranks(topology(name), rank), config.n_routed_experts)
        assert sum(here.take(tensor).nbytes for tensor in here.names()) == sum(rank_weights(config, name, rank).values())
        assert not here.left()
    split = ("q_b_proj", "kv_b_proj", "o_proj", "embed_tokens", "lm_head", "gate_proj", "up_proj", "down_proj")
    if name != "DEP4":
        assert not [tensor for tensor in whole if tensor.split(".")[-2] in split and not (name == "TEP4" and ".experts." in tensor)]


@pytest.mark.parametrize("name", ["TP2", "TP4"])
def test_grouped_heads_split_too(name, directories):
    check(name, directories["llama"])
