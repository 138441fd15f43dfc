"""A decoder: embedding, layers of attention and MLP around one residual stream, final norm, head."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError, GlmConfig, LlamaConfig, ModelConfig
from ..kv.cache import KVCache
from .batch import Batch
from .linear import Linear
from .mlp import DenseMLP
from .rope import inverse_frequencies, rotations
from .weights import WeightSource, open_model

__all__ = ["Decoder", "load_model"]


def load_model(name_or_path: str | Path, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """Load a model by known name, directory or GGUF file.

    Raises:
        ConfigError: unknown name, unsupported architecture or dtype, missing or truncated file.
    """
    config, weights = open_model(name_or_path, dtype, device)
    return Decoder(config, weights)


class DecoderLayer:
    """Pre-norm residual layer: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightSource) -> None:
        prefix = f"model.layers.{layer}"
        self.width, self.eps = (config.hidden_size,), config.rms_norm_eps
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", self.width)
        self.post_attention_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", self.width)
        self.attention = _attention(config, layer, weights)
        self.mlp = _mlp(config, layer, weights)

    def __call__(self, x: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """x: (T, hidden), overwritten; cis: (T, 1, rope/2)."""
        x = self.attention(F.rms_norm(x, self.width, self.input_norm, self.eps), cis, batch, kv, x)
        return self.mlp(F.rms_norm(x, self.width, self.post_attention_norm, self.eps), x)


def _attention(config: ModelConfig, layer: int, weights: WeightSource):
    # Imported here: a Llama engine need not load the latent attention, nor the other way round.
    if isinstance(config, GlmConfig):
        from .mla import LatentAttention

        return LatentAttention(config, layer, weights)
    from .gqa import GroupedAttention

    return GroupedAttention(config, layer, weights)


def _mlp(config: ModelConfig, layer: int, weights: WeightSource):
    prefix = f"model.layers.{layer}.mlp"
    if isinstance(config, GlmConfig) and config.mlp_layer_types[layer] == "sparse":
        from .moe import MoE

        return MoE(config, prefix, weights)
    return DenseMLP(prefix, weights)


class Decoder:
    """The model; every method expects `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        self.config = config
        self.dtype, self.device = weights.dtype, weights.device
        table = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", table)
        self.layers = [DecoderLayer(config, layer, weights) for layer in range(config.num_hidden_layers)]
        self.norm = weights.take("model.norm.weight", (config.hidden_size,))
        self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.take("lm_head.weight", table))
        self.inv_freq = inverse_frequencies(config.rope_theta, rope_dim(config), weights.device)
        _refuse_unused(config, weights)

    def forward(self, batch: Batch, kv: KVCache, on_layer: Callable[[int, Batch], None] | None = None) -> Tensor:
        """Run a step's tokens through all layers, writing their KV rows: (T, hidden), before the final norm. `on_layer` is called after
        each one."""
        x = F.embedding(batch.input_ids, self.embedding)  # (T, hidden), a fresh tensor: the layers add to it in place
        cis = rotations(batch.positions, self.inv_freq)  # (T, 1, rope/2)
        for i, layer in enumerate(self.layers):
            x = layer(x, cis, batch, kv)
            if on_layer is not None:
                on_layer(i, batch)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the rows asked for: (S, hidden) -> (S, vocab)."""
        return self.lm_head(F.rms_norm(hidden, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps))


def rope_dim(config: ModelConfig) -> int:
    """Values of a head that RoPE rotates."""
    if isinstance(config, LlamaConfig):
        return config.head_dim
    return config.qk_rope_head_dim


def _refuse_unused(config: ModelConfig, weights: WeightSource) -> None:
    """Layers past the config's are heads for drafting, a tied head is stored twice, old checkpoints keep RoPE's frequencies; the rest matters."""
    def harmless(name: str) -> bool:
        parts = name.split(".")
        beyond = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= config.num_hidden_layers
        return beyond or name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)

    unused = [name for name in weights.left() if not harmless(name)]
    if unused:
        raise ConfigError(f"{weights.origin}: tensor '{unused[0]}' (and {len(unused) - 1} more) is not part of {config.architecture} as this engine "
                          "runs it; use a model without it")
