"""Topologies: where a cache lives and how many copies there are; and the parts of a model that they split."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from minengine.config import ConfigError, indexer_types

__all__ = ["GLM_5_3", "Topology", "gpus", "kv_copies", "layer_kinds", "mla_params_per_layer", "moe_layers", "topology"]

# The article's model: the fields of its config.json that a formula here takes.
GLM_5_3: Mapping[str, int] = {
    "hidden_size": 6144, "num_hidden_layers": 78, "first_k_dense_replace": 3, "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880, "intermediate_size": 12288,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
}


def layer_kinds(config: Mapping[str, int] = GLM_5_3) -> dict[str, int]:
    """How many layers have an indexer of their own (`full`) and how many reuse one (`shared`)."""
    kinds = indexer_types(config["num_hidden_layers"], config["index_topk_freq"], config["index_skip_topk_offset"])
    return {"full": kinds.count("full"), "shared": kinds.count("shared")}


def moe_layers(config: Mapping[str, int] = GLM_5_3) -> int:
    """Layers with routed experts: all but the leading dense ones."""
    return config["num_hidden_layers"] - config["first_k_dense_replace"]


def mla_params_per_layer(config: Mapping[str, int] = GLM_5_3) -> int:
    """Parameters of one layer's MLA projections: q down and up, latent-and-rope down, k and v up, output."""
    hidden, heads, q_rank, rank = (config[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = (config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q = hidden * q_rank + q_rank * heads * (nope + rope)
    kv = hidden * (rank + rope) + rank * heads * (nope + v)
    return q + kv + heads * v * hidden


@dataclass(frozen=True)
class Topology:
    """One engine's GPUs. Exactly one of `tensor` and `data` is above 1, or both are 1 on a single GPU."""

    name: str
    tensor: int  # ranks that split attention by heads
    data: int  # ranks that run attention for different requests
    context: int  # ranks of a tensor group that split the cached sequence
    experts: int = 1  # ranks that whole experts are spread over; 1: each rank has a part of every expert, or there is one rank

    @property
    def gpus(self) -> int:
        return self.tensor * self.data


def topology(name: str) -> Topology:
    """Read `TP4`, `TEP8` (tensor-parallel attention, experts spread), `DEP8` (data-parallel attention), `TP8+DCP4`.

    Raises:
        ConfigError: any other spelling, or context ranks that do not divide the tensor ranks.
    """
    match = isinstance(name, str) and re.fullmatch(r"(TP|TEP|DEP)([1-9]\d*)(?:\+DCP([1-9]\d*))?", name)
    if not match or (match[1] == "DEP" and match[3]):
        raise ConfigError(f"topology='{name}': use TP<n>, TEP<n>, DEP<n> or TP<n>+DCP<m>, for example TP4, DEP8, TP8+DCP4")
    ranks, context = int(match[2]), int(match[3] or 1)
    if ranks % context:
        raise ConfigError(f"topology='{name}': DCP{context} must divide the {ranks} tensor-parallel ranks")
    return Topology(name, tensor=1 if match[1] == "DEP" else ranks, data=ranks if match[1] == "DEP" else 1, context=context,
                    experts=1 if match[1] == "TP" else ranks)


def kv_copies(name: str, kv_heads: int = 1) -> int:
    """Copies of one request's cache in an engine of that topology.

    Tensor parallelism splits a cache by its heads; a latent has none to split (kv_heads=1), so each rank keeps
    it whole. With h heads, ranks beyond h repeat. Decode context parallelism splits what would be repeated.

    Raises:
        ConfigError: a topology that cannot be read, or heads and ranks that do not divide.
    """
    shape = topology(name)
    if kv_heads < 1 or max(shape.tensor, kv_heads) % min(shape.tensor, kv_heads):
        raise ConfigError(f"kv_heads={kv_heads} and the {shape.tensor} tensor-parallel ranks of '{name}': one must divide the other")
    repeats = max(1, shape.tensor // kv_heads)
    if repeats % shape.context:
        raise ConfigError(f"topology='{name}': DCP{shape.context} must divide the {repeats} copies that {kv_heads} heads leave")
    return repeats // shape.context


def gpus(prefill: str, decode: str, decoders: int, prefills: int = 1) -> int:
    """GPUs of prefill engines that feed that many decode engines: `DEP8`, `TP4`, 4 give 24."""
    return prefills * topology(prefill).gpus + decoders * topology(decode).gpus
