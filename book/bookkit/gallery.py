"""`{chapter-figure}`: a chapter's figure on another page, out of the executed chapter, so the two can never differ.

    ```{chapter-figure} chapters/01-an-agent-turn
    :nth: 2
    ```
"""
from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

__all__ = ["ChapterFigure", "setup"]

FIGURE = 'class="minfigure"'


class chapter_figure(nodes.General, nodes.Element):
    """The place of a figure until the chapter that draws it is read."""


class ChapterFigure(SphinxDirective):
    required_arguments = 1
    option_spec = {"nth": directives.positive_int}

    def run(self) -> list[nodes.Node]:
        return [chapter_figure(chapter=self.arguments[0], nth=self.options.get("nth", 1))]


def fill(app: Sphinx, doctree: nodes.document, page: str) -> None:
    for place in list(doctree.findall(chapter_figure)):
        chapter, nth = place["chapter"], place["nth"]
        if chapter not in app.env.found_docs:
            raise ExtensionError(f"{page}: there is no page '{chapter}' to take a figure from")
        figures = [node for node in app.env.get_doctree(chapter).findall(nodes.raw) if FIGURE in node.astext()]
        if nth > len(figures):
            raise ExtensionError(f"{page}: '{chapter}' has {len(figures)} figures; there is no figure {nth}")
        place.replace_self(nodes.raw("", figures[nth - 1].astext(), format="html"))


def setup(app: Sphinx) -> None:
    app.add_node(chapter_figure)
    app.add_directive("chapter-figure", ChapterFigure)
    app.connect("doctree-resolved", fill)
