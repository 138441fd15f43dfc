"""A widget's drawing as the one ES module that Jupyter and the page load, kept here in files of one concept each."""
from __future__ import annotations

import re
from pathlib import Path

__all__ = ["bundle"]

HERE = Path(__file__).parent
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.-]+)";\n', re.MULTILINE)


def bundle(entry: str) -> str:
    """The text of `entry` (a file beside this one) with each file that it imports put in place of the import.

    The files are modules of their own as well; in the bundle they share one scope, so names must differ.
    """
    seen: set[str] = set()

    def text(name: str) -> str:
        seen.add(name)
        return IMPORT.sub(lambda found: "" if found[1] in seen else text(found[1]), (HERE / name).read_text(encoding="utf8"))

    return text(entry)
