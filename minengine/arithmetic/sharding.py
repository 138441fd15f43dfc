"""Sharding: what one rank of a topology holds, and what it sends in a step. The live engine counts the same (`minengine/parallel/counts.py`)."""
from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from minengine.config import ConfigError, GlmConfig, LlamaConfig, ModelConfig

from .copies import topology
from .rows import NVFP4_GROUP, bytes_per_token, head_row_bytes, indexer_bytes, row_bytes

__all__ = ["Sent", "WEIGHT_BITS", "check_sharding", "held_experts", "mean_visits", "rank_kv_bytes", "rank_share", "rank_weights", "sent_bytes", "step_sent"]

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "fp8": 8, "nvfp4": 4 + 8 / NVFP4_GROUP}  # of one value, its group's scale shared out
COUNT_BYTES = 8  # how many rows go to an expert: an int64
CANDIDATE_BYTES = 8  # a score and a position, of which the best index_topk of all ranks are chosen
PART_BYTES = 4  # parts of a softmax are merged in float32


class Sent(NamedTuple):
    """What one rank sends for one purpose."""

    calls: int  # collectives
    nbytes: int


def rank_share(total: int, ranks: int, rank: int) -> range:
    """A rank's part of `total` things, in order; where they do not divide, the first ranks have one more."""
    each, more = divmod(total, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def sent_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank must send, by the way that sends least (Thakur, Rabenseifner, Gropp, 2005, for large messages).

    Args:
        collective: "all_reduce" of `nbytes` on each rank, around a ring: each of `ranks` parts passes twice, to be added up and to be
            spread. "all_gather" of `nbytes` from each rank: to every other. "all_to_all": `nbytes` is what is for others, sent once.
    """
    if ranks == 1:
        return 0
    return {"all_reduce": 2 * (ranks - 1) * -(-nbytes // ranks), "all_gather": (ranks - 1) * nbytes, "all_to_all": nbytes}[collective]


def check_sharding(config: ModelConfig, name: str) -> None:
    """
    Raises:
        ConfigError: the model cannot be split so; it names the field of the model that does not fit.
    """
    shape = topology(name)
    if shape.gpus == 1:
        return
    model = config.architecture
    if isinstance(config, LlamaConfig):
        if shape.experts > 1:
            raise ConfigError(f"topology='{name}': {model} has no experts to spread; use TP{shape.gpus}")
        if shape.context > 1:
            raise ConfigError(f"topology='{name}': DCP splits a latent row's sequence, and {model} has heads to split; use TP{shape.tensor}")
    counts = {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.intermediate_size}
    if isinstance(config, LlamaConfig):
        counts["num_key_value_heads"] = config.num_key_value_heads
    elif isinstance(config, GlmConfig):
        counts["moe_intermediate_size * n_shared_experts"] = config.moe_intermediate_size * config.n_shared_experts
        if shape.experts == 1:
            counts["moe_intermediate_size"] = config.moe_intermediate_size
    for field, count in counts.items():
        if count % shape.tensor:
            fitting = [n for n in range(2, count + 1) if not any(c % n for c in counts.values())]
            remedy = f"use {', '.join(f'TP{n}' for n in fitting[:4])}" if fitting else "use one rank"
            raise ConfigError(f"topology='{name}': {field}={count} of {model} does not divide among {shape.tensor} ranks; {remedy}")
    if isinstance(config, GlmConfig) and config.n_routed_experts < shape.experts:
        raise ConfigError(f"topology='{name}': n_routed_experts={config.n_routed_experts} of {model} leave ranks without an expert; use fewer ranks")


# --- what lies on a rank ---------------------------------------------------------------------------------------

def rank_kv_bytes(config: ModelConfig, name: str, kv_cache_dtype: str, num_blocks: int, block_size: int) -> int:
    """Bytes of one rank's pool of `num_blocks` blocks that stand for `block_size` tokens each."""
    shape = topology(name)
    if config.is_latent:
        indexer = indexer_bytes(kv_cache_dtype, config.indexer_width).total if config.num_indexer_layers else 0
        token = bytes_per_token(row_bytes(kv_cache_dtype, *config.kv_widths).total, config.num_hidden_layers, 1, indexer, config.num_indexer_layers)
    else:
        heads = config.kv_heads // shape.tensor
        token = bytes_per_token(head_row_bytes(kv_cache_dtype, config.kv_widths[0]).total, config.num_hidden_layers, heads)
    return num_blocks * (block_size // shape.context) * token


def rank_weights(config: ModelConfig, name: str, rank: int, dtype: str = "float32", experts: str | None = None) -> dict[str, int]:
    """Bytes of the weights that a rank keeps, part by part.

    Routers and the indexer's head weights are float32 in any dtype; vocabulary and norms have 16 bits where `dtype` has fewer, as
    checkpoints in 8 and 4 bits keep them. Scales of a whole tensor, or of 128 x 128 values, are left out: 0.03% at most.

    Args:
        dtype: of the weights, one of WEIGHT_BITS.
        experts: of the routed experts, where that is another.

    Raises:
        ConfigError: an unknown format.
    """
    shape, formats = topology(name), {"dtype": dtype, "experts": experts or dtype}
    for field, known in formats.items():
        if known not in WEIGHT_BITS:
            raise ConfigError(f"{field}='{known}' is no format of weights; use one of {', '.join(WEIGHT_BITS)}")
    bits, of_experts = (WEIGHT_BITS[known] for known in formats.values())
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads, inner = config.num_attention_heads // shape.tensor, config.intermediate_size // shape.tensor
    table = len(rank_share(config.vocab_size, shape.tensor, rank % shape.tensor)) * hidden
    values = {"vocabulary": table * (1 if config.tie_word_embeddings else 2), "norms": (2 * layers + 1) * hidden}
    width = dict.fromkeys(values, max(bits, 16)) | {"experts": of_experts}

    def kept() -> dict[str, int]:
        return {part: ceil(count * width.get(part, bits) / 8) for part, count in values.items()}

    if isinstance(config, LlamaConfig):
        rows = heads + 2 * config.num_key_value_heads // shape.tensor
        values["attention"] = layers * config.head_dim * (rows + heads) * hidden
        values["mlp"] = layers * 3 * hidden * inner
        return kept()
    q_rank, kv_rank, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    down = (q_rank + kv_rank + rope) * hidden + q_rank + kv_rank  # with their norms: whole on every rank
    up = heads * ((config.qk_nope_head_dim + rope) * q_rank + (config.qk_nope_head_dim + config.v_head_dim) * kv_rank)
    values["attention"] = layers * (down + up + heads * config.v_head_dim * hidden)
    sparse = config.mlp_layer_types.count("sparse")
    values["mlp"] = (layers - sparse) * 3 * hidden * inner
    values["shared experts"] = sparse * 3 * hidden * (config.moe_intermediate_size * config.n_shared_experts // shape.tensor)
    of_each = config.moe_intermediate_size // (shape.tensor if shape.experts == 1 else 1)
    values["experts"] = sparse * held_experts(config, name, rank) * 3 * hidden * of_each
    keys = config.index_n_heads * config.index_head_dim * q_rank + config.index_head_dim * (hidden + 2)
    values["indexers"] = config.num_indexer_layers * keys
    whole = kept()
    whole["routers"] = sparse * (config.n_routed_experts * (hidden + 1)) * 4
    whole["indexers"] += config.num_indexer_layers * config.index_n_heads * hidden * 4
    return whole


def held_experts(config: GlmConfig, name: str, rank: int) -> int:
    """Routed experts of a layer that a rank has, whole or in part."""
    shape = topology(name)
    return config.n_routed_experts if shape.experts == 1 else len(rank_share(config.n_routed_experts, shape.experts, rank))


# --- what a rank sends -----------------------------------------------------------------------------------------

def mean_visits(config: GlmConfig, name: str, rank: int, tokens: int) -> float:
    """Visits of a step's `tokens` tokens on a rank to experts on others, all layers together, if every expert is as popular as any."""
    away = 1 - len(rank_share(config.n_routed_experts, topology(name).experts, rank)) / config.n_routed_experts
    return config.mlp_layer_types.count("sparse") * tokens * config.num_experts_per_tok * away


def step_sent(config: ModelConfig, name: str, rank: int, tokens: int, logits: int, *, dtype: str = "float32", choices: Sequence[int] = (),
              visits_out: int = 0, visits_in: int = 0) -> dict[str, Sent]:
    """What a rank sends in one step, by purpose.

    Args:
        tokens: of the step; under data parallelism the rank's own, and 0 in a dummy step.
        logits: rows that are sampled.
        choices: with DCP, the queries of each call that scores keys: the decodes if one of them sees more than index_topk
            tokens, and each prefill chunk that does.
        visits_out: under data parallelism, rows sent to experts on other ranks, all layers together; `mean_visits` where nobody counted.
        visits_in: rows of others that came to experts here, and go back.
    """
    shape, width = topology(name), VALUE_BYTES[dtype]
    sparse = config.mlp_layer_types.count("sparse") if isinstance(config, GlmConfig) else 0
    hidden, layers = config.hidden_size * width, config.num_hidden_layers
    sent: dict[str, Sent] = {}
    if shape.tensor > 1:
        def reduced(calls: int) -> Sent:
            return Sent(calls, calls * sent_bytes("all_reduce", tokens * hidden, shape.tensor))

        sent["vocab.embed"], sent["attention.out"] = reduced(1), reduced(layers)
        sent["mlp.out"], sent["moe.out"] = reduced(layers - sparse), reduced(sparse)
        column = len(rank_share(config.vocab_size, shape.tensor, 0))  # the widest part: the others are padded to it
        sent["vocab.logits"] = Sent(1 if logits else 0, sent_bytes("all_gather", logits * column * width, shape.tensor))
    if shape.context > 1:
        heads, rank_width = config.num_attention_heads // shape.tensor, config.kv_lora_rank
        query = tokens * heads * (rank_width + config.qk_rope_head_dim) * width
        sent["dcp.query"] = Sent(layers, layers * sent_bytes("all_gather", query, shape.context))
        part = tokens * heads * (rank_width + 1) * PART_BYTES  # the mean latent and the log of its weight
        sent["dcp.merge"] = Sent(layers, layers * sent_bytes("all_to_all", (shape.context - 1) * part, shape.context))
        full = config.num_indexer_layers
        chosen = sum(sent_bytes("all_gather", queries * config.index_topk * CANDIDATE_BYTES, shape.context) for queries in choices)
        sent["dcp.choice"] = Sent(full * len(choices), full * chosen)
    if shape.data > 1:
        others = config.n_routed_experts - len(rank_share(config.n_routed_experts, shape.data, rank))
        sent["moe.sizes"] = Sent(sparse, sparse * sent_bytes("all_to_all", others * COUNT_BYTES, shape.data))
        sent["moe.dispatch"] = Sent(sparse, sent_bytes("all_to_all", visits_out * hidden, shape.data))
        sent["moe.combine"] = Sent(sparse, sent_bytes("all_to_all", visits_in * hidden, shape.data))
    return {purpose: one for purpose, one in sent.items() if one.calls}
