"""The ledger: one row a claim, what was stated beside what this book has, made from the registry and the executed pages."""
from __future__ import annotations

import html
from collections import Counter
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from . import claims, verdicts

__all__ = ["setup"]

STYLE, SCRIPT = "ledger.css", "ledger.js"
SECTIONS = {
    "workload": "The workload and the headline", "traces": "Traces of agents and chat", "disaggregation": "Prefill and decode apart",
    "model": "The model", "topology": "Topologies", "scheduler": "The scheduler", "rows": "Rows", "kernel": "The kernel", "accuracy": "Accuracy",
    "transfer": "Moving the cache", "tools": "Tool calls", "open": "What nobody can check",
}
COLUMNS = ("claim", "stated", "ours", "ratio", "status", "where")


class LedgerNode(nodes.General, nodes.Element):
    """Where the ledger goes, once all pages were read."""


class Ledger(Directive):
    """```{ledger}```"""

    def run(self) -> list[nodes.Node]:
        return [LedgerNode()]


def fill(app: Sphinx, doctree: nodes.document, page: str) -> None:
    for node in list(doctree.findall(LedgerNode)):
        node.replace_self(nodes.raw("", table(app, page), format="html"))


def table(app: Sphinx, page: str) -> str:
    known = claims.state(app.env)
    owns = {name: known.own(name) for name in known.claims}
    count = Counter(own.status for own in owns.values())
    button = '<button type="button" aria-pressed="false" disabled data-status='
    statuses = "".join(f'<li>{button}"{name}">{name} <b>{count[name]}</b></button><span>{meaning}</span></li>'
                       for name, meaning in verdicts.STATUSES.items() if count[name])
    head = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in COLUMNS)  # roles: cards of a narrow page are still a table
    bodies = []
    for section in dict.fromkeys(claim.section for claim in known.claims.values()):
        rows = "".join(row(app, page, known, name, owns[name]) for name, claim in known.claims.items() if claim.section == section)
        title = html.escape(SECTIONS.get(section, section))
        heading = f'<th scope="rowgroup" role="rowheader" colspan="{len(COLUMNS)}">{title}</th>'
        bodies.append(f'<tbody role="rowgroup"><tr class="ledger-section" role="row">{heading}</tr>{rows}</tbody>')
    return (
        f'<div class="ledger"><ul class="ledger-statuses">{statuses}</ul>'
        f'<p class="ledger-shown" role="status">{len(owns)} claims</p>'
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>{"".join(bodies)}</table></div>'
    )


def row(app: Sphinx, page: str, known: claims.Claims, name: str, own: verdicts.Own) -> str:
    from minengine.claims import number

    claim = known.claims[name]
    ours = ""
    if own.value is not None:
        how = html.escape(own.how)
        ours = f'<b>{html.escape(number(own.value, own.decimals))}</b> <i>{html.escape(own.label)}</i>'
        ours += f"<code>{how}</code>" if own.formula else f"<small>{how}</small>" if how else ""
    if claim.reason:
        ours += f"<small>{html.escape(claim.reason)}</small>"
    home = known.home(name, sorted(app.env.found_docs))
    where = ""
    if home:
        address = app.builder.get_relative_uri(page, home[0]) + (f"#{home[1]}" if home[1] else "")
        number_of = int(home[0].removeprefix("chapters/")[:2])
        where = f'<a href="{address}" title="{html.escape(app.env.titles[home[0]].astext())}">chapter {number_of}</a>'
    cells = {
        "stated": f"<b>{html.escape(number(claim.value))}</b> {html.escape(claim.unit)} <i>{claim.label}</i>",
        "ours": ours,
        "ratio": verdicts.ratio(own.value, claim.value),
        "status": f'<span class="ledger-status" data-status="{own.status}">{own.status}</span>',
        "where": where,
    }
    rest = "".join(f'<td role="cell" data-head="{head}">{cell and f"<div>{cell}</div>"}</td>' for head, cell in cells.items())
    what = f"{html.escape(claim.what)}<small>{html.escape(claim.source)}</small>"
    return f'<tr id="{name}" role="row" data-status="{own.status}"><th scope="row" role="rowheader">{what}</th>{rest}</tr>'


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if 'class="ledger"' in context.get("body", ""):
        app.add_css_file(STYLE)
        app.add_js_file(SCRIPT, loading_method="defer")


def setup(app: Sphinx) -> None:
    app.add_node(LedgerNode)
    app.add_directive("ledger", Ledger)
    app.connect("doctree-resolved", fill)
    app.connect("html-page-context", add_files)
