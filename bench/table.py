"""Targets, ratios and the table that is printed. Pure Python: what counts as met is decided here and nowhere else."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Iterable, Sequence

from minengine.workload.stats import Summary, summary

__all__ = ["Row", "Target", "as_json", "at_least", "at_most", "figure", "ratio", "render"]


@dataclass(frozen=True, slots=True)
class Target:
    limit: float
    at_least: bool  # else: at most

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def at_least(limit: float) -> Target:
    return Target(limit, True)


def at_most(limit: float) -> Target:
    return Target(limit, False)


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `value` is what the target judges: a ratio of medians, or a median; `low` and `high` are its spread.

    The spread of a ratio is the widest that the two middle halves allow.
    """

    what: str
    value: float
    low: float
    high: float
    unit: str  # "x" for a ratio
    target: Target | None  # None: reported, not judged
    ours: Summary
    theirs: Summary | None = None
    sample_unit: str = ""  # of ours and theirs
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met_by(self.value)


def ratio(what: str, ours: Iterable[float], theirs: Iterable[float], target: Target | None, sample_unit: str, note: str = "") -> Row:
    """ours / theirs, median over median."""
    a, b = summary(ours), summary(theirs)
    return Row(what, a.median / b.median, a.low / b.high, a.high / b.low, "x", target, a, b, sample_unit, note)


def figure(what: str, samples: Iterable[float], target: Target | None, unit: str, note: str = "") -> Row:
    """A measured quantity, judged by its median."""
    s = summary(samples)
    return Row(what, s.median, s.low, s.high, unit, target, s, None, unit, note)


def render(rows: Sequence[Row]) -> str:
    """A Markdown table: median and middle half of both sides, sample counts, the ratio, the target, whether it is met."""
    head = ("what", "ours", "n", "against", "n", "result", "target", "met")
    lines = [head, tuple("-" * len(cell) for cell in head)]
    for row in rows:
        sign = "" if row.target is None else ">= " if row.target.at_least else "<= "
        lines.append((
            row.what, _side(row.ours, row.sample_unit), str(row.ours.n),
            _side(row.theirs, row.sample_unit) if row.theirs else "", str(row.theirs.n) if row.theirs else "",
            f"{_number(row.value)}{'x' if row.unit == 'x' else ' ' + row.unit} ({_number(row.low)} to {_number(row.high)})",
            "reported" if row.target is None else f"{sign}{_number(row.target.limit)}{'x' if row.unit == 'x' else ' ' + row.unit}",
            "" if row.met is None else "yes" if row.met else "NO",
        ))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join(table + [f"  {row.what}: {row.note}" for row in rows if row.note])


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "met": row.met} for row in rows]


def _side(s: Summary, unit: str) -> str:
    return f"{_number(s.median)} {unit} ({_number(s.low)} to {_number(s.high)})"


def _number(value: float) -> str:
    """Three significant digits, without exponents."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:,.{digits}f}"
