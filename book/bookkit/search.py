"""Words for the site's search: Sphinx takes the tags out of raw HTML and joins what they kept apart, so the cells of a
table became one long word that nobody looks for. A space in front of each tag that ends or begins a piece of text keeps
them apart; tags inside a word, such as a bold letter's, get none.
"""
from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

__all__ = ["apart", "setup"]

INSIDE = "a|abbr|b|em|i|kbd|mark|span|strong|sub|sup|u"  # tags that stand inside a word or a sentence
BOUNDARY = re.compile(rf"(?<=\S)(?=</?(?!(?:{INSIDE})\b)[a-z])")


def apart(html: str) -> str:
    """The same HTML with a space where a piece of text ends or begins. Data in scripts has its `<` escaped and stays."""
    return BOUNDARY.sub(" ", html)


def spread(app: Sphinx, doctree: nodes.document, page: str) -> None:
    for node in list(doctree.findall(nodes.raw)):
        if "html" in node.get("format", "").split():
            node.replace_self(nodes.raw("", apart(node.astext()), **node.attributes))


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", spread, priority=900)
