"""Tiny random models on disk, made once a test run by Hugging Face transformers: the engine loads what users would."""
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import torch

GLM = dict(
    vocab_size=211, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, routed_scaling_factor=1.5, index_topk=24, index_n_heads=8, index_head_dim=16,
    max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    indexer_types=["full", "full", "shared", "full", "shared"], mlp_layer_types=["dense"] + ["sparse"] * 4, eos_token_id=None, bos_token_id=None, pad_token_id=0,
)
LLAMA = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
             max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=True, eos_token_id=None,
             bos_token_id=None)


@lru_cache
def tiny_llama() -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**LLAMA), seed=1)


@lru_cache
def tiny_glm() -> Path:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    return _save(GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**GLM), seed=2)


def _save(model_class, config, seed: int) -> Path:
    """Random weights, large enough that the best token depends on the whole context and rarely ties."""
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 1.5 * p.shape[-1] ** -0.5)
            elif "norm" in name:
                p.uniform_(0.7, 1.3)
        for name, b in model.named_buffers():
            if "correction_bias" in name:
                b.normal_(0, 0.1)
    folder = Path(mkdtemp(prefix=f"minengine-{config.model_type}-"))
    model.save_pretrained(folder)
    return folder
