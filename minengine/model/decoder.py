"""A decoder: embedding, layers of attention and MLP around one residual stream, final norm, head."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from ..parallel.comm import Parallel

__all__ = ["Decoder", "load_model"]


def load_model(name_or_path: str | Path, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu",
               parallel: Parallel | None = None) -> Decoder:
    """Load a model by known name, directory or GGUF file; with `parallel`, what one rank of a group has of it.

    Raises:
        ConfigError: unknown name, unsupported architecture or dtype, missing or truncated file.
    """
    config, weights = open_model(name_or_path, dtype, device)
    if parallel is not None:
        from ..parallel.shard import ShardedSource

        weights = ShardedSource(weights, parallel.ranks, config.n_routed_experts if isinstance(config, GlmConfig) else 0)
    return Decoder(config, weights, parallel)


class DecoderLayer:
    """Pre-norm residual layer: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightSource, parallel: Parallel | None = None) -> None:
        prefix = f"model.layers.{layer}"
        self.width, self.eps = (config.hidden_size,), config.rms_norm_eps
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", self.width)
        self.post_attention_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", self.width)
        self.attention = _attention(config, layer, weights, parallel)
        self.mlp = _mlp(config, layer, weights, parallel)

    def __call__(self, x: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        """x: (T, hidden), overwritten; cis: (T, 1, rope/2)."""
        x = self.attention(F.rms_norm(x, self.width, self.input_norm, self.eps), cis, batch, kv, x)
        return self.mlp(F.rms_norm(x, self.width, self.post_attention_norm, self.eps), x)


def _attention(config: ModelConfig, layer: int, weights: WeightSource, parallel: Parallel | None):
    reduce = _reduce(parallel, "attention.out")
    # Imported here: a Llama engine need not load the latent attention, nor the other way round.
    if isinstance(config, GlmConfig):
        if parallel is not None and parallel.ranks.dcp_size > 1:
            from ..parallel.context import ContextAttention

            return ContextAttention(config, layer, weights, reduce, parallel)
        from .mla import LatentAttention

        return LatentAttention(config, layer, weights, reduce)
    from .gqa import GroupedAttention

    return GroupedAttention(config, layer, weights, reduce)


def _mlp(config: ModelConfig, layer: int, weights: WeightSource, parallel: Parallel | None):
    prefix = f"model.layers.{layer}.mlp"
    if isinstance(config, GlmConfig) and config.mlp_layer_types[layer] == "sparse":
        if parallel is not None:
            from ..parallel.experts import parallel_moe

            return parallel_moe(config, prefix, weights, parallel)
        from .moe import MoE

        return MoE(config, prefix, weights)
    return DenseMLP(prefix, weights, _reduce(parallel, "mlp.out"))


def _reduce(parallel: Parallel | None, name: str) -> Callable[[Tensor], Tensor] | None:
    """What adds up the ranks' parts of a sum; None: a rank has the whole."""
    if parallel is None or parallel.ranks.tp_size == 1:
        return None
    return partial(parallel.everyone.all_reduce, name=name)


class Decoder:
    """The model; every method expects `torch.inference_mode()`.

    Args:
        config: of the whole model, whatever part of it is here.
        parallel: this rank's place among several, of which each has a part; None: all of the model is here.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, parallel: Parallel | None = None) -> None:
        self.config = config
        self.dtype, self.device = weights.dtype, weights.device
        here = config if parallel is None else parallel.ranks.local(config)
        self.vocabulary, tokens = None, config.vocab_size
        if parallel is not None and parallel.ranks.tp_size > 1:
            from ..parallel.vocab import SplitVocabulary

            self.vocabulary = SplitVocabulary(config.vocab_size, parallel)
            tokens = len(self.vocabulary.part)
        table = (tokens, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", table)
        self.layers = [DecoderLayer(here, layer, weights, parallel) for layer in range(config.num_hidden_layers)]
        self.norm = weights.take("model.norm.weight", (config.hidden_size,))
        self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.take("lm_head.weight", table))
        self.inv_freq = inverse_frequencies(config.rope_theta, rope_dim(config), weights.device)
        _refuse_unused(config, weights)

    def forward(self, batch: Batch, kv: KVCache, on_layer: Callable[[int, Batch], None] | None = None) -> Tensor:
        """Run a step's tokens through all layers, writing their KV rows: (T, hidden), before the final norm. `on_layer` is called after
        each one."""
        # (T, hidden), a fresh tensor: the layers add to it in place
        x = F.embedding(batch.input_ids, self.embedding) if self.vocabulary is None else self.vocabulary.embed(batch.input_ids, self.embedding)
        cis = rotations(batch.positions, self.inv_freq)  # (T, 1, rope/2)
        for i, layer in enumerate(self.layers):
            x = layer(x, cis, batch, kv)
            if on_layer is not None:
                on_layer(i, batch)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of the rows asked for: (S, hidden) -> (S, vocab)."""
        logits = self.lm_head(F.rms_norm(hidden, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps))
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)


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
