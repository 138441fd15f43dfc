"""Exercises of "An agent turn is a cache lookup"."""
from __future__ import annotations

from functools import cache
from os.path import commonprefix
from pathlib import Path
from random import Random

from ..claims import derive, read_claims
from ..workload.metrics import decode_tok_s, e2e_tok_s, in_flight_share, itl_s
from ..workload.traces import Session, TraceRequest, find_traces, read_agentx
from .kinds import Function, Number

__all__ = ["EXERCISES"]


def flattery(latency_s: float, ttft_s: float, output_tokens: int) -> float:
    """By how many times the inverse of the ITL exceeds the E2E speed."""
    return decode_tok_s(itl_s(latency_s, ttft_s, output_tokens)) / e2e_tok_s(latency_s, output_tokens)


def draw_request(random: Random) -> tuple[float, float, int]:
    ttft_s = random.uniform(0.05, 10)
    return ttft_s + random.uniform(0.1, 60), ttft_s, random.randint(2, 2000)


def last_turn_hits(agent: list[TraceRequest]) -> list[int]:
    """Leading blocks that each request shares with the one before it."""
    return [0] + [len(commonprefix([before.hash_ids, request.hash_ids])) for before, request in zip(agent, agent[1:])]


def draw_agent(random: Random) -> tuple[list[TraceRequest]]:
    """Up to eight prompts that mostly extend the one before, and sometimes change, shrink or return to an older one."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(random.randint(1, 8)):
        kept = random.choice(prompts[-2:]) if prompts else ()
        if random.random() < 0.4:
            kept = kept[: random.randint(0, len(kept))]
        new = tuple(random.randint(1, 40) for _ in range(random.randint(0 if kept else 1, 4)))
        after = kept[len(kept) // 2:] if random.random() < 0.3 else ()  # blocks found again behind a change: no hit
        prompts.append(kept + new + after)
    return ([request(ids) for ids in prompts],)


def request(ids: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(start_s=0.0, input_tokens=64 * len(ids), output_tokens=1, hash_ids=ids, block_size=64)


def share_at(cap: float) -> float:
    return in_flight_share(sessions(find_traces().agentx), max(cap, 0.0), read_claims()["c66_tok_s_user"].value)


@cache
def sessions(folder: Path) -> tuple[Session, ...]:
    return tuple(read_agentx(folder))


EXERCISES = {
    "ex1": Function(
        reference=flattery, draw=draw_request, corners=((8.0, 3.0, 200), (2.0, 0.0, 2)),
        hint="E2E has all tokens over the whole time; ITL starts at the first token and counts the gaps behind it."),
    "ex2": Number(
        value=lambda: derive(read_claims(), "c66_in_flight_share"), effect=share_at,
        hint="It is the share that this cap gives: while that is too large the cap must grow."),
    "ex3": Function(
        reference=last_turn_hits, draw=draw_agent, corners=(([request((1, 2, 3)), request((1, 9, 3)), request((1, 2, 3))],),),
        hint="Compare with the previous prompt only, and stop at the first block that differs."),
}
