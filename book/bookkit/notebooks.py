"""Each chapter as an `.ipynb` beside its source: what notebook services open, written by jupytext when the page is."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import nbformat
from sphinx.application import Sphinx

__all__ = ["notebook", "setup"]

ABOUT = ("*This is the notebook of a chapter of the minengine book. Its cells run in the folder `chapters/` of a checkout in which `make setup` was run; "
         "what stands in `{...}` is laid out by the built page.*")


def notebook(source: Path) -> nbformat.NotebookNode | None:
    """The page as a notebook without outputs, a line on where it runs in front; None if the page has no kernel."""
    book = jupytext.reads(source.read_text(encoding="utf-8"), fmt="md:myst")
    if "kernelspec" not in book.metadata:
        return None
    book.cells.insert(0, nbformat.v4.new_markdown_cell(ABOUT))
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws random ones: the same page would be another file in each build
    return book


def offer(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Write the notebook, and tell the theme's download button, which runs after this."""
    if page not in app.env.found_docs or not (source := Path(app.env.doc2path(page))).name.endswith(".md"):
        return
    if (book := notebook(source)) is not None:
        target = Path(app.outdir) / "_sources" / f"{page}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, target)
        context["ipynb_source"] = f"{page}.ipynb"


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", offer, priority=400)
