"""What a step costs: seconds from the work that the scheduler put into it."""
from __future__ import annotations

from dataclasses import dataclass, fields
from math import fsum, isfinite

from ..config import ConfigError
from ..schedule import Step

__all__ = ["StepCost", "attended_pairs"]


def attended_pairs(step: Step) -> int:
    """Pairs (token of the step, row that it attends to), over all its requests. Ask before `update` books the step.

    A token attends to every earlier one and to itself: a chunk of n tokens after c computed ones makes n*c + n*(n+1)/2.
    """
    chunks = [(request, 1) for request in step.decodes] + list(step.prefills)
    return sum(n * request.num_computed_tokens + n * (n + 1) // 2 for request, n in chunks)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step, linear in its work:

        base_s + decode_s * decode tokens + prefill_s * prefill tokens + attention_s * attended pairs

    `base_s` is what every step pays however little it computes (weights are read, layers are launched). The other three are
    seconds a unit. The defaults are rounded from a least-squares fit to the steps of this engine with SmolLM2-135M in float32
    on one thread of an x86-64 server CPU (1 to 12 streams, prompts of 300 to 1,500 tokens, budgets 64 to 512): half of the steps
    lay within 3% of the fit, all within 14%. A memory-bound machine whose steps cost more than the sum of their parts, or a
    GPU that computes a few dozen tokens in the time of one, is not linear: fit it in the range that is asked about.
    """

    base_s: float = 0.022
    decode_s: float = 0.0014
    prefill_s: float = 0.00092
    attention_s: float = 0.000001

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}={value!r}: use seconds, 0 or more")
        if not self.base_s:
            raise ConfigError("base_s=0: use more than 0 seconds, or a step of nothing would take no time")

    def seconds(self, step: Step) -> float:
        """How long the step takes. Ask before `update` books it."""
        prefill = sum(chunk.num_tokens for chunk in step.prefills)
        return fsum((
            self.base_s,
            self.decode_s * len(step.decodes),
            self.prefill_s * prefill,
            self.attention_s * attended_pairs(step),
        ))
