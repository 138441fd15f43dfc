"""The book's Sphinx extension: the engine-aware cache, maths rendered at build, claims and the ledger, and on each page only what it needs."""
from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import myst_nb.core.render as myst_nb_render
from docutils import nodes
from sphinx.application import Sphinx

from . import assets, cache, claims, ledger, maths, page_engine, page_grammar, prose, status
from .inputs import ROOT, Inputs

FIGURE = 'class="minfigure"'
FIGURE_SCRIPT = "figures.js"  # it loads Plotly itself
WIDGET = 'class="minwidget"'
WIDGET_SCRIPT = "widgets.js"
NEEDS_GRAMMAR = 'data-needs="grammar"'
MATH = 'class="katex'
MATH_STYLE = "katex.min.css"
UNWANTED = "sphinx_thebe"  # on in every Jupyter Book: asks a CDN on each page for a kernel service this book has no use for


class PlotlyMime:
    """Plotly's mime has no renderer on a static page: fine where `minwidgets.figures.show` gave HTML too, else a defect."""

    mime_priority_overrides = ()

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        if data.mime_type != "application/vnd.plotly.v1+json":
            return None
        if not data.output_metadata.get(data.mime_type, {}).get("minfigure"):
            renderer.logger.warning("a bare Plotly figure draws nothing on the page: wrap it in minwidgets.figures.show", subtype="figure", line=data.line)
        return []


class WidgetMime:
    """A widget's place on the page, with what it shows in words for a reader whose browser runs no scripts."""

    mime_priority_overrides = ()

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        if data.mime_type != myst_nb_render.WIDGET_VIEW_MIMETYPE:
            return None
        view = myst_nb_render.sanitize_script_content(json.dumps(data.content))
        told = data.output_metadata.get(data.mime_type, {})
        words = told.get("minwidget", "An interactive widget.")
        needs = f' data-needs="{told["needs"]}"' if "needs" in told else ""
        place = f'<div {WIDGET}{needs}><script type="{data.mime_type}">{view}</script><p>{html.escape(words)}</p></div>'
        return [nodes.raw("", place, format="html")]


def trim_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the page the scripts and styles that it uses, and no others."""
    body = context.get("body", "")
    if FIGURE in body:
        app.add_js_file(FIGURE_SCRIPT, loading_method="defer")
    if WIDGET in body:
        app.add_js_file(WIDGET_SCRIPT, loading_method="defer")
    if NEEDS_GRAMMAR in body:
        page_grammar.write(Path(app.outdir) / "_static")
    unused = ("sphinx-thebe.css",) if MATH in body else ("sphinx-thebe.css", MATH_STYLE)
    context["css_files"] = [file for file in context["css_files"] if not str(getattr(file, "filename", file)).endswith(unused)]


def prepare(app: Sphinx) -> None:
    """Front-end parts, and the engine that pages run, are laid beside the book's own static files."""
    assets.install()
    target = ROOT / "_build" / "assets"
    assets.copy(target)
    page_engine.write(target)
    app.config.html_static_path.append(str(target))


def setup(app: Sphinx) -> dict[str, Any]:
    cache.install(Inputs())
    myst_nb_render.load_mime_renders = lambda: [PlotlyMime, WidgetMime, claims.RecordMime]
    for part in (maths, claims, ledger, prose, status):
        part.setup(app)
    for listeners in app.events.listeners.values():
        listeners[:] = [listener for listener in listeners if not listener.handler.__module__.startswith(UNWANTED)]
    app.connect("builder-inited", prepare, priority=100)
    app.connect("html-page-context", trim_page, priority=900)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
