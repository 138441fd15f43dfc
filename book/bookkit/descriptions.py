"""A description for each page that states none: its first paragraph, which search engines show under the title."""
from __future__ import annotations

import html
from textwrap import shorten
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

__all__ = ["description", "setup"]

LENGTH = 160  # characters: what is shown of it
OF_THE_BOOK = "minengine: a compact LLM serving engine and the executable book that explains it, from the KV cache outwards."


def description(doctree: nodes.document | None) -> str:
    """The first paragraph that is neither in a list nor in a cell's output, in plain words."""
    for paragraph in doctree.findall(nodes.paragraph) if doctree else ():
        if isinstance(paragraph.parent, (nodes.section, nodes.document)) and paragraph.astext().strip():
            return shorten(paragraph.astext(), LENGTH, placeholder=" ...")
    return OF_THE_BOOK


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if 'name="description"' not in context.get("metatags", ""):
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{html.escape(description(doctree))}" />\n'


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", describe)
