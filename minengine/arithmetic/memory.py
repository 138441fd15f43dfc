"""The memory ladder: what a card has, what weights and buffers take of it, and the tokens and sessions that the rest caches."""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from typing import Any, NamedTuple

from minengine.config import ConfigError, GlmConfig, ModelConfig, model_config

from .copies import GLM_5_3, kv_copies, topology
from .kernel import CARDS, Card
from .rows import cached_tokens, sessions_held
from .sharding import VALUE_BYTES, WEIGHT_BITS, check_sharding, held_experts, rank_kv_bytes, rank_weights

__all__ = ["SOURCE_MODEL", "Ladder", "Rung", "beside_share", "expert_buffer_bytes", "memory_ladder", "more_tokens"]

SOURCE_TOKENS = 1_090_000  # claim tokens_fp8: what a TP4 decoder caches in 8 bits; all that is fitted here
SOURCE_CARD = "GB200"
SOURCE_MODEL = model_config({**GLM_5_3, "architectures": ["GlmMoeDsaForCausalLM"]})


class Rung(NamedTuple):
    """One step down from a card's memory."""

    name: str
    nbytes: int  # that it takes
    label: str  # reasoned or assumed


@dataclass(frozen=True)
class Ladder:
    """One card of a group, from its memory down to the cache, and what all cards of the group cache together."""

    topology: str
    hbm_bytes: int
    weights: dict[str, int]  # of the card that has most, part by part
    buffer_bytes: int  # for a step's expert outputs and, under data parallelism, for the rows of all peers
    beside_bytes: int  # activations, graphs, libraries, what the engine leaves alone
    beside_label: str  # reasoned: as much as on the source's decoder, the same card; assumed: given, or its share on another card
    left_bytes: int  # for the cache; below 0: so much is missing
    token_bytes: int  # of one copy of a token: rows and indexer keys of all layers, and what is said to be beside them
    copies: int
    gpus: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def tokens(self) -> int:
        """Distinct tokens that the group caches."""
        return cached_tokens(max(0, self.left_bytes), self.token_bytes, self.gpus, self.copies)

    @property
    def rank_tokens(self) -> int:
        """Of them, those that one data rank caches; tensor-parallel ranks cache the same ones, all together."""
        return self.tokens // topology(self.topology).data

    def sessions(self, session_tokens: float) -> int:
        """Whole sessions of that many tokens."""
        return sessions_held(self.tokens, session_tokens)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """From the top: what each part takes; they and `left_bytes` add up to `hbm_bytes`."""
        parts = [Rung(part, nbytes, "reasoned") for part, nbytes in self.weights.items()]
        return (*parts, Rung("buffers", self.buffer_bytes, "reasoned"), Rung("beside", self.beside_bytes, self.beside_label))


def expert_buffer_bytes(config: ModelConfig, name: str, rank: int, step_tokens: int) -> int:
    """Room for the experts' work on a step of `step_tokens` tokens a data rank, before anybody knows which experts they choose.

    For every token that may come, one 16-bit output of each expert here that it may visit; under data parallelism also the token
    itself, from whichever peer, and the sum that goes back. An engine that reserves less must count before it sends, or drop.
    """
    if not isinstance(config, GlmConfig):
        return 0
    shape, row = topology(name), VALUE_BYTES["bfloat16"] * config.hidden_size
    visits = min(config.num_experts_per_tok, held_experts(config, name, rank))
    return shape.data * step_tokens * row * (visits + (2 if shape.data > 1 else 0))


def draft_layer(config: GlmConfig) -> GlmConfig:
    """The layer that drafts tokens, as a model of its own: one more with experts and an indexer, which shares the vocabulary."""
    return replace(config, num_hidden_layers=1, mlp_layer_types=("sparse",), indexer_types=("full",))


def draft_bytes(config: GlmConfig, name: str, weights: str) -> int:
    """Its weights on a card, experts and all in the format `weights`, and the matrix that joins a token to the last hidden state."""
    parts = rank_weights(draft_layer(config), name, 0, weights)
    return sum(nbytes for part, nbytes in parts.items() if part != "vocabulary") + int(2 * config.hidden_size**2 * WEIGHT_BITS[weights] / 8)


