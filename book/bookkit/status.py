"""The status page: when and where each chapter ran, how long it took, and with which versions."""
from __future__ import annotations

import html
import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

__all__ = ["PACKAGES", "machine", "setup"]

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jupyter-book", "sphinx", "myst-nb", "jupyter-cache", "plotly", "anywidget")


def machine() -> str:
    """What this machine computes with, in a line: its processor, how many cores a chapter may use, its GPUs."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{cpu}, {cores} core{'s' if cores != 1 else ''}"]
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
        parts += sorted(set(asked.stdout.split("\n")) - {""}) if asked.returncode == 0 else []
    return "; ".join(parts)


class StatusNode(nodes.General, nodes.Element):
    """Where the status goes, once all pages were read."""


class Status(Directive):
    """```{status}```"""

    def run(self) -> list[nodes.Node]:
        return [StatusNode()]


def keep(app: Sphinx, doctree: nodes.document) -> None:
    """Note, right after a page was read, what the cache knows of its run."""
    from .cache import EngineCache

    facts = EngineCache.take_facts()
    if facts:
        runs = app.env.__dict__.setdefault("book_runs", {})
        runs[app.env.docname] = facts


def fill(app: Sphinx, doctree: nodes.document, page: str) -> None:
    for node in list(doctree.findall(StatusNode)):
        node.replace_self(nodes.raw("", _tables(app, page), format="html"))


def _tables(app: Sphinx, page: str) -> str:
    runs = getattr(app.env, "book_runs", {})
    rows = []
    for name in sorted(runs):
        facts = runs[name]
        link = f'<a href="{app.builder.get_relative_uri(page, name)}">{html.escape(app.env.titles[name].astext())}</a>'
        rows.append([link, _duration(facts["execution_seconds"]), html.escape(facts.get("executed", "")), html.escape(facts.get("machine", ""))])
    versions = [["Python", platform.python_version()], *([name, _version(name)] for name in PACKAGES)]
    now = datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M UTC")
    return (
        f'<p>These pages were built on {now} on {html.escape(machine())}, {html.escape(platform.system())}.</p>'
        + _table("Chapters and their runs", ("chapter", "ran for", "when", "on"), rows)
        + _table("Versions", ("package", "version"), versions)
    )


def _table(caption: str, head: tuple[str, ...], rows: list[list[str]]) -> str:
    def line(row: list[str]) -> str:
        rest = "".join(f'<td role="cell" data-head="{name}"><div>{cell}</div></td>' for name, cell in zip(head[1:], row[1:]))
        return f'<tr role="row"><th scope="row" role="rowheader">{row[0]}</th>{rest}</tr>'

    cells = "".join(map(line, rows))
    names = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in head)
    return (f'<div class="ledger"><table role="table"><caption>{caption}</caption><thead role="rowgroup"><tr role="row">{names}</tr></thead>'
            f'<tbody role="rowgroup">{cells}</tbody></table></div>')


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def setup(app: Sphinx) -> None:
    app.add_node(StatusNode)
    app.add_directive("status", Status)
    app.connect("doctree-read", keep)
    app.connect("doctree-resolved", fill)
