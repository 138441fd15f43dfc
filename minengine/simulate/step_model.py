"""What a step takes, from a model's shapes and a machine's constants.

    bytes       weights of the layers, of the experts that are visited, rows and keys of the cache: over the memory's bandwidth
    operations  of matrix products, of attention, of scoring keys: over what the matrix units do of each
    launches    kernels, each with a time of its own, however little it computes
    meetings    collectives, each with a time until all have come, and bytes (`arithmetic.step_sent` counts both)

Parts of a step follow one another; nothing overlaps. A step with decodes in it verifies `draft_tokens` guesses a request beside the token itself and
yields `tokens_per_step` of them on average; guesses come from one extra layer, once each. Whoever simulates one token a request and step asks
for the time of *one token*: a decode step over `tokens_per_step`. A step with prompts in it counts in full: it is long because of these.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from ..arithmetic.copies import GLM_5_3, topology
from ..arithmetic.kernel import CARDS, roofline
from ..arithmetic.moving import transfer_time_s, wire_time_s
from ..arithmetic.rows import indexer_bytes, row_bytes
from ..arithmetic.sharding import WEIGHT_BITS, check_sharding, held_experts, mean_visits, rank_weights, step_sent
from ..config import ConfigError, GlmConfig, model_config
from .machine import LinearMachine, Machine, machine as read_machine
from .work import Costs, LinearCosts, Work, picoseconds

__all__ = ["MODELS", "PARTS", "Rates", "StepModel", "open_costs", "unvisited"]

MODELS = {"glm-5.3": model_config({**GLM_5_3, "architectures": ["GlmMoeDsaForCausalLM"]})}
PARTS = ("exchange", "gemm", "indexer", "attention", "rest")  # of a forward, as a profile sorts its kernels
DENSE = ("attention", "mlp", "shared experts", "indexers", "routers")  # weights that every token is multiplied with
ACTIVATIONS = "bfloat16"


class Rates(NamedTuple):
    """Seconds of one more row in the contexts of a step's decodes."""

    context_s: float  # that their queries score
    attended_s: float  # that they attend to


def unvisited(config: GlmConfig, tokens: float) -> float:
    """Share of a layer's routed experts that none of `tokens` tokens visits, if each chooses its own at random: (1 - k/n)^tokens.

    By squaring, and between two whole numbers in a straight line: products are the same on every machine, powers are not.
    """
    one = 1 - config.num_experts_per_tok / config.n_routed_experts
    whole = int(tokens)
    result, square, left = 1.0, one, whole
    while left:
        result, square, left = result * square if left & 1 else result, square * square, left >> 1
    return result * (1 - (tokens - whole) * (1 - one))


