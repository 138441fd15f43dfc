"""The widget Memory ladder: from a topology and a card to weights, buffers, the room for a cache, copies, tokens, sessions, and the time of a token.

    MemoryLadder()                                                    # GLM-5.3 on a GB200, TP4
    MemoryLadder(topology="DEP8", kv_cache_dtype="fp8")
    MemoryLadder(model="Llama-3.1-8B", topology="TP1", card="own", hbm_gb=24, kv_cache_dtype="bfloat16")

The drawing (`memory_ladder.js`) works its numbers out in the page, so that it needs no kernel; they are those of
`minengine.arithmetic.memory_ladder`, and `numbers` gives them here. What lies on a card in each topology is this file's table.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import traitlets
from minengine.arithmetic import (CARDS, Card, Ladder, expert_buffer_bytes, kv_copies, layer_kinds, memory_ladder, rank_kv_bytes, rank_weights,
                                  topology, untouched_state)
from minengine.arithmetic import indexer_bytes as key_bytes
from minengine.arithmetic.memory import SOURCE_CARD, SOURCE_MODEL, SOURCE_TOKENS
from minengine.config import ConfigError, model_config
from minengine.simulate.machine import machine
from minengine.simulate.prime_steady import dcp_itl_ms, itl_ms
from minengine.simulate.rack_fit import preset

from .modules import bundle, styles
from .page_widget import PageWidget, between, refuse_unknown, within

__all__ = ["MemoryLadder"]

GLM, LLAMA = "GLM-5.3", "Llama-3.1-8B"
MODELS = {
    GLM: SOURCE_MODEL,
    LLAMA: model_config({"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
}
ROWS = {GLM: ("bfloat16", "fp8", "nvfp4_fp8_ds_mla"), LLAMA: ("bfloat16", "fp8", "nvfp4")}
TOPOLOGIES = {GLM: ("TP1", "TP4", "TP8", "TEP8", "DEP8", "TP8+DCP4"), LLAMA: ("TP1", "TP4", "TP8")}
WEIGHTS = ("bfloat16", "fp8", "nvfp4")  # of what is no routed expert
EXPERTS = "nvfp4"
GROUPS = {"experts": ("experts",), "attention": ("attention", "indexers")}  # parts of the weights as they are drawn; all others are "rest"
COUNTS = {"step_tokens": (1, 65_536), "session_tokens": (1, 10**7)}
AMOUNTS = {"untouched": (0.0, 2000.0), "hbm_gb": (1.0, 1000.0), "beside_gb": (0.0, 1000.0)}
CHOICES = ("model", "topology", "card", "kv_cache_dtype", "weights", "beside")
OWN, SOLVED, GIVEN = "own", "solved", "given"
GB = 1e9
REPORTED = {  # claims tokens_fp8, tokens_nvfp4, dep8_over_tep8_prefix, itl_tp4_ms, itl_tp8_ms, itl_dep8_ms and itl_tp8_dcp4_ms of book/claims.yml
    "tokens": {"fp8": SOURCE_TOKENS, "nvfp4_fp8_ds_mla": 1_630_000},
    "times": 5,
    "itl_ms": {"TP4": 6.08, "TP8": 6.74, "DEP8": 8.48, "TP8+DCP4": 14.02},
}
FITTED = ("TP4", "DEP8")  # whose reported times the simulator's constants were solved from


def missing_bytes() -> float:
    """Bytes a token and layer that rows and indexer keys leave unexplained between the two reported capacities."""
    before, after = REPORTED["tokens"].values()
    return untouched_state(after / before) - layer_kinds()["full"] * key_bytes("nvfp4_fp8_ds_mla").total / SOURCE_MODEL.num_hidden_layers


def simulated_ms() -> dict[str, float]:
    """Mean time of a decoded token of GLM-5.3 by topology, at the source's 64 sessions on GB200, by the simulator's costs."""
    rack, given = machine("gb200-nvl72"), preset()
    alike = {name: itl_ms(rack, given, name) for name in TOPOLOGIES[GLM] if topology(name).gpus > 1 and topology(name).context == 1}
    return {**alike, "TP8+DCP4": dcp_itl_ms(rack, given)}


def on_a_card(name: str, model: str) -> dict[str, Any]:
    """What the page needs of a topology: its cards, copies, buffers a token of a step, and weights by format, in bytes of a card."""
    config, shape = MODELS[model], topology(name)

    def grouped(weights: str) -> dict[str, int]:
        parts = rank_weights(config, name, 0, weights, EXPERTS)
        groups = {group: sum(parts.pop(part, 0) for part in members) for group, members in GROUPS.items()}
        return {**groups, "rest": sum(parts.values())}

    return {"gpus": shape.gpus, "copies": kv_copies(name, config.kv_heads), "buffer": expert_buffer_bytes(config, name, 0, 1),
            "weights": {weights: grouped(weights) for weights in WEIGHTS}}


TABLES = {
    "models": {model: {"layers": config.num_hidden_layers, "rows": {row: rank_kv_bytes(config, "TP1", row, 1, 1) for row in ROWS[model]},
                       "topologies": {name: on_a_card(name, model) for name in TOPOLOGIES[model]}} for model, config in MODELS.items()},
    "cards": {key: {"name": card.name.removesuffix(" (one GPU)"), "hbm_bytes": card.hbm_bytes} for key, card in CARDS.items()},
    "order": {"model": list(MODELS), "topology": TOPOLOGIES, "card": list(CARDS), "kv_cache_dtype": ROWS, "weights": list(WEIGHTS)},  # stored, keys lose theirs
    "limits": {name: list(pair) for name, pair in {**COUNTS, **AMOUNTS}.items()},
    "source": {"model": GLM, "topology": "TP4", "card": SOURCE_CARD, "row": "fp8", "tokens": SOURCE_TOKENS, "missing": missing_bytes()},
    "reported": REPORTED,
    "simulated_ms": {name: round(ms, 2) for name, ms in simulated_ms().items()},
    "fitted": list(FITTED),
}


class MemoryLadder(PageWidget):
    """A card's memory from the top down to the cache, and what a group of such cards caches in each topology.

    Every trait is two-way while a kernel runs. A value outside its limits is a TraitError that names the trait. What does not fit
    together (a row that the model cannot have, more beside than the card has) is refused by the constructor and by `numbers`,
    not by an assignment, since one trait changes at a time; the page shows the same sentence.
    """

    _esm = bundle("memory_ladder.js")
    _css = styles("controls.css", "memory_ladder.css")

    model = traitlets.Enum(tuple(MODELS), GLM, help="whose config.json").tag(sync=True)
    topology = traitlets.Enum(TOPOLOGIES[GLM], "TP4", help="of the group; TP1: a card alone").tag(sync=True)
    card = traitlets.Enum((*CARDS, OWN), SOURCE_CARD, help="whose memory; own: hbm_gb").tag(sync=True)
    hbm_gb = traitlets.Float(24.0, help="own: all memory of the card").tag(sync=True)
    kv_cache_dtype = traitlets.Enum(tuple(dict.fromkeys(sum(ROWS.values(), ()))), "nvfp4_fp8_ds_mla", help="format of the rows").tag(sync=True)
    weights = traitlets.Enum(WEIGHTS, "bfloat16", help="format of the weights; routed experts have four bits in any").tag(sync=True)
    beside = traitlets.Enum((SOLVED, GIVEN), SOLVED, help="solved: the share that the source's decoder has for all else; given: beside_gb").tag(sync=True)
    beside_gb = traitlets.Float(8.0, help="given: GB of a card that are neither weights, buffers nor cache").tag(sync=True)
    step_tokens = traitlets.Int(4096, help="most tokens that a data rank computes in a step").tag(sync=True)
    untouched = traitlets.Float(0.0, help="bytes a token and layer beside rows and indexer keys").tag(sync=True)
    session_tokens = traitlets.Int(146_000, help="of one session").tag(sync=True)
    tables = traitlets.Dict(TABLES, read_only=True, help="weights, rows, cards, limits and reported figures for the page").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the traits as they were made").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        known = (*CHOICES, *COUNTS, *AMOUNTS)
        refuse_unknown(traits, known)
        super().__init__(**traits)
        self.initial = {name: getattr(self, name) for name in known}
        self.numbers  # an author's mistake is an error here, not a sentence in the page

    @traitlets.validate(*COUNTS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(COUNTS[name], name, proposal["value"])

    @traitlets.validate(*AMOUNTS)
    def _between(self, proposal: Any) -> float:
        name = proposal["trait"].name
        return between(AMOUNTS[name], name, proposal["value"])

    @property
    def memory(self) -> Card:
        """The card whose memory is divided now."""
        return CARDS.get(self.card) or replace(CARDS[SOURCE_CARD], name="your own card", source="given", hbm_bytes=int(GB * self.hbm_gb))

    def _at(self, name: str) -> Ladder:
        card = self.memory
        share = None if self.beside == SOLVED else GB * self.beside_gb / card.hbm_bytes
        return memory_ladder(MODELS[self.model], name, card, kv_cache_dtype=self.kv_cache_dtype, weights=self.weights, experts=EXPERTS,
                             step_tokens=self.step_tokens, untouched=self.untouched, beside=share)

    @property
    def compared(self) -> dict[str, Ladder]:
        """The ladder of each topology that the model can have.

        Raises:
            ConfigError: a row or a topology that is not the model's, or more beside than the card has.
        """
        for name, allowed in (("topology", TOPOLOGIES[self.model]), ("kv_cache_dtype", ROWS[self.model])):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}='{getattr(self, name)}': {self.model} has none; use one of {', '.join(allowed)}")
        if self.beside == GIVEN and GB * self.beside_gb >= self.memory.hbm_bytes:
            raise ConfigError(f"beside_gb={self.beside_gb:g}: use less than the card has, {self.memory.hbm_bytes / GB:.1f} GB")
        return {name: self._at(name) for name in TOPOLOGIES[self.model]}

    @property
    def numbers(self) -> Ladder:
        """The ladder of the traits as they are now; ConfigError as `compared` says."""
        return self.compared[self.topology]

    def _in_words(self) -> str:
        try:
            compared = self.compared
        except ConfigError as error:
            return f"Memory ladder: {error}"
        now = compared[self.topology]
        left = f"{now.left_bytes / GB:.1f} GB are left for a cache" if now.left_bytes >= 0 else f"{-now.left_bytes / GB:.1f} GB are missing"
        def said(name: str, one: Ladder) -> str:
            known = {"reported": REPORTED["itl_ms"], "simulated": TABLES["simulated_ms"]} if self.model == GLM else {}
            times = [f"a token {ms[name]:.2f} ms {label}" for label, ms in known.items() if name in ms]
            return f"{name} {one.tokens:,} tokens ({', '.join([f'GPUs: {one.gpus}', f'copies of a row: {one.copies}', *times])})"

        told = "; ".join(said(*one) for one in compared.items())
        return (f"Memory ladder: {self.model} on {self.memory.name}, {self.topology}. Of {now.hbm_bytes / GB:.1f} GB a card, "
                f"{now.weight_bytes / GB:.1f} are weights, {now.buffer_bytes / GB:.1f} buffers, {now.beside_bytes / GB:.1f} all else "
                f"({now.beside_label}); {left}. "
                f"Rows in {self.kv_cache_dtype}: {told}. {now.sessions(self.session_tokens)} sessions of {self.session_tokens:,} tokens.")
