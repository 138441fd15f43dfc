"""Steps in which nothing changes but lengths, advanced in one go: the same whole numbers as step by step.

While a batch only decodes, nobody ends in it and nobody can join it, every step adds a token to each request. A rank's time is then an affine
function of the step's number, and the slowest rank's too, as long as that stays the same rank. So the end of any step is a sum of a series.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..request import Request
from ..schedule import Scheduler, Step

__all__ = ["Span", "StretchScheduler", "leader"]


class Span(NamedTuple):
    """`steps` steps from `start` on, of which number i (from 0) takes `first` + i * `growth`. Picoseconds."""

    start: int
    first: int
    growth: int
    steps: int

    def took(self, i: int) -> int:
        """Step number i."""
        return self.first + i * self.growth

    def end(self, n: int) -> int:
        """When `n` steps are over."""
        return self.start + n * self.first + self.growth * (n * (n - 1) // 2)

    def over(self, before: int) -> int:
        """How many steps, but not the last one, end before that moment."""
        low, high = 0, self.steps - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.end(middle) < before:
                low = middle
            else:
                high = middle - 1
        return low

    def equal(self, first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
        """(took // width, how many) of steps `first` to `last`, those of equal quotients together."""
        i = first
        while i < last:
            quotient = self.took(i) // width
            stop = last if not self.growth else min(last, -(-((quotient + 1) * width - self.first) // self.growth))
            yield quotient, stop - i
            i = stop


def leader(now: Sequence[int], growth: Sequence[int]) -> tuple[int, int]:
    """Which rank is the slowest, and for how many steps it stays so: rank r takes now[r] + i * growth[r] in step i."""
    first = max(range(len(now)), key=lambda rank: (now[rank], growth[rank]))
    steps = 1 << 60
    for ahead, faster in zip(now, growth):
        if faster > growth[first]:
            steps = min(steps, (now[first] - ahead) // (faster - growth[first]) + 1)
    return first, steps


class StretchScheduler(Scheduler):
    """The engine's, which can also take several decode steps at once."""

    def most_steps(self, step: Step) -> int:
        """How many steps like this one, which is decided, follow one another with nobody ending before the last of them is over, nobody losing
        blocks and nobody joining; 1 where that is not sure.

        Nobody can join: who waits now was refused a place, the tokens or the blocks for it, and all of these can only become fewer.
        """
        if step.prefills or step.preempted or step.failed:
            return 1
        most = 1 << 60
        for request in step.decodes:
            if request.num_computed_tokens < request.num_prompt_tokens:
                return 1
            most = min(most, request.max_num_tokens - request.num_tokens)
        free = self.pool.num_free_blocks
        if most > 1 and self._lacking(step.decodes, most - 1) > free:
            low, high = 0, most - 1
            while low < high:
                middle = (low + high + 1) // 2
                if self._lacking(step.decodes, middle) <= free:
                    low = middle
                else:
                    high = middle - 1
            most = low + 1
        return most

    def _lacking(self, decodes: Sequence[Request], tokens: int) -> int:
        """Blocks that they lack to be so many tokens longer."""
        size = self.pool.block_size
        return sum(max(0, -(-(request.num_tokens + tokens - request.capacity) // size)) for request in decodes)

    def advance(self, decodes: Sequence[Request], tokens: int, now: int) -> None:
        """`tokens` times `update` and `schedule`, the last time now."""
        size = self.pool.block_size
        for request in decodes:
            request.num_tokens += tokens
            request.num_computed_tokens += tokens
            request.works(tokens)
            request.timeline.token_s.more(tokens, now)
            if request.num_tokens > request.capacity:
                self._extend(request, -(-(request.num_tokens - request.capacity) // size))
            if request.num_computed_tokens % size < tokens:
                self._offer_blocks(request)
