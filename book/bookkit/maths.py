"""Formulas become HTML when the book is built, by KaTeX in one Node process; the page needs only its stylesheet.

(sphinxcontrib-katex does the same through a socket server, whose start-up loses a race on a busy machine.)
"""
from __future__ import annotations

import json
import subprocess
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.math import get_node_equation_number

from . import assets

__all__ = ["Katex", "setup"]

SCRIPT = assets.BOOK / "bookkit" / "katex.cjs"
LIBRARY = assets.MODULES / "katex" / "dist" / "katex.min.js"


class Katex:
    """A Node process that renders formulas; started by the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def render(self, latex: str, display: bool) -> str:
        """HTML and MathML of one formula.

        Raises:
            ExtensionError: KaTeX cannot read it; the message holds the formula.
        """
        if self._process is None:
            self._process = subprocess.Popen([str(assets.node()), str(SCRIPT), str(LIBRARY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process.stdin.write(json.dumps({"latex": latex, "display": display}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "Node.js ended early; is book/node_modules complete?"}')
        if "error" in answer:
            raise ExtensionError(f"the formula {latex!r} cannot be rendered: {answer['error']}")
        return answer["html"]

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def setup(app: Sphinx) -> None:
    """Register as Sphinx's maths renderer `katex`."""
    katex = Katex()

    def inline(writer: Any, node: nodes.math) -> None:
        writer.body.append(f'<span class="math">{katex.render(node.astext(), False)}</span>')
        raise nodes.SkipNode

    def block(writer: Any, node: nodes.math_block) -> None:
        writer.body.append(writer.starttag(node, "div", CLASS="math"))
        if node["number"]:
            writer.body.append(f'<span class="eqno">({get_node_equation_number(writer, node)})')
            writer.add_permalink_ref(node, "Link to this equation")
            writer.body.append("</span>")
        writer.body.append(katex.render(node.astext(), True) + "</div>")
        raise nodes.SkipNode

    app.add_html_math_renderer("katex", (inline, None), (block, None))
    app.add_css_file("vendor/katex/katex.min.css")
    app.connect("build-finished", lambda app, error: katex.close())
