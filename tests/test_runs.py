"""Runs against a plain set: the same numbers, and taken in the stretches that are promised."""
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minengine.kv.runs import Runs

SIZE = 24


def stretches(numbers):
    """[(start, stop)] of a set of numbers, ascending."""
    found = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


class Against(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runs, self.inside = Runs(SIZE), set()

    @rule(numbers=st.sets(st.integers(0, SIZE - 1)), data=st.data())
    def add(self, numbers, data):
        new = data.draw(st.permutations(sorted(numbers - self.inside)))
        self.runs.add(new)
        self.inside |= set(new)

    @rule(number=st.integers(0, SIZE - 1))
    def remove(self, number):
        if number in self.inside:
            self.runs.remove(number)
            self.inside.remove(number)
        else:
            with pytest.raises(KeyError):
                self.runs.remove(number)

    @rule(n=st.integers(0, SIZE), after=st.none() | st.integers(0, SIZE - 1))
    def take(self, n, after):
        if n > len(self.inside):
            with pytest.raises(ValueError, match=f"{n} numbers .* {len(self.inside)} are there"):
                self.runs.take(n)
            return
        taken, rest = self.runs.take(n, after), list(stretches(self.inside))
        after = None if after in self.inside else after  # then it is no end to go on from
        assert len(taken) == n
        while taken:
            following = [run for run in rest if after is not None and run[0] == after + 1]
            fitting = [b - a for a, b in rest if b - a >= len(taken)]
            length = following[0][1] - following[0][0] if following else min(fitting) if fitting else max(b - a for a, b in rest)
            part = min(length, len(taken))
            run = next(run for run in rest if run[0] == taken[0])  # from a stretch's beginning, so that its rest goes on
            assert run[1] - run[0] == length and (not following or run in following)
            assert taken[:part] == list(range(run[0], run[0] + part))
            self.inside -= set(taken[:part])
            rest.remove(run)
            taken, after = taken[part:], None

    @invariant()
    def same(self):
        self.runs.check()
        assert {number for number in range(SIZE) if number in self.runs} == self.inside and self.runs.count == len(self.inside)


Against.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRuns = Against.TestCase


def test_of_equal_stretches_the_first_to_be_there_goes_first():
    runs = Runs(9)
    for start in (6, 0, 3):
        runs.add_run(start, start + 2)
    assert [runs.take(2) for _ in range(3)] == [[6, 7], [0, 1], [3, 4]]
