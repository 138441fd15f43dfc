"""The glossary's entries where its words are used: a link to a term carries its entry, and `notes.js` shows it on the spot.

A page holds the entries of the terms that it uses and no others, hidden, so that nothing is fetched when a reader asks
and a screen reader speaks the entry as the link's description. Without scripts the links lead to the glossary.
"""
from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

__all__ = ["GLOSSARY", "entries", "setup"]

GLOSSARY = "reference/glossary"
SCRIPT, STYLE = "notes.js", "notes.css"
LINK = re.compile(r'<a class="reference internal" (href="[^"#]+#(term-[^"]+)")>(?=<span class="xref std std-term">)')


def entries(app: Sphinx) -> dict[str, str]:
    """HTML of each entry's text by the id of its term, with the links in it turned to plain words."""
    found = {}
    for item in app.env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        terms, definition = list(item.findall(nodes.term)), next(item.findall(nodes.definition))
        for link in list(definition.findall(addnodes.pending_xref)):
            link.replace_self(nodes.inline("", link.astext()))
        html = app.builder.render_partial(definition)["fragment"]
        html = re.sub(r"</?dd[^>]*>", "", html).strip()
        for term in terms:
            for name in term["ids"]:
                found[name] = html
    return found


def attach(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the page's links to terms their entries, and the page the script that shows them."""
    body = context.get("body", "")
    used = dict.fromkeys(match[2] for match in LINK.finditer(body))
    if not used or GLOSSARY not in app.env.found_docs:
        return
    texts = entries(app)
    body = LINK.sub(lambda match: f'<a class="reference internal" {match[1]} data-note="note-{match[2]}" aria-describedby="note-{match[2]}">', body)
    hidden = "".join(f'<div id="note-{name}">{texts[name]}</div>' for name in used)
    context["body"] = f'{body}<div class="notes" hidden>{hidden}</div>'
    app.add_js_file(SCRIPT, loading_method="defer")
    app.add_css_file(STYLE)


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", attach, priority=800)
