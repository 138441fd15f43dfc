"""A model of agents with other lengths: each kind multiplied by one factor, until its sessions have the means of a set that nobody fitted a model to.

    scaled_to(AgentModel.shipped(), input_tokens=139_924, output_tokens=446)

Turns, gaps and how prompts begin anew stay as they are.
"""
from __future__ import annotations

from dataclasses import replace

from ..config import ConfigError
from .generator import AgentKind, AgentModel, Spread
from .stats import mean

__all__ = ["scaled_model", "scaled_to"]

SESSIONS = 512  # that the means are taken over
ROUNDS = 4  # each takes what is left of the error to about a hundredth: answers are a small part of the prompts that follow


def scaled_model(model: AgentModel, scale: float, output_scale: float) -> AgentModel:
    """The model with prompts, and what a turn adds to them, `scale` and answers `output_scale` times as long.

    Raises:
        ConfigError: a factor that is not positive.
    """
    for name, value in (("scale", scale), ("output_scale", output_scale)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value!r}: use a factor above 0, 1 for lengths as fitted")

    def kind(one: AgentKind) -> AgentKind:
        return replace(one, first_tokens=_times(one.first_tokens, scale), new_tokens=_times(one.new_tokens, scale),
                       output_tokens=_times(one.output_tokens, output_scale), anew=tuple((round(tokens * scale), share) for tokens, share in one.anew))

    return replace(model, session=kind(model.session), subagent=model.subagent and kind(model.subagent),
                   fitted=f"{model.fitted}, prompts times {scale:.4g}, answers times {output_scale:.4g}")


def scaled_to(model: AgentModel, input_tokens: float, output_tokens: float) -> AgentModel:
    """The model scaled so that over the requests of its first sessions a prompt has `input_tokens` and an answer `output_tokens` in the mean.

    Raises:
        ConfigError: lengths that are not positive.
    """
    scale = output_scale = 1.0
    for _ in range(ROUNDS):
        found = [request for session in scaled_model(model, scale, output_scale).sessions(SESSIONS) for request in session.requests]
        scale *= input_tokens / mean(request.input_tokens for request in found)
        output_scale *= output_tokens / mean(request.output_tokens for request in found)
    return scaled_model(model, scale, output_scale)


def _times(spread: Spread, factor: float) -> Spread:
    return Spread(tuple((round(low * factor, 6), round(mid * factor, 6), round(high * factor, 6)) for low, mid, high in spread.parts))