class StepModel:
    """Costs of one engine; `rank_ps` and the rest are the interface `Costs`.

    Args:
        machine: of kind `model`.
        name: the engine's topology.
        kv_cache_dtype: of the cache's rows.
        weights, experts: formats of the weights and of the routed experts, as `rank_weights` takes them.
        draft_tokens: guesses that a decode step verifies for each request; 0: none.
        tokens_per_step: that it yields for each on average, from 1 to 1 + draft_tokens.

    Raises:
        ConfigError: a topology that the model cannot have, an unknown format, or tokens outside their range.
    """

    def __init__(self, machine: Machine, name: str, *, config: GlmConfig = MODELS["glm-5.3"], kv_cache_dtype: str = "nvfp4_fp8_ds_mla",
                 weights: str = "bfloat16", experts: str = "nvfp4", draft_tokens: int = 0, tokens_per_step: float = 1.0) -> None:
        check_sharding(config, name)
        if not isinstance(draft_tokens, int) or draft_tokens < 0:
            raise ConfigError(f"draft_tokens={draft_tokens!r}: use a whole number, 0 or more")
        if not 1 <= tokens_per_step <= 1 + draft_tokens:
            raise ConfigError(f"tokens_per_step={tokens_per_step}: use 1 to {1 + draft_tokens}, the token itself and draft_tokens={draft_tokens} guesses")
        self.machine, self.config, self.name, self.shape = machine, config, name, topology(name)
        self.draft_tokens, self.tokens_per_step = draft_tokens, tokens_per_step
        self.index_topk, self.hand_over_ps = config.index_topk, picoseconds(machine["hand_over_s"])
        card = CARDS[machine.card]
        self._memory = card.memory_bytes_s * machine["memory_share"]
        self._bytes = rank_weights(config, name, 0, weights, experts)
        self._values = {part: nbytes / 4 for part, nbytes in rank_weights(config, name, 0, "float32").items()}
        peak = {32: 0.5, 16: 1.0, 8: machine["fp8_times"]}  # of 16-bit operations
        self._dense_flops = card.matrix_flops_s * machine["gemm_share"] * peak[WEIGHT_BITS[weights]]
        self._expert_flops = card.matrix_flops_s * machine["gemm_share"] * peak.get(WEIGHT_BITS[experts], machine["nvfp4_times"])
        self._rates = self._row_rates(card.matrix_flops_s, kv_cache_dtype)
        self._dense_bytes = sum(self._bytes[part] for part in (*DENSE, "norms"))
        self._dense_values = sum(self._values[part] for part in DENSE)
        self._fixed: dict[tuple[int, ...], int] = {}  # of decodes alone: there are few, and they come again and again
        self._slopes = tuple(picoseconds(rate / tokens_per_step) for rate in self._decode_rates(1 + draft_tokens))

    # --- one forward of one rank, seconds ----------------------------------------------------------------------------

    def parts(self, work: Work, group_tokens: float, queries: float = 1.0) -> dict[str, float]:
        """Seconds of a rank's forward, by PARTS.

        Args:
            group_tokens: of the step, all data ranks together: whose experts lie here.
            queries: tokens of each decode: itself, and the guesses that are verified with it.
        """
        tokens = queries * work.decodes + work.prefill_tokens
        logits = work.sampled + (queries - 1) * work.decodes
        rates = self._decode_rates(queries)
        score, attend = self._rates["prefill"]
        seconds = {
            "exchange": self._exchange_s(tokens, group_tokens, logits, work.prefill_tokens),
            "gemm": self._gemm_s(tokens, group_tokens, logits),
            "indexer": work.prefill_pairs * score + work.context * rates.context_s,
            "attention": work.prefill_attended * attend + work.attended * rates.attended_s,
            "rest": tokens * self.machine["token_s"],
        }
        return {part: seconds[part] + self.machine.launches.get(part, 0) * self.machine["launch_s"] for part in PARTS}

    def draft_s(self, work: Work, group_decodes: float) -> float:
        """Seconds of the guesses: for each of them one layer's part of a forward with one token a request, and the logits."""
        one = work._replace(prefill_tokens=0, prefill_pairs=0, prefill_attended=0, sampled=work.decodes)
        # fsum, here and below: a sum of floats differs in its last bit between versions of Python.
        forward, head = fsum(self.parts(one, group_decodes).values()), self._head_s(one.decodes)
        return self.draft_tokens * ((forward - head) / self.config.num_hidden_layers + head)

    def forward_s(self, work: Work, group: Work) -> float:
        """Seconds of a rank's step, its guesses included. `group`: the sum of all ranks' work."""
        queries = 1 + self.draft_tokens
        seconds = fsum(self.parts(work, queries * group.decodes + group.prefill_tokens, queries).values())
        return seconds + (self.draft_s(work, group.decodes) if self.draft_tokens and group.decodes else 0.0)

    def _gemm_s(self, tokens: float, group_tokens: float, logits: float) -> float:
        """Dense layers, then the visited experts, then the head: each at the memory's pace or at the matrix units', whichever is slower."""
        dense = roofline(2 * tokens * self._dense_values, self._dense_bytes, self._dense_flops, self._memory).time_s
        visited = self._bytes["experts"] * (1 - unvisited(self.config, group_tokens))
        visits = group_tokens * self.config.num_experts_per_tok / self.config.n_routed_experts  # of each expert
        return dense + roofline(2 * visits * self._values["experts"], visited, self._expert_flops, self._memory).time_s + self._head_s(logits)

    def _head_s(self, logits: float) -> float:
        if not logits:
            return 0.0
        half = 0.5 if not self.config.tie_word_embeddings else 1.0  # of the vocabulary's two tables
        return roofline(2 * logits * half * self._values["vocabulary"], half * self._bytes["vocabulary"], self._dense_flops, self._memory).time_s

    def _row_rates(self, flops_s: float, kv_cache_dtype: str) -> dict[str, tuple[float, float]]:
        """Seconds to score a row, and to attend to one, in all layers: by operations (`prefill`) and by bytes."""
        config, shape = self.config, self.shape
        heads = config.num_attention_heads // shape.tensor * shape.context  # with DCP queries are gathered
        scoring = 2 * config.index_n_heads * config.index_head_dim * config.num_indexer_layers / shape.context
        attending = 2 * heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers / shape.context
        key, row = indexer_bytes(kv_cache_dtype, config.index_head_dim).total, row_bytes(kv_cache_dtype, *config.kv_widths).total
        scoring_s, attending_s = flops_s * self.machine["fp8_times"] * self.machine["indexer_share"], flops_s * self.machine["attention_share"]
        return {"prefill": (scoring / scoring_s, attending / attending_s),
                "read": (key * config.num_indexer_layers / shape.context / self._memory, row * config.num_hidden_layers / shape.context / self._memory)}

    def _decode_rates(self, queries: float) -> Rates:
        """Of decodes with `queries` tokens each: keys are read once for all of them, chosen rows for each. Bytes or operations, as is slower."""
        (score, attend), (key, row) = self._rates["prefill"], self._rates["read"]
        return Rates(max(queries * score, key), queries * max(attend, row))

    def _exchange_s(self, tokens: float, group_tokens: float, logits: float, prefill_tokens: float) -> float:
        config, shape, machine = self.config, self.shape, self.machine
        choices = [count for count in (tokens - prefill_tokens, prefill_tokens) if count] if shape.context > 1 else []
        out = mean_visits(config, self.name, 0, tokens) if shape.data > 1 else 0
        here = held_experts(config, self.name, 0) / config.n_routed_experts
        come = config.mlp_layer_types.count("sparse") * (group_tokens - tokens) * config.num_experts_per_tok * here if shape.data > 1 else 0
        sent = step_sent(config, self.name, 0, tokens, logits, dtype=ACTIVATIONS, choices=choices, visits_out=out, visits_in=come)
        seconds = 0.0
        for purpose, one in sent.items():
            ranks = shape.context if purpose.startswith("dcp.") else shape.gpus
            meeting = machine["near_meeting_s" if ranks <= machine["near_gpus"] else "far_meeting_s"]
            seconds += one.calls * meeting + wire_time_s(one.nbytes, machine["link_bytes_s"] * machine["exchange_share"])
        return seconds

    # --- whole picoseconds: the interface of the simulator ------------------------------------------------------------

    def rank_ps(self, works: Sequence[Work]) -> list[int]:
        """See `Costs`."""
        group = Work(*map(sum, zip(*works)))
        if group.prefill_tokens:
            return [picoseconds(self.forward_s(work, group)) for work in works]
        return [self._decode_ps(work, group) for work in works]

    def _decode_ps(self, work: Work, group: Work) -> int:
        """Of a decode step alone, for one token."""
        key = (work.decodes, group.decodes)
        if key not in self._fixed:
            bare = Work(decodes=work.decodes, sampled=work.decodes)
            self._fixed[key] = picoseconds(self.forward_s(bare, Work(decodes=group.decodes)) / self.tokens_per_step)
        context_ps, attended_ps = self._slopes
        return self._fixed[key] + context_ps * work.context + attended_ps * work.attended

    def transfer_ps(self, descriptors: int, nbytes: int) -> int:
        return picoseconds(transfer_time_s(nbytes, descriptors, 1 / self.machine["wire_bytes_s"], self.machine["copy_s"]))

    def retrieve_ps(self, nbytes: int) -> int:
        return picoseconds(wire_time_s(nbytes, self.machine["retrieve_bytes_s"]))


def open_costs(machine: str | Path | Mapping[str, Any] | Machine | LinearMachine, name: str, *, model: str = "glm-5.3", **options: Any) -> Costs:
    """Costs of an engine of topology `name` on a machine; of a `linear` one those that were measured, whatever the topology.

    Args:
        options: as `StepModel` takes them.

    Raises:
        ConfigError: an unknown machine or model, or see `StepModel`.
    """
    found = read_machine(machine)
    if isinstance(found, LinearMachine):
        return LinearCosts(found.cost, **found.others)
    if model not in MODELS:
        raise ConfigError(f"model='{model}': its shapes are not known here; use {', '.join(MODELS)}")
    return StepModel(found, name, config=MODELS[model], **options)
