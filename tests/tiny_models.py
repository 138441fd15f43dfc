"""Tiny models with random weights, in memory: no library, no file, the same numbers on every machine."""
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from minengine.config import ModelConfig, model_config
from minengine.model.decoder import Decoder
from minengine.model.weights import WeightSource

LLAMA = dict(
    architectures=["LlamaForCausalLM"], vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=5000.0, tie_word_embeddings=True,
)
GLM = dict(
    architectures=["GlmMoeDsaForCausalLM"], vocab_size=211, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=5,
    num_attention_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=2, routed_scaling_factor=1.5, index_topk=24, index_n_heads=8, index_head_dim=16,
    max_position_embeddings=512, rope_theta=1000.0, indexer_types=["full", "full", "shared", "full", "shared"],
    mlp_layer_types=["dense"] + ["sparse"] * 4,
)


class RandomWeights(WeightSource):
    """Any tensor that a decoder asks for, drawn from a seed that is its name: large enough that the best token
    depends on the whole context and rarely ties."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(Path("random"), dtype, torch.device(device))
        self.config = config

    def __contains__(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if shape is None:  # a gate projection: the MLP takes its width from the file
            width = self.config.moe_intermediate_size if "shared_experts" in name else self.config.intermediate_size
            shape = (width, self.config.hidden_size)
        draw = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        if "norm" in name and name.endswith("weight"):
            tensor = 1 + 0.2 * draw
        elif len(shape) == 1:
            tensor = 0.1 * draw
        else:
            tensor = 1.5 * shape[-1] ** -0.5 * draw
        return tensor.to(self.device, dtype or self.dtype)

    def names(self) -> list[str]:
        return []  # none but those asked for

    def load(self, name: str) -> Tensor:
        return self.take(name)


@lru_cache
def tiny_model(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    config = model_config({"llama": LLAMA, "glm": GLM}[kind])
    return Decoder(config, RandomWeights(config, dtype, device))