def beside_share(weights: str = "bfloat16", experts: str = "nvfp4", step_tokens: int = 4096, untouched: float = 0.0, draft_layers: int = 0) -> float:
    """Share of a GB200 that is neither weights, buffers nor cache in the source's decoder: TP4 with SOURCE_TOKENS tokens of 8-bit rows.

    One number for all that was not published, solved from the one capacity that is taken as given; arguments as in `memory_ladder`.

    Raises:
        ConfigError: with such weights that decoder could not hold its cache.
    """
    bare = memory_ladder(SOURCE_MODEL, "TP4", SOURCE_CARD, kv_cache_dtype="fp8", weights=weights, experts=experts, step_tokens=step_tokens,
                         untouched=untouched, draft_layers=draft_layers, beside=0.0)
    share = (bare.left_bytes - SOURCE_TOKENS * bare.token_bytes * bare.copies / bare.gpus) / bare.hbm_bytes
    if share < 0:
        raise ConfigError(f"weights='{weights}', experts='{experts}', step_tokens={step_tokens}, untouched={untouched:g}: four {SOURCE_CARD} would then not "
                          f"hold the {SOURCE_TOKENS:,} tokens that are reported; use less, or give `beside`")
    return share


def memory_ladder(config: ModelConfig, name: str, card: str | Card = SOURCE_CARD, *, kv_cache_dtype: str = "nvfp4_fp8_ds_mla", weights: str = "bfloat16",
                  experts: str = "nvfp4", step_tokens: int = 4096, untouched: float = 0.0, draft_layers: int = 0, beside: float | None = None) -> Ladder:
    """From one card's memory to the tokens that a group of such cards caches.

    Args:
        config, name: the model, and the topology of the group (`TP1`: a card alone).
        card: a key of CARDS, or a card with `hbm_bytes`.
        kv_cache_dtype: of the rows; indexer keys are stored as beside such rows.
        weights, experts: formats of the weights, as `rank_weights` takes them. The defaults are those of the public 4-bit checkpoints of
            GLM-5.3: the experts alone have four bits.
        step_tokens: most tokens that a data rank computes in a step.
        untouched: bytes a token and layer that the cache keeps beside rows and indexer keys.
        draft_layers: 1: the model's own layer for drafting tokens is loaded too, and keeps rows and keys as the others do.
        beside: share of the card for what no formula here counts; None: as much as the source's decoder has, see `beside_share`.

    Raises:
        ConfigError: a model and a topology that do not fit, an unknown card or format, or a number outside its range.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config={config!r}: use a ModelConfig, as `model_config` gives it")
    for field, value in {"step_tokens": step_tokens, "untouched": untouched, **({} if beside is None else {"beside": beside})}.items():
        if not isinstance(value, (int, float)):
            raise ConfigError(f"{field}={value!r}: use a number")
    shape, gpu = topology(name), CARDS.get(card) if isinstance(card, str) else card
    if not isinstance(gpu, Card) or gpu.hbm_bytes is None:
        known = gpu.name if isinstance(gpu, Card) else card
        raise ConfigError(f"card={known!r}: its memory is not known; use one of {', '.join(CARDS)}, or a Card with hbm_bytes")
    if step_tokens < 1:
        raise ConfigError(f"step_tokens={step_tokens}: use at least 1")
    if not untouched >= 0:
        raise ConfigError(f"untouched={untouched}: use bytes from 0 up")
    if draft_layers not in (0, 1) or draft_layers and not isinstance(config, GlmConfig):
        raise ConfigError(f"draft_layers={draft_layers}: use 0, or 1 for a GlmMoeDsaForCausalLM")
    if beside is not None and not 0 <= beside < 1:
        raise ConfigError(f"beside={beside}: use a share of the card from 0 to below 1")
    check_sharding(config, name)
    taken = rank_weights(config, name, 0, weights, experts)
    token = rank_kv_bytes(config, "TP1", kv_cache_dtype, 1, 1) + floor(untouched * config.num_hidden_layers + 0.5)
    if draft_layers:
        taken["draft layer"] = draft_bytes(config, name, weights)
        token += rank_kv_bytes(draft_layer(config), "TP1", kv_cache_dtype, 1, 1)
    buffers = expert_buffer_bytes(config, name, 0, step_tokens)
    share = beside_share(weights, experts, step_tokens, untouched, draft_layers) if beside is None else beside
    rest = floor(share * gpu.hbm_bytes + 0.5)  # halves go up, as in a browser
    label = "reasoned" if beside is None and gpu is CARDS[SOURCE_CARD] else "assumed"
    return Ladder(name, gpu.hbm_bytes, taken, buffers, rest, label, gpu.hbm_bytes - sum(taken.values()) - buffers - rest, token,
                  kv_copies(name, config.kv_heads), shape.gpus)


def more_tokens(name: str, other: str, **how: Any) -> float:
    """How many times the tokens of `other` the source's model caches in topology `name`; how: as `memory_ladder` takes it."""
    return memory_ladder(SOURCE_MODEL, name, **how).tokens / memory_ladder(SOURCE_MODEL, other, **how).tokens
