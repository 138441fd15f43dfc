"""What helps a reader beside the chapters: notes on words, notebooks to take along, the figures on one page, the bibliography, links to a widget's setting."""
from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from . import descriptions, gallery, late, notebooks, notes, references, search, settings

__all__ = ["setup"]


def setup(app: Sphinx) -> dict[str, Any]:
    for part in (notes, notebooks, gallery, references, descriptions, settings, search, late):
        part.setup(app)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
