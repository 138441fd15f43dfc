"""The role {claim}`id`: a value of the claims registry in a sentence, with its label, and its source behind it.

    {claim}`row_fp8_bytes`             576
    {claim}`row_fp8_bytes|unit`        576 bytes
    {claim}`pd_p90_itl_cut|percent`    40%
    {claim}`tokens_fp8|million`        1.09
    {claim}`deepswe.nvfp4`             69.82

On the page it is a button; a popover says what the number is, where it comes from and what the book has beside it. The registry is
read when the page is built, so a changed claim changes the page and runs no notebook.
"""
from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from . import verdicts

__all__ = ["Claims", "LEDGER", "setup", "state"]

LOGGER = logging.getLogger(__name__)
LEDGER = "chapters/ledger"
STYLE, SCRIPT = "claims.css", "claims.js"
RECORD_MIME = "application/vnd.minengine.claim+json"  # minengine.claims.RECORD_MIME; a test compares the two


class Claims:
    """The registry, and what the pages of one build have shown and recorded of it."""

    def __init__(self) -> None:
        from minengine.claims import read_claims
        from minengine.results import read_results

        self.claims = read_claims()
        self.stored = {kept.claim: kept for kept in read_results().values() if kept.claim}
        self.records: dict[str, dict[str, Any]] = {}  # by claim id
        self.places: dict[str, str] = {}  # claim id -> page whose cell recorded it
        self.uses: dict[str, list[str]] = {}  # page -> ids of the claims in its prose

    def own(self, name: str) -> verdicts.Own:
        return verdicts.own_value(self.claims[name], self.claims, self.records, self.stored)

    def home(self, name: str, pages: list[str]) -> tuple[str, str] | None:
        """The page and anchor where the book deals with a claim: the cell that recorded it, else its first mention in a chapter that checks it."""
        if name in self.places:
            return self.places[name], f"own-{name}"
        chapters = [page for number in self.claims[name].chapters for page in pages if page.startswith(f"chapters/{number:02}-")]
        for page in chapters:
            if name in self.uses.get(page, ()):
                return page, f"use-{name}"
        return (chapters[0], "") if chapters else None


def state(env: Any) -> Claims:
    if not hasattr(env, "book_claims"):
        env.book_claims = Claims()
    return env.book_claims


class ClaimNode(nodes.inline):
    """A claim's value in the text; its one child is what is printed."""


def claim_role(name: str, rawtext: str, text: str, line: int, inliner: Any, options: Any = None, content: Any = ()) -> tuple[list[Any], list[Any]]:
    """Sphinx's role function; a claim that is not there or a form that does not fit is an error of the page."""
    known = state(inliner.document.settings.env)
    where, _, form = text.partition("|")
    ident, _, key = where.strip().partition(".")
    try:
        printed = written(known.claims[ident], key, form.strip()) if ident in known.claims else None
    except ValueError as error:
        return [], [inliner.reporter.error(f"claim '{ident}': {error}", line=line)]
    if printed is None:
        return [], [inliner.reporter.error(f"claim '{ident}': is not in book/claims.yml", line=line)]
    known.uses.setdefault(inliner.document.settings.env.docname, []).append(ident)
    return [ClaimNode(rawtext, printed, claim=ident)], []


def written(claim: Any, key: str = "", form: str = "") -> str:
    """A claim's value as the sentence prints it.

    Raises:
        ValueError: an unknown form, a form that needs a number, or a key that the value does not have.
    """
    from minengine.claims import number

    value = claim.value
    if isinstance(value, dict):
        if key not in value:
            raise ValueError(f"has the keys {', '.join(value)}; write {{claim}}`{claim.id}.key`")
        value = value[key]
    elif key:
        raise ValueError(f"has no key '{key}'; its value is {value!r}")
    if form in ("", "unit"):
        return number(value) + (f" {claim.unit}" if form else "")
    scales = {"percent": (100, "%"), "thousand": (1e-3, ""), "million": (1e-6, "")}
    if form not in scales:
        raise ValueError(f"'{form}' is no form; use unit, {', '.join(scales)}")
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (int, float)) for one in numbers):
        raise ValueError(f"its value {value!r} is no number to show as {form}")
    factor, sign = scales[form]
    return " to ".join(f"{one * factor:.10g}{sign}" for one in numbers)


def visit(writer: Any, node: ClaimNode) -> None:
    known, ident = state(writer.builder.env), node["claim"]
    claim = known.claims[ident]
    seen = writer.__dict__.setdefault("claims_seen", set())
    first = ident not in seen
    seen.add(ident)
    anchor, label = (f' id="use-{ident}"', f' <span class="claim-label">{claim.label}</span>') if first else ("", "")
    title = html.escape(f"{claim.label}: {claim.what}. {claim.source}")
    opening = f'<button type="button" class="claim"{anchor} popovertarget="claim-{ident}" title="{title}">'
    writer.body.append(f'{opening}<span class="claim-value">{html.escape(node.astext())}</span>{label}</button>')
    raise nodes.SkipNode


def note(known: Claims, ident: str, link: str) -> str:
    """What stands behind a claim: its popover."""
    from minengine.claims import number

    claim, own = known.claims[ident], known.own(ident)
    ours = html.escape(own.status)
    if own.value is not None:
        how = f"<code>{html.escape(own.how)}</code> = " if own.formula else ""
        detail = "" if own.formula or not own.how else f" ({html.escape(own.how)})"
        ours = f"{how}{html.escape(number(own.value, own.decimals))}, {html.escape(own.label)}{detail}: {ours}"
    reason = f"<dt>Because</dt><dd>{html.escape(claim.reason)}</dd>" if claim.reason else ""
    ledger = f'<p><a href="{link}#{ident}">Its row in the ledger</a></p>' if link else ""
    return (
        f'<div class="claim-note" id="claim-{ident}" popover role="group" aria-label="Where this number comes from">'
        f"<p><strong>{html.escape(number(claim.value))} {html.escape(claim.unit)}</strong> <em>{claim.label}</em></p><p>{html.escape(claim.what)}</p>"
        f"<dl><dt>Source</dt><dd>{html.escape(claim.source)}</dd><dt>Ours</dt><dd>{ours}</dd>{reason}</dl>{ledger}</div>"
    )


def add_notes(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The popovers of a page's claims go to its end: a paragraph cannot hold them."""
    used = list(dict.fromkeys(node["claim"] for node in doctree.findall(ClaimNode))) if doctree else []
    if not used:
        return
    link = app.builder.get_relative_uri(page, LEDGER) if LEDGER in app.env.found_docs else ""
    context["body"] += "".join(note(state(app.env), ident, link) for ident in used)
    app.add_css_file(STYLE)
    app.add_js_file(SCRIPT, loading_method="defer")


class RecordMime:
    """A cell's own value of a claim: kept for the ledger, and an anchor on the page."""

    mime_priority_overrides = (("*", RECORD_MIME, 1),)

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        if data.mime_type != RECORD_MIME:
            return None
        env, record = renderer.renderer.sphinx_env, data.content
        known, ident = state(env), record["id"]
        if ident in known.records:
            twice = f"claim '{ident}' was recorded in {known.places[ident]} already: one cell gives its value"
            renderer.logger.warning(twice, subtype="claim", line=data.line)
        known.records[ident], known.places[ident] = record, env.docname
        return [nodes.raw("", f'<span class="claim-record" id="own-{ident}"></span>', format="html")]


def setup(app: Sphinx) -> None:
    app.add_node(ClaimNode, html=(visit, None))
    app.add_role("claim", claim_role)
    app.connect("html-page-context", add_notes)
