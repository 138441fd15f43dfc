"""What the book has beside a claim: its own value, how that came about, and the status that follows.

A claim's own value is derived by its formula, or comes from a cell that called `minengine.claims.record`, or from a stored
measurement; nobody types it.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from minengine.claims import Claim
    from minengine.results import Measurement

__all__ = ["Own", "STATUSES", "own_value", "ratio"]

STATUSES = {
    "holds": "our formula gives it to the digits stated",
    "holds as stated": "we measured, bounded or predicted it, and it stands in the form in which it was stated",
    "differs": "we got another value; the chapter says why",
    "measured": "we measured it, on other data or another machine than the source did",
    "bounded": "we have an ideal or a bracket, and a reason for the distance",
    "predicted": "our model of costs predicts it; nothing was measured",
    "simulated": "the cluster simulator predicts it",
    "invented data": "the public traces were not at hand when these pages were built, so our number proves nothing",
    "needs a GPU": "only a GPU run can show it, and none is stored yet",
    "cannot be checked": "nobody can from here; the reason is given",
    "not built yet": "the experiment is still to be built",
}
MORE_DECIMALS = 2  # of a derived value than the claim was stated with, so that a rounding can be seen
SIGNIFICANT = 4  # digits of a measured value


@dataclass(frozen=True)
class Own:
    status: str  # one of STATUSES
    value: Any = None  # a number or a pair; None where there is none yet
    label: str = ""  # whose kind of number `value` is
    how: str = ""  # formula; or samples, spread, machine and date
    formula: bool = False  # `how` is code
    recorded: bool = False  # by a cell, which has an anchor
    decimals: int = MORE_DECIMALS


def own_value(claim: Claim, claims: Mapping[str, Claim], records: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Measurement]) -> Own:
    """`records` and `stored` are by claim id; a cell of the book goes before a stored measurement."""
    from minengine.claims import derive, digits, number

    if claim.id in records:
        record = records[claim.id]
        decimals = _decimals(record["value"])
        samples = [f"n = {number(record['n'])}"] if record["n"] else []
        spread = [number(record["spread"], decimals)] if record["spread"] else []
        how = "; ".join([*filter(None, [record["note"]]), *samples, *spread])
        known = {"simulated": "simulated", "invented": "invented data"}.get(record["label"])
        status = known or {True: "holds as stated", False: "differs", None: "predicted" if record["label"] == "reasoned" else "measured"}[record["holds"]]
        return Own(status, record["value"], record["label"], how, recorded=True, decimals=decimals)
    if claim.formula:
        value, decimals = derive(claims, claim.id), digits(claim.value) + MORE_DECIMALS
        if claim.book == "derive":
            status = "holds" if round(value, digits(claim.value)) == claim.value else "differs"
            return Own(status, value, "derived", claim.formula, True, decimals=decimals)
        inside = isinstance(value, list) and isinstance(claim.value, (int, float)) and value[0] <= claim.value <= value[1]
        return Own("holds as stated" if inside else "bounded", value, "derived", claim.formula, True, decimals=decimals)
    if claim.id in stored:
        kept = stored[claim.id]
        decimals = _decimals(kept.median)
        how = f"n = {number(kept.n)}; {number(kept.spread, decimals)}; {kept.machine}, {kept.date:%d %B %Y}; {kept.command}"
        return Own("measured", kept.median, "measured", how, decimals=decimals)
    return Own({"open": "cannot be checked", "gpu": "needs a GPU"}.get(claim.book, "not built yet"))


def _decimals(value: Any) -> int:
    size = max(map(abs, value if isinstance(value, (list, tuple)) else [value]))
    return max(0, SIGNIFICANT - 1 - floor(log10(size))) if size else 0


def ratio(own: Any, stated: Any) -> str:
    """Own value over the stated one, as text; nothing where the two are no numbers."""
    if isinstance(own, (list, tuple)):
        ends = [ratio(end, stated) for end in own]
        return " to ".join(ends) if all(ends) else ""
    if not all(isinstance(one, (int, float)) for one in (own, stated)) or not stated:
        return ""
    return f"{own / stated:.2f}" if abs(own / stated) >= 0.1 else f"{own / stated:.2g}"
