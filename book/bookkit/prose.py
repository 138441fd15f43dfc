"""Prose has no typed quantities: a number that can be wrong is computed by a cell, or comes from the claims registry.

The build warns of each (and so fails), and a test looks at every chapter without building it.
"""
from __future__ import annotations

import re
from typing import Any, Iterator

from sphinx.application import Sphinx
from sphinx.util import logging

__all__ = ["ALLOWED", "CHECKED", "FENCE", "ROLE", "hidden_records", "prose", "setup", "typed_quantities"]

LOGGER = logging.getLogger(__name__)
CHECKED = re.compile(r"index|(?:chapters|reference)/.*")
FENCE = re.compile(r"^(```+|:::+)\{(\S+)\}(.*?)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r"\{[\w:]+\}`[^`]*`")
NOT_READ = {"code-cell", "code-block", "literalinclude", "math", "raw"}  # directives whose content is no prose
UNITS = (r"%|(?:ms|µs|us|s|tok/s|tokens?|[kKMGT]i?B|bytes?|times|requests?|sessions?|steps?|layers?|GPUs?|copies|parameters|thousand|million|billion"
         r"|trillion)\b")
QUANTITY = re.compile(rf"(?<![\w.:/-])(\d{{1,3}}(?:,\d{{3}})+|\d+\.\d+|\d+(?=\s*(?:{UNITS})))")
RECORDS, HIDES = re.compile(r"^\s*record\(", re.MULTILINE), re.compile(r":tags:.*\bremove-(?:cell|output)\b")
ALLOWED = {  # constants that nobody measures, as they stand in a sentence
    "135 million parameters": "the size that SmolLM2-135M is named after",
    "powers of 1,000": "the meaning of kB, MB and GB",
    "GiB of 1,024": "the meaning of KiB, MiB and GiB",
    "CC BY 4.0": "the text's licence",
}


def prose(text: str) -> str:
    """The text a reader reads, line for line: no front matter, cells, math, roles, links or inline code."""

    def blank(found: Any) -> str:
        return "\n" * found[0].count("\n")

    def fence(found: Any) -> str:
        return "\n" + prose(found[4]) if found[2] not in NOT_READ else blank(found)

    text = re.sub(r"\A---\n.*?^---$", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = FENCE.sub(fence, text)
    text = re.sub(r"\$\$.*?\$\$", blank, text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", ROLE.sub(blank, text))
    return re.sub(r"`[^`]*`|\$[^$\n]*\$|arXiv:[\d.]+", blank, text)


def typed_quantities(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every quantity that a page's prose spells out itself."""
    for line, words in enumerate(prose(text).splitlines(), 1):
        for allowed in ALLOWED:
            words = words.replace(allowed, "")
        for found in QUANTITY.finditer(words):
            yield line, words[found.start():found.end() + 12].strip()


def hidden_records(text: str) -> Iterator[int]:
    """Lines of the cells that record a claim's value and hide their outputs: that value would never reach the ledger."""
    for found in FENCE.finditer(text):
        if found[2] == "code-cell" and RECORDS.search(found[4]) and HIDES.search(found[4]):
            yield text.count("\n", 0, found.start()) + 1


def check(app: Sphinx, page: str, source: list[str]) -> None:
    if not CHECKED.fullmatch(page):
        return
    for line, words in typed_quantities(source[0]):
        remedy = "take it from book/claims.yml with {claim}`id`, or glue what a cell computes"
        LOGGER.warning(f"'{words}' is typed by hand: {remedy}", location=(page, line))
    for line in hidden_records(source[0]):
        LOGGER.warning("a cell that calls record() keeps its outputs: tag it hide-input, not remove-cell", location=(page, line))


def setup(app: Sphinx) -> None:
    app.connect("source-read", check)
