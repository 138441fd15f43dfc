"""Exercises of "Sizing a deployment". The references count in a small closed loop, sort times, and fill decoders one after another."""
from __future__ import annotations

import math
from random import Random

from ..arithmetic import kv_copies
from ..workload.metrics import interactivity_q
from .kinds import Function

__all__ = ["EXERCISES"]


def in_flight(sessions: int, service_s: float, gap_s: float) -> float:
    """Mean requests in flight, when each session asks for `service_s` and pauses for `gap_s`, again and again."""
    laps = 1000
    return sum(laps * service_s for _ in range(sessions)) / (laps * (service_s + gap_s))


def draw_loop(random: Random) -> tuple[int, float, float]:
    return random.randint(1, 500), round(random.uniform(0.1, 30), 2), round(random.uniform(0, 60), 2)


def speed_of_the_slow(latencies_s: list[float], output_tokens: list[int]) -> float:
    return interactivity_q(latencies_s, output_tokens, 90)


def draw_requests(random: Random) -> tuple[list[float], list[int]]:
    n = random.choice((1, 2, 11, random.randint(2, 40)))
    return [round(random.uniform(0.2, 60), 2) for _ in range(n)], [random.randint(1, 900) for _ in range(n)]


def decoders(sessions: int, context_tokens: int, card_tokens: int, name: str) -> int:
    """The fewest decoders that hold the contexts of all these sessions, each whole on one of them; 0 if none is large enough for one."""
    cards = int(name.partition("+")[0].removeprefix("TP"))
    each = cards * card_tokens // kv_copies(name) // context_tokens  # sessions that fit on one
    return math.ceil(sessions / each) if each else 0


def draw_deployment(random: Random) -> tuple[int, int, int, str]:
    return (random.randint(1, 200), random.randint(20_000, 200_000), random.choice((100_000, 436_000, 1_090_000, 1_720_000)),
            random.choice(("TP1", "TP2", "TP4", "TP8", "TP8+DCP2", "TP8+DCP4", "TP4+DCP4")))


EXERCISES = {
    "ex1": Function(
        reference=in_flight, draw=draw_loop, corners=((66, 4.4, 7.9), (1, 1.0, 0.0), (10, 2.0, 2.0)),
        hint="What part of its time has one session a request in flight? And how many sessions are there?"),
    "ex2": Function(
        reference=speed_of_the_slow, draw=draw_requests, corners=(([10.0], [100]), ([1.0, 10.0], [100, 100]), ([2.0] * 11, list(range(10, 120, 10)))),
        hint="Seconds a token of each request; the value that nine tenths of them stay below, with `percentile(values, 90)`; only then one over it."),
    "ex3": Function(
        reference=decoders, draw=draw_deployment, corners=((66, 146_000, 1_720_000, "TP4"), (1, 200_000, 100_000, "TP1"), (16, 146_000, 1_720_000, "TP8")),
        hint="How many different tokens does a whole decoder hold, if its cards have room for `card_tokens` each and every token is kept several times? "
             "A session lies on one decoder, whole, so round down there, and up at the end."),
}
