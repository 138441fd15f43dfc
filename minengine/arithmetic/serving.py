"""Serving: the rates that tie sessions, requests and tokens together, and how two figures compare."""
from __future__ import annotations

__all__ = ["decode_tok_s", "excess", "in_flight", "interactivity", "naive_tok_s", "share", "step_gain", "total_tok_s"]


# --- serving: tokens, users, requests ----------------------------------------------------------------------

def total_tok_s(tok_s_gpu: float, num_gpus: int) -> float:
    """Output tokens a second of a whole deployment."""
    return tok_s_gpu * num_gpus


def naive_tok_s(sessions: float, tok_s_user: float) -> float:
    """What the deployment would emit if every session always had a request in flight."""
    return sessions * tok_s_user


def in_flight(output_tok_s: float, tok_s_user: float) -> float:
    """Requests in flight on average (Little's law): 2,400 tok/s at 101 tok/s a request are 23.8.

    Exact where tok_s_user is the mean weighted by time in flight: tokens emitted / request-seconds.
    """
    return output_tok_s / tok_s_user


def interactivity(output_tokens: float, latency_s: float) -> float:
    """E2E tok/s of one user: completion tokens / whole request time, queue and first token included."""
    return output_tokens / latency_s


def decode_tok_s(itl_s: float) -> float:
    """tok/s while decoding: 1 / inter-token latency, which leaves out queue and first token."""
    return 1 / itl_s


# --- comparing ---------------------------------------------------------------------------------------------

def share(part: float, whole: float) -> float:
    """`part` as a fraction of `whole`."""
    return part / whole


def excess(value: float, baseline: float) -> float:
    """How far `value` lies above `baseline`, as a fraction of it."""
    return value / baseline - 1


def step_gain(step_share: float, before: float, after: float) -> float:
    """Fraction of a step saved when the part that takes `step_share` of it goes from `before` to `after` (Amdahl)."""
    return step_share * (1 - after / before)
