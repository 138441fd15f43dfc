"""A widget's drawing and looks as the one ES module and the one stylesheet that are loaded, kept here in files of one concept each."""
from __future__ import annotations

import re
from pathlib import Path

__all__ = ["bundle", "styles"]

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


def styles(*names: str) -> str:
    """The texts of these stylesheets, in order."""
    return "\n".join((HERE / name).read_text(encoding="utf8") for name in names)
