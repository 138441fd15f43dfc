"""What one rank holds and sends: closed formulas, checked against sums over the ranks and numbers worked out by hand; and the options that name a topology."""
import subprocess
import sys

import pytest
from tiny_models import GLM, LLAMA

from minengine.arithmetic import Sent, bytes_per_token, check_sharding, kv_copies, mean_visits, rank_kv_bytes, rank_share, rank_weights, row_bytes, sent_bytes, step_sent, topology
from minengine.config import ConfigError, model_config
from minengine.engine_args import EngineArgs

# GLM-5.3, as its config.json has it.
BIG = model_config(dict(
    architectures=["GlmMoeDsaForCausalLM"], vocab_size=154880, hidden_size=6144, intermediate_size=12288, moe_intermediate_size=2048, num_hidden_layers=78,
    num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, index_topk=2048, index_n_heads=32, index_head_dim=128, index_topk_freq=4, index_skip_topk_offset=3,
    first_k_dense_replace=3, max_position_embeddings=1 << 20))
TINY, LLAMA = model_config(GLM), model_config(LLAMA)


def total(config, name, rank, **options):
    return sum(rank_weights(config, name, rank, **options).values())


def test_shares_are_in_order_and_differ_by_one_at_most():
    for things in (0, 1, 7, 8, 257):
        for ranks in (1, 2, 3, 8):
            parts = [rank_share(things, ranks, rank) for rank in range(ranks)]
            assert [i for part in parts for i in part] == list(range(things))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1 and sorted(map(len, parts), reverse=True) == list(map(len, parts))


def test_topologies_say_where_experts_are():
    assert [topology(name).experts for name in ("TP4", "TEP8", "DEP2", "TP8+DCP4", "TEP4+DCP2")] == [1, 8, 2, 1, 4]


def test_weights_of_the_ranks_are_the_model_and_what_they_repeat():
    """Tables, heads and MLPs are split; what is left over is repeated, and that is the same on every rank."""
    one = rank_weights(BIG, "TP1", 0, "bfloat16")
    assert sum(one.values()) / 2 == pytest.approx(744e9, rel=2e-3)  # parameters, as its card says
    for name in ("TP8", "TEP8"):
        ranks = [rank_weights(BIG, name, rank, "bfloat16") for rank in range(8)]
        for part in ("vocabulary", "mlp", "shared experts", "experts"):
            assert sum(rank[part] for rank in ranks) == one[part], part
        assert all(rank["routers"] == one["routers"] and rank["indexers"] == one["indexers"] for rank in ranks)
    dep = [rank_weights(BIG, "DEP8", rank, "bfloat16") for rank in range(8)]
    assert sum(rank["experts"] for rank in dep) == one["experts"]
    assert all(rank[part] == one[part] for rank in dep for part in one if part != "experts")
    # The source: 165 M parameters of MLA a layer; 13 GB a DEP rank at one byte, an eighth of all but the down-projections under TP8.
    assert one["attention"] / 2 / 78 == pytest.approx(165.0e6, rel=1e-3)
    assert total(BIG, "TP8", 0, dtype="bfloat16") < total(BIG, "DEP8", 0, dtype="bfloat16") < 1.2 * total(BIG, "TP8", 0, dtype="bfloat16")


def test_experts_that_do_not_divide():
    seven = model_config({**GLM, "n_routed_experts": 7})
    held = [rank_weights(seven, "DEP4", rank)["experts"] for rank in range(4)]
    of_one = 4 * 3 * 64 * 32 * 4  # layers x matrices x hidden x width x bytes
    assert held == [2 * of_one, 2 * of_one, 2 * of_one, of_one]


def test_caches_are_as_many_as_the_copies_say():
    whole = rank_kv_bytes(BIG, "TP1", "fp8", 100, 64)
    assert whole == 100 * 64 * bytes_per_token(row_bytes("fp8").total, 78, 1, 132, 21)
    for name in ("TP4", "TP8", "TP8+DCP4", "TP4+DCP2", "TEP8"):
        assert rank_kv_bytes(BIG, name, "fp8", 100, 64) * topology(name).gpus == whole * kv_copies(name)
    assert rank_kv_bytes(BIG, "DEP8", "fp8", 100, 64) == whole * kv_copies("DEP8")  # of the rank's own requests
    assert rank_kv_bytes(LLAMA, "TP2", "float32", 10, 16) * 2 == rank_kv_bytes(LLAMA, "TP1", "float32", 10, 16)


def test_bytes_of_collectives():
    assert sent_bytes("all_reduce", 1000, 1) == sent_bytes("all_gather", 1000, 1) == 0
    assert sent_bytes("all_reduce", 1000, 2) == 1000 and sent_bytes("all_reduce", 1000, 4) == 1500 and sent_bytes("all_reduce", 1000, 3) == 4 * 334
    assert sent_bytes("all_gather", 1000, 4) == 3000 and sent_bytes("all_to_all", 1000, 4) == 1000


