"""Tiny GLM models, prompts for them, Hugging Face's logits, and requests that run on the engine's decoder batch by batch.

Prompts are drawn until no top-k has a near-tie at its cut-off: two right implementations may decide one differently, and
all that follows then differs.
"""
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from minengine.model.decoder import load_model
from minkernels import indexer as indexing
from model_harness import Requests as AnyRequests

GLM = dict(
    vocab_size=211, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, routed_scaling_factor=1.5, index_topk=24, index_n_heads=8, index_head_dim=16,
    max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    indexer_types=["full", "full", "shared", "full", "shared"], mlp_layer_types=["dense"] + ["sparse"] * 4, eos_token_id=None, bos_token_id=None,
)
TOLERANCE = 1e-4  # of the logits' standard deviation
NEAR_TIE = 5e-6  # two scores this close, relative to the larger, may change places with the order of summation
LENGTHS = {"long": 150, "middle": 97, "short": 31, "tiny": 2}  # tokens
PROMPTS = {"long": 120, "middle": 60, "short": 9, "tiny": 1}  # of which this many are prefilled

VARIANTS = {
    "shared": {},
    # Every width differs from every other; eps and the groups differ from their defaults.
    "grouped": dict(num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=48, q_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=12,
                    v_head_dim=20, index_n_heads=9, index_head_dim=14, index_topk=17, n_group=4, topk_group=2, norm_topk_prob=False,
                    rms_norm_eps=1e-2, n_shared_experts=2, indexer_types=["full", "shared", "shared", "full", "full"],
                    mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"]),
    "dense": dict(index_topk=512),
    "without experts": dict(index_topk=512, mlp_layer_types=["dense"] * 5),  # nothing jumps: small errors stay small
}


_folders = []  # deleted when Python ends


@lru_cache
def directory(variant="shared"):
    """A model saved by Hugging Face, with weights large enough that logits depend on the whole context, and none at its neutral value."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(5)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**GLM, **VARIANTS[variant]}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() > 1:
                tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5)
            elif "norm" in name:
                tensor.uniform_(0.7, 1.3)  # the indexer's norm has a bias, too
            elif "correction_bias" in name:
                tensor.normal_(0, 0.1)
    folder = TemporaryDirectory(prefix="minengine-glm-")
    _folders.append(folder)
    model.save_pretrained(folder.name)
    return Path(folder.name)


def load(variant, dtype=torch.float32):
    """A decoder of its own, for a test to break."""
    return load_model(directory(variant), dtype)


@lru_cache
def prompts(variant):
    """{name: (n,) token ids} whose choices have no near-tie."""
    decoder, smallest = load(variant), []

    def watched(scores, k, choose=indexing.best_positions):
        if k < scores.shape[-1]:
            best = scores.topk(k + 1, dim=-1).values  # (Q, K + 1)
            gaps = (best[:, k - 1] - best[:, k]) / best.abs().amax(-1)
            smallest.append(gaps[best[:, k] > float("-inf")].min().item())  # rows that see K or fewer have no cut-off
        return choose(scores, k)

    generator, found = torch.Generator().manual_seed(11), {}
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(indexing, "best_positions", watched)
        for name, length in LENGTHS.items():
            for _ in range(50):
                ids = torch.randint(0, GLM["vocab_size"], (length,), generator=generator)
                smallest.clear()
                Requests(decoder, {name: ids}).step({name: length})
                if not smallest or min(smallest) > NEAR_TIE:
                    found[name] = ids
                    break
    assert len(found) == len(LENGTHS)
    return found


@lru_cache
def oracle(variant):
    """Hugging Face's logits of the prompts, each in one pass without a cache: {name: (n, vocab)}."""
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(directory(variant), dtype=torch.float32).eval()
    with torch.inference_mode():
        return {name: model(ids[None]).logits[0] for name, ids in prompts(variant).items()}


class Requests(AnyRequests):
    """Requests whose first `PROMPTS[name]` tokens are the prompt."""

    def run(self, seed=0):
        return super().run(PROMPTS, seed)


def error(got, variant):
    """Largest difference from the oracle, in standard deviations of its logits; names may be a part of the oracle's."""
    expected = oracle(variant)
    return max(((got[name] - expected[name]).abs().max() / expected[name].std()).item() for name in got)


def distance(got, expected):
    """Root mean square of the difference over that of the expected logits, all requests together."""
    difference = torch.cat([(got[name] - expected[name]).flatten() for name in got])
    return (difference.square().mean().sqrt() / torch.cat([t.flatten() for t in expected.values()]).std()).item()
