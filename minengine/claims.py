"""The claims registry, `book/claims.yml`: what others report, and what this book sets beside it.

Chapters take the numbers of their prose from here, the ledger is generated from it, and a test evaluates every `formula` with
`minengine.arithmetic`. It needs a checkout: the registry is part of the book, not of the installed package.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Iterable, Mapping

from . import arithmetic

__all__ = ["BOOK_VALUES", "Claim", "ClaimError", "LABELS", "REGISTRY", "claims_table", "derive", "digits", "read_claims"]

REGISTRY = Path(__file__).resolve().parents[1] / "book" / "claims.yml"
LABELS = ("reported", "measured", "reasoned", "simulated")
BOOK_VALUES = ("derive", "bound", "simulate", "run", "gpu", "open")


class ClaimError(ValueError):
    """A registry that cannot be used; the message names the claim, the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    value: Any
    unit: str
    label: str  # whose kind of number `value` is, one of LABELS
    book: str  # how the book gets its own value, one of BOOK_VALUES
    source: str
    what: str
    chapters: tuple[int, ...]  # chapters that check it
    formula: str | None = None  # the book's own value: an expression in functions of minengine.arithmetic and other claims' ids


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
    known = {field.name for field in fields(Claim)}
    needed = known - {"formula"}
    for section, rows in sections.items():
        for row in rows:
            name = row.get("id", f"a claim of section '{section}'")
            for field in needed - set(row):
                raise ClaimError(f"claim '{name}', field '{field}': is missing; every claim has {', '.join(sorted(needed))}")
            for field in set(row) - known:
                raise ClaimError(f"claim '{name}', field '{field}': is unknown; use {', '.join(sorted(known))}")
            for field, allowed in (("label", LABELS), ("book", BOOK_VALUES)):
                if row[field] not in allowed:
                    raise ClaimError(f"claim '{name}', field '{field}': is {row[field]!r}; use one of {', '.join(allowed)}")
            if (row["book"] == "derive") != ("formula" in row):
                raise ClaimError(f"claim '{name}', field 'formula': belongs to book: derive and only there; add it or change 'book'")
            if name in claims:
                raise ClaimError(f"claim '{name}', field 'id': is used twice; give each claim its own")
            claims[name] = Claim(**{**row, "chapters": tuple(row["chapters"])})
    return claims


def derive(claims: Mapping[str, Claim], name: str) -> Any:
    """The book's own value of a derived claim: its formula, with other claims' stated values put in.

    Raises:
        ClaimError: the claim has no formula, or the formula uses a name that is neither a claim nor in minengine.arithmetic.
    """
    formula = claims[name].formula
    if formula is None:
        raise ClaimError(f"claim '{name}', field 'formula': is missing; only derived claims have a value of the book's own here")
    names = {key: claim.value for key, claim in claims.items()} | {key: getattr(arithmetic, key) for key in arithmetic.__all__}  # functions win
    try:
        return eval(formula, {"__builtins__": {}}, names)  # our own registry, and no builtins
    except NameError as error:
        raise ClaimError(f"claim '{name}', field 'formula': {error}; use claims' ids and functions of minengine.arithmetic") from error


def digits(value: Any) -> int:
    """Decimals a claim was stated with: 23.8 has 1, 164 has 0."""
    text = repr(value)
    return len(text.partition(".")[2].rstrip("0")) if isinstance(value, float) and "e" not in text else 0


def claims_table(claims: Mapping[str, Claim], own: Iterable[tuple[str, str, str]]) -> str:
    """A Markdown table of claims beside the book's own values, given as (claim id, own value as text, label of the own value)."""
    rows = ["| claim | stated | here |", "|---|---:|---:|"]
    for name, value, label in own:
        claim = claims[name]
        values = claim.value if isinstance(claim.value, list) else [claim.value]
        stated = " to ".join(f"{v:,}" if isinstance(v, (int, float)) else str(v) for v in values)
        rows.append(f"| {claim.what} | {stated} {claim.unit} ({claim.label}) | {value} ({label}) |")
    return "\n".join(rows)
