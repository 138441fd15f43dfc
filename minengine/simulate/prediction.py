"""A prediction beside what was reported: how far off, and what hangs on what was assumed."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Prediction", "shown", "table"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One figure of the source that the models here were not fitted to.

    Attributes:
        id: of the claim in book/claims.yml that it is; of its own where there is none (`claimed` is false).
        what, unit: in words.
        reported, predicted: a number each, or words.
        within: the relative error that was asked for; None: none was, or the figures are words.
        label: `reasoned` (a formula) or `simulated` (a run of the cluster).
        note: why it misses, or what is behind it.
        spread: predicted under other assumptions, by assumption.
    """

    id: str
    what: str
    unit: str
    reported: float | str
    predicted: float | str
    within: float | None = None
    claimed: bool = True
    label: str = "reasoned"
    note: str = ""
    spread: dict[str, float] = field(default_factory=dict)

    @property
    def claim(self) -> str:
        """Its id in book/claims.yml; empty where it is no claim."""
        return self.id if self.claimed else ""

    @property
    def error(self) -> float | None:
        """predicted / reported - 1; None for words."""
        return None if isinstance(self.reported, str) else self.predicted / self.reported - 1

    @property
    def holds(self) -> bool | None:
        """Within what was asked for; None where nothing was."""
        if isinstance(self.reported, str):
            return self.predicted == self.reported
        return None if self.within is None else abs(self.error) <= self.within

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "error": self.error, "holds": self.holds}


def shown(value: float | str) -> str:
    """Three digits that count, and no more; words as they are."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(predictions: Sequence[Prediction]) -> str:
    """Plain text, a line each and its notes below."""
    rows = [("", "predicted", "reported", "error", "asked", "label")]
    for one in predictions:
        error = "" if one.error is None else f"{100 * one.error:+.1f}%"
        asked = {None: "", True: "holds", False: "misses"}[one.holds] + (f" ({100 * one.within:.0f}%)" if one.within else "")
        rows.append((f"{one.what}, {one.unit}" if one.unit else one.what, shown(one.predicted), shown(one.reported), error, asked, one.label))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if i in (0, 5) else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    text = [lines[0]]
    for line, one in zip(lines[1:], predictions):
        text.append(line)
        if one.note:
            text.append(f"    {one.note}")
        if one.spread:
            text.append("    if " + "; ".join(f"{name}: {shown(value)}" for name, value in one.spread.items()))
    return "\n".join(text)