def test_what_a_step_sends():
    """Two ranks, one decode, by hand: hidden 64, five layers of which four are sparse, float32."""
    row = 64 * 4
    assert step_sent(TINY, "TP2", 0, tokens=1, logits=1) == {
        "vocab.embed": Sent(1, row), "attention.out": Sent(5, 5 * row), "mlp.out": Sent(1, row), "moe.out": Sent(4, 4 * row), "vocab.logits": Sent(1, 106 * 4)}
    assert "vocab.logits" not in step_sent(TINY, "TP2", 0, tokens=20, logits=0)
    assert step_sent(TINY, "TEP2", 0, tokens=3, logits=1) == step_sent(TINY, "TP2", 0, tokens=3, logits=1)
    assert step_sent(TINY, "TP1", 0, tokens=3, logits=1) == {}
    split = step_sent(TINY, "TP2+DCP2", 1, tokens=3, logits=1, choices=[3])
    assert split["dcp.query"] == Sent(5, 5 * 3 * 2 * (32 + 8) * 4) and split["dcp.merge"] == Sent(5, 5 * 3 * 2 * 33 * 4)
    assert split["dcp.choice"] == Sent(3, 3 * 3 * 24 * 8)
    assert step_sent(TINY, "DEP2", 0, tokens=0, logits=0, visits_in=5) == {
        "moe.sizes": Sent(4, 4 * 4 * 8), "moe.dispatch": Sent(4, 0), "moe.combine": Sent(4, 5 * row)}
    assert mean_visits(TINY, "DEP2", 0, 10) == 4 * 10 * 2 / 2
    assert mean_visits(BIG, "DEP8", 0, 1) == 75 * 8 * 7 / 8


@pytest.mark.parametrize("config, name, words", [
    (TINY, "TP3", "num_attention_heads=4.*3 ranks; use TP2, TP4"), (LLAMA, "TP4", "num_attention_heads=6"), (LLAMA, "DEP2", "no experts to spread; use TP2"),
    (LLAMA, "TP2+DCP2", "use TP2"), (TINY, "DEP16", "n_routed_experts=8"),
    (model_config({**GLM, "moe_intermediate_size": 30}), "TP4", "moe_intermediate_size"),
])
def test_models_that_cannot_be_split_so(config, name, words):
    with pytest.raises(ConfigError, match=f"topology='{name.replace('+', '.')}'.*{words}"):
        check_sharding(config, name)


class TestOptions:
    def test_either_spelling_names_the_ranks(self):
        for name, fields in (("TP4", {"tensor_parallel_size": 4}), ("TEP2", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
                             ("DEP8", {"data_parallel_size": 8, "enable_expert_parallel": True}),
                             ("TP8+DCP4", {"tensor_parallel_size": 8, "decode_context_parallel_size": 4})):
            assert EngineArgs(topology=name).ranks == EngineArgs(**fields).ranks == EngineArgs(topology=name, **fields).ranks == topology(name)
        assert EngineArgs().ranks.gpus == EngineArgs(topology="TP1").ranks.gpus == EngineArgs(topology="DEP1").ranks.gpus == 1

    @pytest.mark.parametrize("wrong, words", [
        ({"topology": "PP2"}, "topology='PP2': use TP<n>"), ({"topology": 4}, "topology=4: use a name"), ({"topology": "TP4+DCP3"}, "DCP3 must divide"),
        ({"topology": "TP4", "tensor_parallel_size": 2}, "tensor_parallel_size=2: topology='TP4' says 4"),
        ({"topology": "TP4", "enable_expert_parallel": True}, "enable_expert_parallel=True: topology='TP4' says False"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"), ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2: beside"),
        ({"data_parallel_size": 2}, "use enable_expert_parallel=True"), ({"enable_expert_parallel": True}, "there is one rank"),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "must divide tensor_parallel_size, which is 4"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True, "decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"topology": "TP32+DCP32", "block_size": 16}, "cannot split block_size=16"), ({"topology": "TP2", "host_tier_bytes": 1}, "host_tier_bytes=1: tiers"),
    ])
    def test_contradictions_are_named(self, wrong, words):
        with pytest.raises(ConfigError, match=words):
            EngineArgs(**wrong)

    def test_an_engine_alone_is_one_rank(self):
        from minengine.engine import LLMEngine

        with pytest.raises(ConfigError, match="topology: an LLMEngine is one rank and TP2 has 2; use LLM"):
            LLMEngine(EngineArgs(topology="TP2"))

    def test_a_model_that_cannot_be_split_is_refused_before_a_process_is_started(self, monkeypatch):
        from minengine import LLM
        from minengine.parallel import group

        monkeypatch.setattr(group.subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))
        with pytest.raises(ConfigError, match="topology='TP3': num_attention_heads=8"):
            LLM("glm-mini", topology="TP3")


def test_the_formulas_need_no_torch():
    code = ("import sys, minengine.arithmetic as a, minengine.parallel.ranks as r; from minengine.engine_args import EngineArgs; "
            "r.Ranks(EngineArgs(topology='TP8').ranks, 3); print('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
