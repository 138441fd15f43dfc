"""Reading a model's config: Hugging Face's names and defaults, and one sentence for what cannot be run."""
import pytest

from minengine.config import ConfigError, model_config
from minengine.engine_args import EngineArgs
from tiny_models import GLM, LLAMA


def glm(**fields):
    return model_config({**{k: v for k, v in GLM.items() if k != "indexer_types"}, **fields})


def test_kinds_of_layers_may_be_listed_spelled_or_ruled():
    assert glm(indexer_types=["full", "shared", "shared", "full", "shared"]).indexer_types == ("full", "shared", "shared", "full", "shared")
    assert glm(index_topk_pattern="FSSFS").indexer_types == ("full", "shared", "shared", "full", "shared")
    assert glm(index_topk_freq=4, index_skip_topk_offset=3).indexer_types == ("full", "full", "full", "shared", "shared")
    assert glm().indexer_types == ("full",) * 5, "Hugging Face's default is an indexer in every layer"
    for wrong in (["full"] * 4, ["full"] * 4 + ["sometimes"]):
        with pytest.raises(ConfigError, match="indexer_types"):
            glm(indexer_types=wrong)


def test_the_defaults_are_hugging_faces():
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers: pip install 'minengine[test]'")
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=9)
    ours = model_config({**theirs.to_dict(), "architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": None, "mlp_layer_types": None})
    assert list(ours.indexer_types) == theirs.indexer_types and list(ours.mlp_layer_types) == theirs.mlp_layer_types
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_what_cannot_run_is_named():
    for fields, why in (({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"), ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
                        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"), ({"hidden_size": None}, "'hidden_size' is missing"),
                        ({"num_hidden_layers": "2"}, "'num_hidden_layers' is '2'"), ({"num_key_value_heads": 4}, "must divide"), ({"rope_theta": "x"}, "rope_theta")):
        with pytest.raises(ConfigError, match=why):
            model_config({**LLAMA, **fields})


@pytest.mark.parametrize("wrong, words", [
    ({"tier_path": 5}, "tier_path=5: use the path"), ({"tier_path": "a\0b", "disk_tier_bytes": 1}, "tier_path=.*use the path"),
    ({"tier_path": "folder"}, "tier_path='folder': is for tiers, and none has a size"), ({"host_tier_bytes": -1}, "host_tier_bytes=-1"),
])
def test_options_of_tiers_that_cannot_be_are_named(wrong, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**wrong)


@pytest.mark.parametrize("wrong, words", [
    ({"enforce_eager": "yes"}, "enforce_eager='yes': use True or False"), ({"enable_prefix_caching": 1}, "enable_prefix_caching=1: use True or False"),
    ({"device": 3}, "device=3: use a string"), ({"kv_lease_s": True}, "kv_lease_s=True: use a positive number"), ({"max_num_seqs": "8"}, "max_num_seqs='8': use a whole"),
    ({"model": None}, "model=None: use a string"), ({"topology": 2}, "topology=2: use a name"),
])
def test_options_of_another_type_are_named(wrong, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**wrong)
