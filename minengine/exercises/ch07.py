"""Exercises of "Four bits a value". The references are the book's formula and the formats of `minkernels.fp4`."""
from __future__ import annotations

from random import Random

from ..arithmetic import untouched_state
from .kinds import Function

__all__ = ["EXERCISES"]

GROUP = 32  # values of an MXFP4 group


def draw_state(random: Random) -> tuple[float, int, int]:
    """(capacity ratio, row before, row after) of a cache that keeps something beside its rows."""
    after = random.randint(100, 1000)
    before, beside = after + random.randint(50, 1000), random.uniform(1, 500)
    return (before + beside) / (after + beside), before, after


def read_back(values: list[float]) -> list[float]:
    """An MXFP4 group written and read."""
    import torch  # only when this exercise is checked

    from minkernels.fp4 import mxfp4_dequantize, mxfp4_quantize

    return mxfp4_dequantize(*mxfp4_quantize(torch.tensor(values, dtype=torch.float32))).tolist()


def draw_group(random: Random) -> tuple[list[float]]:
    """Multiples of a power of two, so that ties are ties and float32 holds every number."""
    step = 2.0 ** random.randint(-12, 6)
    return ([random.randint(-most, most) * step for most in random.choices((2, 20, 100), k=GROUP)],)


def fewest_runs(percent: float, n: int) -> int:
    """Runs of n questions whose mean prints as `percent`, with two decimals."""
    from ..accuracy import questions  # brings the engine, only when this exercise is checked

    runs = questions(percent, n).runs
    assert runs is not None, "drawn from a few runs"
    return runs


def draw_score(random: Random) -> tuple[float, int]:
    """Up to four runs: no average of so few lies right between two scores, which would leave the answer open."""
    n, runs = random.choice((113, 164, 500, 1319)), random.randint(1, 4)
    answers = runs * n
    return round(100 * random.randint(answers // 4, answers) / answers, 2), n


EXERCISES = {
    "ex1": Function(
        reference=untouched_state, draw=draw_state, corners=((1.5, 576, 352), (1.25, 576, 352)),
        hint="Write the ratio of the two caches with x in both rows, multiply out, and look for x."),
    "ex2": Function(
        reference=read_back, draw=draw_group, corners=(([6.0] * GROUP,), ([0.0] * GROUP,), ([7.9, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 4,)),
        hint="Look at a value right between two magnitudes, at one above six scales, and at a group whose largest is a power of two."),
    "ex3": Function(
        reference=fewest_runs, draw=draw_score, corners=((99.39, 164), (99.09, 164), (97.5, 1319), (100.0, 40)),
        hint="Of r runs there are r times as many answers, and a whole number of them is right. Does one print so?"),
}
