"""Runs: a set of numbers that knows its stretches of neighbours by their length. The block pool keeps what it can hand out in one.

Everything costs O(log of the number of different lengths), and a scan for the end of a stretch that runs in C: a few microseconds with
100,000 numbers. Stretches never touch: neighbours are always one stretch.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Iterable

__all__ = ["Runs"]


class Runs:
    """A subset of `range(size)`, in stretches (start, stop)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0  # numbers inside
        self._inside = bytearray(size + 1)  # 1 for each of them; the last byte stays 0 and ends the last stretch
        self._starts: dict[int, OrderedDict[int, None]] = {}  # by length, those that got it first in front; a dict is slow to lose its first key
        self._lengths: list[int] = []  # the keys, ascending
        # What is left of the stretch that was cut last is most often the next to be cut, so it stays out of that index. Empty: no such stretch.
        self._cut_start = self._cut_stop = size + 1

    def __contains__(self, number: int) -> bool:
        return self._inside[number] == 1

    def add(self, numbers: Iterable[int]) -> None:
        """Put in numbers that are not inside, each once."""
        ordered = sorted(numbers)
        first = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                self.add_run(ordered[first], ordered[i - 1] + 1)
                first = i

    def add_run(self, start: int, stop: int) -> None:
        """Put in start to stop - 1, at least one number and none of them inside; joins what it touches."""
        inside, low, high = self._inside, start, stop
        if start and inside[start - 1]:
            low = inside.rfind(0, 0, start) + 1
            self._drop(low, start)
        if inside[stop]:
            high = inside.find(0, stop)
            self._drop(stop, high)
        if stop - start == 1:
            inside[start] = 1  # a fifth of the time of a slice
        else:
            inside[start:stop] = b"\1" * (stop - start)
        self.count += stop - start
        self._keep(low, high)

    def remove(self, number: int) -> None:
        """Take out one number.

        Raises:
            KeyError: it is not inside.
        """
        inside = self._inside
        if not inside[number]:
            raise KeyError(number)
        low, high = inside.rfind(0, 0, number) + 1, inside.find(0, number)
        self._drop(low, high)
        inside[number] = 0
        self.count -= 1
        self._keep(low, number)
        self._keep(number + 1, high)

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Take out `n` numbers in as few ascending stretches as can be had cheaply: what follows `after` if that is not inside, then the
        shortest stretch that holds the rest, else the longest there is and so on. Of equal ones the one that has been there longest.

        Raises:
            ValueError: fewer than `n` are inside; nothing is taken.
        """
        if n > self.count:
            raise ValueError(f"{n} numbers are asked for and {self.count} are there")
        taken: list[int] = []
        inside = self._inside
        if after is not None and n and inside[after + 1] and not inside[after]:
            taken += self._cut(after + 1, self._cut_stop if after + 1 == self._cut_start else inside.find(0, after + 1), n)
        lengths = self._lengths
        while len(taken) < n:
            missing, rest, length = n - len(taken), self._cut_stop - self._cut_start, 0
            if lengths:
                i = bisect_left(lengths, missing)
                length = lengths[i] if i < len(lengths) else lengths[-1]
            if length < missing if length < rest else missing <= rest < length:
                taken += self._cut(self._cut_start, self._cut_stop, missing)
            else:
                start = next(iter(self._starts[length]))
                taken += self._cut(start, start + length, missing)
        return taken

    def check(self) -> None:
        """Raise AssertionError unless the index holds exactly the stretches of what is inside."""
        stretches, start = set(), None
        for number, inside in enumerate(self._inside):
            if inside and start is None:
                start = number
            elif not inside and start is not None:
                stretches.add((start, number))
                start = None
        kept = [(start, start + length) for length, starts in self._starts.items() for start in starts]
        if self._cut_start < self._cut_stop:
            kept.append((self._cut_start, self._cut_stop))
        assert len(kept) == len(set(kept)) and set(kept) == stretches, "the stretches in the index are not those that are there"
        assert self._lengths == sorted(self._starts) and all(self._starts.values()), "the list of lengths is wrong"
        assert self.count == sum(self._inside) and not self._inside[self.size], "the count of numbers is wrong"

    def _cut(self, start: int, stop: int, n: int) -> range:
        """The first `n` numbers of a stretch, or all of it if it is shorter: its rest, where the taken ones would go on, stays together."""
        end = start + n if start + n < stop else stop
        if start != self._cut_start or end == stop:
            self._drop(start, stop)
        if end < stop:
            if start != self._cut_start:
                self._keep(self._cut_start, self._cut_stop)
            self._cut_start, self._cut_stop = end, stop
        if end - start == 1:
            self._inside[start] = 0
        else:
            self._inside[start:end] = bytes(end - start)
        self.count -= end - start
        return range(start, end)

    def _keep(self, start: int, stop: int) -> None:
        if start < stop:
            length = stop - start
            starts = self._starts.get(length)
            if starts is None:
                self._starts[length] = OrderedDict({start: None})
                insort(self._lengths, length)
            else:
                starts[start] = None

    def _drop(self, start: int, stop: int) -> None:
        if start == self._cut_start:
            self._cut_start = self._cut_stop = self.size + 1
            return
        length = stop - start
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
