"""What "fast" means: each metric with its formula, and whose definition it is. Times in seconds.

    start ──────── TTFT ────────▶ token 1 ─ gap ─ token 2 ─ gap ─ ... ─ token n
    └──────────────────────── latency (E2E) ────────────────────────────┘

A metric that does not exist for a request (no output, one token) raises; it is never 0.
"""
from __future__ import annotations

from math import fsum
from typing import Iterable, Sequence

from .. import arithmetic
from .closed_loop import gap_s
from .stats import mean, percentile
from .sessions import Session

__all__ = ["MetricError", "decode_tok_s", "e2e_tok_s", "e2e_tok_s_user", "in_flight_share", "interactivity_q", "itl_s", "output_tok_s_gpu", "ttft_s"]


class MetricError(ValueError):
    """A metric asked of numbers that do not have it; the message says what is missing."""


def _demand(ok: bool, message: str) -> None:
    if not ok:
        raise MetricError(message)


# --- one request ------------------------------------------------------------------------------------------

def ttft_s(start_s: float, first_token_s: float) -> float:
    """Time to first token = first response - request start (AIPerf). Queueing and prefill are inside."""
    _demand(first_token_s >= start_s, f"first_token_s={first_token_s}: lies before start_s={start_s}; give both on one clock")
    return first_token_s - start_s


def itl_s(latency_s: float, ttft_s: float, output_tokens: int) -> float:
    """Inter-token latency = (latency - TTFT) / (output tokens - 1) (AIPerf; also called TPOT).

    One number a request: the mean of its gaps. It needs two tokens, since one token has no gap.
    """
    _demand(output_tokens >= 2, f"output_tokens={output_tokens}: an inter-token latency needs at least 2")
    _demand(latency_s >= ttft_s >= 0, f"latency_s={latency_s}: is shorter than ttft_s={ttft_s}")
    return (latency_s - ttft_s) / (output_tokens - 1)


def decode_tok_s(itl: float) -> float:
    """AIPerf's tok/s/user = 1 / ITL: speed while decoding. The first token, and the wait for it, are not in it."""
    _demand(itl > 0, f"itl={itl}: a speed needs a positive inter-token latency")
    return arithmetic.decode_tok_s(itl)


def e2e_tok_s(latency_s: float, output_tokens: int) -> float:
    """The article's E2E tok/s of one request = output tokens / whole latency, queueing and first token included."""
    _demand(latency_s > 0, f"latency_s={latency_s}: a speed needs a positive time")
    return arithmetic.interactivity(output_tokens, latency_s)


# --- many requests ----------------------------------------------------------------------------------------

def e2e_tok_s_user(latencies_s: Sequence[float], output_tokens: Sequence[int], how: str = "requests") -> float:
    """E2E tok/s per user as a mean, the article's headline. Two means carry that name:

    `requests`: mean over requests of (output tokens / latency); a short answer weighs as much as a long one.
    `pooled`: sum of output tokens / sum of latencies; a second in flight weighs as much as any other. Throughput divided
    by THIS mean is exactly the mean number of requests in flight (Little's law).

    Raises:
        MetricError: no requests, lists of different lengths, or an unknown `how`.
    """
    _demand(how in ("requests", "pooled"), f"how={how!r}: use 'requests' or 'pooled'")
    _pairs(latencies_s, output_tokens)
    if how == "pooled":
        return e2e_tok_s(fsum(latencies_s), sum(output_tokens))
    return mean(e2e_tok_s(latency, n) for latency, n in zip(latencies_s, output_tokens))


def interactivity_q(latencies_s: Sequence[float], output_tokens: Sequence[int], q: float = 90) -> float:
    """InferenceX's E2E interactivity_q = 1 / percentile_q(latency / output tokens), P90 by default.

    The percentile comes BEFORE the inversion: q=90 is the speed that the slowest tenth of requests stay below. The 90th
    percentile of the speeds themselves would describe the fastest tenth.

    Raises:
        MetricError: no requests, lists of different lengths, or a request without output.
    """
    _pairs(latencies_s, output_tokens)
    _demand(min(output_tokens) >= 1, "output_tokens: a request without output has no time per token; leave it out and count it")
    return 1 / percentile((latency / n for latency, n in zip(latencies_s, output_tokens)), q)


def output_tok_s_gpu(output_tokens: int, duration_s: float, gpus: int) -> float:
    """Completed output tokens / measurement time / every serving GPU, those of prefill included (the article's second axis)."""
    _demand(duration_s > 0 and gpus >= 1, f"duration_s={duration_s}, gpus={gpus}: use a positive time and at least one GPU")
    return output_tokens / duration_s / gpus


def in_flight_share(sessions: Iterable[Session], gap_cap_s: float, tok_s: float | None = None, *, gaps: str = "recorded") -> float:
    """Requests in flight per live session of a closed-loop replay; times the sessions, the mean number in flight.

        share = sum(service) / (sum(service) + sum(min(gap, cap)))

    over all requests of all sessions, those of subagents included, pooled. A request starts when its gap after the previous
    one is over, and a gap longer than `gap_cap_s` is cut to it. Requests of one session are taken one after the other;
    subagents that run side by side make the true share a little higher.

    Args:
        sessions: the traces; a request without `think_time_s` has gap 0.
        gap_cap_s: seconds; `float("inf")` for no cap.
        tok_s: E2E speed of the server that replays them: service = output tokens / tok_s. None takes the service time that
            the trace recorded (`api_time_s`), and 0 where it recorded none.
        gaps: `recorded` takes `think_time_s` as it is, `bounded` no more than the time between the two starts (`closed_loop.gap_s`
            says why).

    Raises:
        MetricError: a negative cap, a speed that is not positive, an unknown `gaps`, or neither service time nor gaps.
    """
    _demand(gap_cap_s >= 0, f"gap_cap_s={gap_cap_s}: use seconds, 0 or more")
    _demand(tok_s is None or tok_s > 0, f"tok_s={tok_s}: use a positive speed")
    _demand(gaps in ("recorded", "bounded"), f"gaps={gaps!r}: use 'recorded' or 'bounded'")
    service = idle = 0.0
    for session in sessions:
        for agent in session.agents:
            previous_s = 0.0
            for request in agent:
                service += request.output_tokens / tok_s if tok_s else request.api_time_s or 0.0
                idle += min(gap_s(request, previous_s, gaps), gap_cap_s)
                previous_s = request.start_s
    _demand(service + idle > 0, "sessions: have neither service time nor gaps")
    return service / (service + idle)


def _pairs(latencies_s: Sequence[float], output_tokens: Sequence[int]) -> None:
    _demand(len(latencies_s) == len(output_tokens) > 0, f"latencies_s and output_tokens: have {len(latencies_s)} and {len(output_tokens)} entries; "
            "give one of each a request, and at least one request")
