"""Serving: the rates that tie sessions, requests and tokens together, and how two figures compare."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["AtBar", "at_bar", "decode_tok_s", "excess", "frontier", "gpu_hours_per_million", "in_flight", "interactivity", "naive_tok_s", "share",
           "step_gain", "total_tok_s"]


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


# --- what a deployment costs, and which one wins -------------------------------------------------------------

def gpu_hours_per_million(tok_s_gpu: float) -> float:
    """GPU-hours that a million output tokens take: at 100 tok/s per GPU 2.78. Times the price of a GPU-hour it is their cost."""
    return 1e6 / (3600 * tok_s_gpu)


class AtBar(NamedTuple):
    """Where a curve of deployments stands at a bar."""

    sessions: float
    tok_s_gpu: float
    open: bool  # the curve's last point still meets the bar: with more sessions it may carry more


def at_bar(curve: Sequence[tuple[float, float, float]], bar: float) -> AtBar | None:
    """The most that a curve carries with each user at `bar` tok/s or above; None: no point of it is as fast.

    Between the last point that meets the bar and the next, which does not, the curve is taken for a straight line.

    Args:
        curve: (sessions, tok/s per user, output tok/s per GPU), by rising sessions.
    """
    for (sessions, user, gpu), after in zip(reversed(curve), (None, *reversed(curve))):
        if user >= bar:
            if after is None:
                return AtBar(sessions, gpu, True)
            way = (user - bar) / (user - after[1])
            return AtBar(sessions + way * (after[0] - sessions), gpu + way * (after[2] - gpu), False)
    return None


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of the points (tok/s per user, tok/s per GPU) no other one beats in both, from the fastest for a user to the slowest."""
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1])):
        if not best or points[i][1] > points[best[-1]][1]:
            best.append(i)
    return best


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
