"""Exercises of "Prefill and decode on different GPUs". The references try every split, count step by step, and follow a session turn by turn."""
from __future__ import annotations

from fractions import Fraction
from random import Random

from .kinds import Function

__all__ = ["EXERCISES"]


def split(prefill_s: float, decode_s: float, workers: int) -> tuple[int, int]:
    """(prefill, decode) workers that serve most requests a second; of equals the one with fewer prefill workers."""
    def work_s(prefill: int) -> Fraction:  # seconds for each request, of the side that is the slower; exact, so that a tie is one
        return max(Fraction(prefill_s) / prefill, Fraction(decode_s) / (workers - prefill))

    best = min(range(1, workers), key=work_s)
    return best, workers - best


def draw_work(random: Random) -> tuple[float, float, int]:
    return round(random.uniform(0.01, 2.0), 2), round(random.uniform(0.01, 2.0), 2), random.randint(2, 24)


def stalled(streams: int, tokens: int, chunks: int) -> float:
    """The share of gaps with a chunk: one stream's answer is written out, step by step, while each other stream sends a prompt once."""
    gaps = [False] * (tokens - 1)
    for step in range(min((streams - 1) * chunks, len(gaps))):
        gaps[step] = True
    return sum(gaps) / len(gaps)


def draw_streams(random: Random) -> tuple[int, int, int]:
    return random.randint(1, 32), random.randint(2, 400), random.randint(1, 16)


def computed(past: int, question: int, answer: int, turns: int, block: int) -> tuple[int, int]:
    """Prompt tokens computed over a session, (apart, together)."""
    totals = []
    for sees_answers in (False, True):
        length = rows = total = 0
        for turn in range(turns):
            length = past if turn == 0 else length + answer + question
            found = min(rows, length - 1) // block * block
            total += length - found
            rows = length + (answer - 1 if sees_answers else 0)  # an answer's last token has no row
        totals.append(total)
    return totals[0], totals[1]


def draw_session(random: Random) -> tuple[int, int, int, int, int]:
    return random.randint(1, 1000), random.randint(1, 100), random.randint(1, 300), random.randint(1, 8), random.choice((16, 32, 64))


EXERCISES = {
    "ex1": Function(
        reference=split, draw=draw_work, corners=((1.0, 1.0, 2), (1.0, 3.0, 4), (1.0, 1.0, 3), (0.01, 2.0, 3)),
        hint="Both sides serve the same requests, so the slower side decides. Try every split that leaves each side a worker."),
    "ex2": Function(
        reference=stalled, draw=draw_streams, corners=((1, 24, 1), (8, 25, 1), (4, 24, 8), (4, 2, 1)),
        hint="How many gaps has an answer? While it is written, how often does each of the others send a prompt?"),
    "ex3": Function(
        reference=computed, draw=draw_session, corners=((512, 16, 24, 1, 64), (512, 16, 24, 4, 64), (64, 1, 1, 2, 64), (100, 20, 100, 3, 16)),
        hint="Follow the rows that are there before each turn, on each side: whole blocks of them are found, never the last token's."),
}
