"""The claims registry, `book/claims.yml`: what others report, and what this book sets beside it.

Chapters take the numbers of their prose from here, the ledger is generated from it, and a test evaluates every `formula` with
`minengine.arithmetic`. It needs a checkout: the registry is part of the book, not of the installed package.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, Iterable, Mapping

from . import arithmetic

__all__ = ["BOOK_VALUES", "Claim", "ClaimError", "LABELS", "RECORD_LABELS", "RECORD_MIME", "REGISTRY", "claims_table", "derive", "digits",
           "number", "read_claims", "record"]

REGISTRY = Path(__file__).resolve().parents[1] / "book" / "claims.yml"
LABELS = ("reported", "measured", "reasoned", "simulated")
BOOK_VALUES = ("derive", "bound", "simulate", "run", "gpu", "open")
RECORD_LABELS = ("measured", "simulated", "reasoned", "invented")  # invented: from traces that nobody recorded, where the public ones are missing
RECORD_MIME = "application/vnd.minengine.claim+json"
OPTIONAL = {"formula", "reason"}
WORDS = {1_000_000: "million", 1_000_000_000: "billion", 1_000_000_000_000: "trillion"}


class ClaimError(ValueError):
    """A registry or a record that cannot be used; the message names the claim, the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    value: Any  # a number, a pair [low, high], numbers by name, or words
    unit: str
    label: str  # whose kind of number `value` is, one of LABELS
    book: str  # how the book gets its own value, one of BOOK_VALUES
    source: str
    what: str
    chapters: tuple[int, ...]  # chapters that check it; none as long as its experiment is not built
    formula: str | None = None  # the book's own value: an expression in functions of minengine.arithmetic and other claims' ids
    reason: str | None = None  # why nothing can be checked, or why the book's own value is another
    section: str  # of the registry


def read_claims(path: str | Path = REGISTRY) -> dict[str, Claim]:
    """All claims by id.

    Raises:
        ClaimError: the file is not there, or a claim lacks a field, has an unknown one, or repeats an id.
    """
    import yaml

    try:
        sections = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClaimError(f"claims registry: cannot be opened ({error.strerror}); run from a checkout, where it is book/claims.yml") from error
    claims: dict[str, Claim] = {}
    for section, rows in sections.items():
        for row in rows:
            name = row.get("id", f"a claim of section '{section}'")
            _check_row(name, row)
            if name in claims:
                raise ClaimError(f"claim '{name}', field 'id': is used twice; give each claim its own")
            claims[name] = Claim(**{**row, "chapters": tuple(row["chapters"])}, section=section)
    return claims


def _check_row(name: str, row: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(Claim)} - {"section"}
    needed = known - OPTIONAL
    for field in needed - set(row):
        raise ClaimError(f"claim '{name}', field '{field}': is missing; every claim has {', '.join(sorted(needed))}")
    for field in set(row) - known:
        raise ClaimError(f"claim '{name}', field '{field}': is unknown; use {', '.join(sorted(known))}")
    for field in ("unit", "source", "what"):
        if not isinstance(row[field], str):
            raise ClaimError(f"claim '{name}', field '{field}': is {row[field]!r}; give a text, in quotes where it is empty")
    for field, allowed in (("label", LABELS), ("book", BOOK_VALUES)):
        if row[field] not in allowed:
            raise ClaimError(f"claim '{name}', field '{field}': is {row[field]!r}; use one of {', '.join(allowed)}")
    if row["book"] == "derive" and "formula" not in row or "formula" in row and row["book"] not in ("derive", "bound"):
        raise ClaimError(f"claim '{name}', field 'formula': belongs to book: derive, where it must be, and to bound; add it or change 'book'")
    if row["book"] == "open" and not row.get("reason"):
        raise ClaimError(f"claim '{name}', field 'reason': is missing; say why nobody can check it from here")
    value = row["value"]
    if isinstance(value, list) and not (len(value) == 2 and value[0] < value[1]):
        raise ClaimError(f"claim '{name}', field 'value': a list is a pair [low, high], not {value}; write other lists as words")


