"""The mixture of experts against Hugging Face's module, against numbers worked out by hand, and its three ways against each other."""
import dataclasses

import pytest
import torch
from glm_requests import GLM, directory

from minengine.config import ConfigError
from minengine.model.moe import MoE, Router
from minengine.model.weights import SafetensorsSource, read_config

PREFIX = "model.layers.1.mlp"


def build(dtype=torch.float32, **changes):
    """The first mixture of the tiny model, in `dtype`, with some config fields changed."""
    config = dataclasses.replace(read_config(directory()), **changes)
    return config, MoE(config, PREFIX, SafetensorsSource(directory(), dtype))


def hugging_face(**changes):
    """Hugging Face's module with the same weights and the same fields changed."""
    from safetensors.torch import load_file
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

    module = GlmMoeDsaMoE(GlmMoeDsaConfig(**{**GLM, **changes}))
    stored = {name.removeprefix(PREFIX + "."): t for name, t in load_file(directory() / "model.safetensors").items() if name.startswith(PREFIX + ".")}
    state = {name: t for name, t in stored.items() if not name.startswith("experts.")}
    experts = range(GLM["n_routed_experts"])
    state["experts.gate_up_proj"] = torch.stack([torch.cat([stored[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in experts])
    state["experts.down_proj"] = torch.stack([stored[f"experts.{e}.down_proj.weight"] for e in experts])
    module.load_state_dict(state)
    return module.eval()


@pytest.mark.parametrize("changes", [
    {}, {"num_experts_per_tok": 5}, {"norm_topk_prob": False}, {"n_group": 4, "topk_group": 2},
    {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
], ids=str)
@torch.inference_mode()
def test_equals_hugging_face(changes):
    _, mine = build(**changes)
    theirs = hugging_face(**changes)
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 2, 37):
        x, residual = torch.randn(2, tokens, GLM["hidden_size"], generator=generator)
        expected = residual + theirs(x.unsqueeze(0)).squeeze(0)
        got = mine(x, residual)
        assert got is residual  # in place: the residual stream is never copied
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 2, 13, 64])
@torch.inference_mode()
def test_the_three_ways_agree(tokens):
    _, mine = build(torch.float64)
    x = torch.randn(tokens, GLM["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    weights, experts = mine.router(x)
    crowded = torch.stack((experts[:, 0], (experts[:, 0] + 1) % 2 + 2), dim=-1) % 4  # half of the experts get nobody
    crowded[:, 1] += (crowded[:, 0] == crowded[:, 1]).long()
    for chosen in (experts, crowded):
        by_hand = torch.zeros_like(x)
        for token in range(tokens):
            for weight, expert in zip(weights[token], chosen[token].tolist()):
                gate, up = (mine.gate_up[expert] @ x[token]).chunk(2)
                by_hand[token] += weight * (mine.down[expert].t() @ (gate * gate.sigmoid() * up))
        for way in (mine._grouped, mine._gathered, mine._all_experts):
            torch.testing.assert_close(way(x, weights.double(), chosen), by_hand, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tokens, num_experts_per_tok, way", [
    (1, 1, "_gathered"), (1, 2, "_gathered"), (2, 2, "_all_experts"), (256, 2, "_all_experts"), (257, 2, "_grouped"),
])
@torch.inference_mode()
def test_a_gpu_takes_the_way_without_sync_for_few_tokens(tokens, num_experts_per_tok, way, monkeypatch):
    _, mine = build(num_experts_per_tok=num_experts_per_tok)
    taken = []
    for name in ("_grouped", "_gathered", "_all_experts"):
        monkeypatch.setattr(mine, name, lambda x, *_, name=name: taken.append(name) or torch.zeros_like(x))
    x = torch.zeros(tokens, GLM["hidden_size"])
    mine(x, x.clone())
    assert taken == ["_grouped"]  # on a CPU the counts are at hand
    mine.avoids_sync = True
    mine(x, x.clone())
    assert taken == ["_grouped", way]


class Given:
    """A weight source of given tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def take(self, name, shape=None, dtype=None):
        assert tuple(self.tensors[name.split(".")[-1]].shape) == shape
        return self.tensors[name.split(".")[-1]].to(dtype)


def router(logits, bias, **changes):
    """A router that sees these logits for the one-hot token 0."""
    fields = dict(hidden_size=2, n_routed_experts=len(logits), num_experts_per_tok=2, routed_scaling_factor=2.5, norm_topk_prob=True)
    config = dataclasses.replace(read_config(directory()), **{**fields, **changes})
    weight = torch.stack((torch.tensor(logits), torch.zeros(len(logits))), dim=-1)  # (E, 2)
    return Router(config, "gate", Given(weight=weight, e_score_correction_bias=torch.tensor(bias)))


def routed(a_router):
    weights, experts = a_router(torch.tensor([[1.0, 0.0]]))
    return dict(zip(experts[0].tolist(), weights[0].tolist()))


def test_the_bias_decides_who_but_not_how_much():
    # sigmoid(ln 3) = .75, sigmoid(0) = .5, sigmoid(-ln 3) = .25; the bias lifts the last two over the first.
    ln3 = 1.0986122886681098
    assert routed(router([ln3, 0.0, -ln3], [0.0, 0.0, 0.0])) == pytest.approx({0: 2.5 * 0.75 / 1.25, 1: 2.5 * 0.5 / 1.25})
    assert routed(router([ln3, 0.0, -ln3], [-1.0, 0.0, 0.0])) == pytest.approx({1: 2.5 * 0.5 / 0.75, 2: 2.5 * 0.25 / 0.75})
    assert routed(router([ln3, 0.0, -ln3], [-1.0, 0.0, 0.0], norm_topk_prob=False)) == pytest.approx({1: 2.5 * 0.5, 2: 2.5 * 0.25})


def test_groups_are_judged_by_their_two_best():
    # Scores about (.95, .05), (.73, .73): the best expert is in the first group, the better pair in the second.
    limited = router([3.0, -3.0, 1.0, 1.0], [0.0] * 4, n_group=2, topk_group=1)
    assert sorted(routed(limited)) == [2, 3]
    assert 0 in routed(router([3.0, -3.0, 1.0, 1.0], [0.0] * 4))


def test_scores_that_vanish_give_no_nan():
    weights, _ = router([-200.0, -200.0, -200.0], [0.0] * 3)(torch.tensor([[1.0, 0.0]]))
    assert weights.tolist() == [[0.0, 0.0]]


def test_routing_is_float32_in_a_bfloat16_model():
    _, mine = build(torch.bfloat16)
    assert (mine.router.weight.dtype, mine.router.bias.dtype, mine.gate_up.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    x = torch.randn(9, GLM["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, experts = mine.router(x)
    wide_weights, wide_experts = build()[1].router(x.float())
    assert torch.equal(experts, wide_experts) and torch.equal(weights, wide_weights)
    expected = build()[1](x.float(), torch.zeros(x.shape))
    assert (mine(x, torch.zeros_like(x)).float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("changes", [
    {"num_experts_per_tok": 9}, {"num_experts_per_tok": 5, "n_group": 2, "topk_group": 1}, {"n_group": 3}, {"n_group": 8, "topk_group": 8},
    {"num_experts_per_tok": 0},
], ids=str)
def test_an_impossible_choice_is_refused(changes):
    with pytest.raises(ConfigError, match="num_experts_per_tok=.* cannot be chosen from topk_group=.*correct config.json"):
        build(**changes)


def test_weights_that_do_not_fit_the_config_are_named():
    with pytest.raises(ConfigError, match=r"mlp\.gate\.weight.* shape \(8, 64\).*\(9, 64\)"):
        build(n_routed_experts=9)