def derive(claims: Mapping[str, Claim], name: str) -> Any:
    """The book's own value of a claim with a formula, with other claims' stated values put in.

    Raises:
        ClaimError: the claim has no formula, or the formula uses a name that is neither a claim nor in minengine.arithmetic.
    """
    formula = claims[name].formula
    if formula is None:
        raise ClaimError(f"claim '{name}', field 'formula': is missing; only derived claims have a value of the book's own here")
    names = {key: claim.value for key, claim in claims.items()} | {key: getattr(arithmetic, key) for key in arithmetic.__all__}  # functions win
    try:
        return eval(formula, {"__builtins__": {"sum": sum}}, names)  # our own registry, and no other builtins
    except NameError as error:
        raise ClaimError(f"claim '{name}', field 'formula': {error}; use claims' ids and functions of minengine.arithmetic") from error


def record(name: str, value: Any, *, label: str = "measured", n: int | None = None, spread: tuple[float, float] | None = None,
           holds: bool | None = None, note: str = "") -> None:
    """Put the book's own value of a claim into the outputs of the cell that runs this, where the ledger reads it when the book is built.

    Args:
        name: the claim's id; one whose own value is run, simulated, bounded or a GPU's. Derived ones the ledger derives itself.
        value: in the claim's unit: a number, or a pair (low, high).
        n, spread: how many samples, and the interval that they span.
        holds: a comparison that this cell made; leave it out where the two numbers are not of one kind.
        note: what was measured, in a few words, where it is not quite what the claim says.

    Raises:
        ClaimError: an unknown claim or label, a claim that no cell can measure, or a value that is no number.
    """
    claim = read_claims().get(name)
    if claim is None:
        raise ClaimError(f"record '{name}': there is no such claim; add it to book/claims.yml")
    if claim.book in ("derive", "open"):
        raise ClaimError(f"record '{name}': its own value comes by book: {claim.book}, not from a cell; change that or leave the record out")
    if label not in RECORD_LABELS:
        raise ClaimError(f"record '{name}', label={label!r}: use one of {', '.join(RECORD_LABELS)}")
    if n is not None and n < 1:
        raise ClaimError(f"record '{name}', n={n}: use at least 1, or leave it out")

    def plain(numbers: Any, field: str) -> Any:
        if isinstance(numbers, (tuple, list)) and len(numbers) == 2:
            return [plain(one, field) for one in numbers]
        result = float(numbers) if not isinstance(numbers, (bool, str)) and hasattr(numbers, "__float__") else float("nan")
        if not isfinite(result):
            raise ClaimError(f"record '{name}', {field}={numbers!r}: use a finite number or a pair of them")
        return int(result) if result.is_integer() else result

    kept = {"id": name, "value": plain(value, "value"), "label": label, "n": None if n is None else int(n),
            "spread": None if spread is None else plain(tuple(spread), "spread"),
            "holds": None if holds is None else bool(holds), "note": note}
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # outside a notebook there are no outputs to put it in
        from IPython.display import display

        display({RECORD_MIME: kept, "text/plain": f"for the ledger: {claim.what}, {number(kept['value'])} {claim.unit} ({label})"}, raw=True)


def digits(value: Any) -> int:
    """Decimals a claim was stated with: 23.8 and 4.0 have 1, 164 has 0."""
    text = repr(value)
    return len(text.partition(".")[2]) if isinstance(value, float) and "e" not in text else 0


def number(value: Any, decimals: int | None = None) -> str:
    """A value as prose writes it: 6,666; 1.09 million; 0.93 to 0.96; words as they are.

    `decimals` is how many to show at most; without it a number keeps those it was stated with.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {number(one, decimals)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return " to ".join(number(one, decimals) for one in value)
    if not isinstance(value, (int, float)):
        return str(value)
    for size, word in sorted(WORDS.items(), reverse=True):
        if abs(value) >= size:
            return f"{value / size:.2f}".rstrip("0").rstrip(".") + f" {word}"
    text = f"{value:,.{digits(value) if decimals is None else decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals is not None and "." in text else text


def claims_table(claims: Mapping[str, Claim], own: Iterable[tuple[str, str, str]]) -> str:
    """A Markdown table of claims beside the book's own values, given as (claim id, own value as text, label of the own value)."""
    rows = ["| claim | stated | here |", "|---|---:|---:|"]
    for name, value, label in own:
        claim = claims[name]
        rows.append(f"| {claim.what} | {number(claim.value)} {claim.unit} ({claim.label}) | {value} ({label}) |")
    return "\n".join(rows)
