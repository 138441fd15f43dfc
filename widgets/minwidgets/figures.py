"""One way to put a Plotly figure into a chapter: with a caption, a text alternative and its numbers as a table.

    show(fig, caption="Decode step against batch size.", alt="Line chart: ...")

On the built page the script `figures.js` draws it in the page's colours and width; in JupyterLab, Plotly does.
"""
from __future__ import annotations

import base64
import html
import json
import re
from typing import Any, Iterable, Mapping, Sequence

__all__ = ["Figure", "show"]

PLOTLY_MIME = "application/vnd.plotly.v1+json"
TRACE_TYPES = ("scatter", "bar", "pie")  # what the page's build of Plotly has; it would draw any other as a scatter, silently
MAX_AUTOMATIC_ROWS = 400
Table = tuple[Sequence[str], Iterable[Sequence[Any]]]  # header, rows


class Figure:
    """A figure as Jupyter shows it: Plotly's own mime and HTML that needs no inline script."""

    def __init__(self, spec: dict[str, Any], caption: str, alt: str, table: Table, height: int) -> None:
        self.spec, self.caption, self.alt, self.table, self.height = spec, caption, alt, table, height

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {PLOTLY_MIME: self.spec, "text/html": self.to_html(), "text/plain": f"{self.caption}\n{self.alt}"}
        return data, {PLOTLY_MIME: {"minfigure": True}}  # by this mark the book knows that it can draw the HTML instead

    def to_html(self) -> str:
        """A `<figure>`: the drawing's data (JSON never ends a script element early), caption and table."""
        data = json.dumps(self.spec, separators=(",", ":")).replace("<", "\\u003c")
        header, rows = self.table
        head = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(_number(value))}</td>" for value in row) + "</tr>" for row in rows)
        return (
            f'<figure class="minfigure"><div class="minfigure-plot" role="img" aria-label="{html.escape(self.alt)}" '
            f'style="height:{self.height}px"></div><script type="application/json">{data}</script>'
            f"<figcaption>{_inline(self.caption)}</figcaption>"
            f'<details><summary>The numbers as a table</summary><div class="minfigure-table" tabindex="0" role="region" '
            f'aria-label="Table: {html.escape(self.caption)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details></figure>'
        )


def show(fig: Any, *, caption: str, alt: str, table: Table | Sequence[Mapping[str, Any]] | None = None, height: int = 360) -> Figure:
    """Wrap a Plotly figure for the book.

    Args:
        fig: a `plotly.graph_objects.Figure`, or the dict form `{"data": [...], "layout": {...}}`. Leave colours,
            fonts and margins to the page unless they carry meaning.
        caption: what is shown, with n, median or spread and the machine where they matter; `code` in backticks.
        alt: what a reader who cannot see it needs to know: kind of chart, axes, and the finding.
        table: `(header, rows)` or a list of dicts; made from the traces' x and y when left out.
        height: of the drawing, in CSS pixels.

    Raises:
        ValueError: caption or alt is empty, a trace is of a type that the page cannot draw, or the traces are no plain
            x-y series and no table was given.
    """
    for name, text in (("caption", caption), ("alt", alt)):
        if not text.strip():
            raise ValueError(f"{name} is empty: a figure needs a caption and a text alternative")
    spec = json.loads(fig.to_json()) if hasattr(fig, "to_json") else json.loads(json.dumps(fig))
    spec.setdefault("layout", {}).pop("template", None)  # the page's own style; Plotly's default template is 7 kB of colours
    for trace in spec["data"]:
        if trace.get("type", "scatter") not in TRACE_TYPES:
            raise ValueError(f"a trace has type '{trace['type']}': the book's pages draw {', '.join(TRACE_TYPES)}")
    if table is None:
        table = _table_of(spec)
    elif isinstance(table, Sequence) and table and isinstance(table[0], Mapping):
        header = list(table[0])
        table = (header, [[row[name] for name in header] for row in table])
    header, rows = table
    return Figure(spec, caption.strip(), alt.strip(), (list(header), [list(row) for row in rows]), height)


def _table_of(spec: dict[str, Any]) -> Table:
    """Every point of every trace, one a row."""
    layout = spec["layout"]
    rows: list[list[Any]] = []
    for i, trace in enumerate(spec["data"]):
        x, y = _values(trace.get("x")), _values(trace.get("y"))
        if not (isinstance(x, list) and isinstance(y, list) and len(x) == len(y)):
            raise ValueError(f"table is needed: trace {trace.get('name', i)} has no plain x and y lists; pass table=(header, rows)")
        rows += [[trace.get("name", f"series {i + 1}"), *point] for point in zip(x, y)]
    if len(rows) > MAX_AUTOMATIC_ROWS:
        raise ValueError(f"table is needed: the traces have {len(rows)} points, more than {MAX_AUTOMATIC_ROWS}; pass a table of the ones that matter")

    def title(axis: str) -> str:
        given = layout.get(axis, {}).get("title", {})
        return re.sub(r"<[^>]+>", " ", given.get("text", "") if isinstance(given, dict) else given) or axis[0]

    header = ["series", title("xaxis"), title("yaxis")]
    if len(spec["data"]) == 1:
        return header[1:], [row[1:] for row in rows]
    return header, rows


def _values(given: Any) -> Any:
    """A coordinate as a list; Plotly writes numpy arrays as `{"dtype": "f8", "bdata": base64}`."""
    if isinstance(given, dict) and "bdata" in given:
        import numpy

        return numpy.frombuffer(base64.b64decode(given["bdata"]), dtype=given["dtype"]).tolist()
    return given


def _number(value: Any) -> str:
    """Four significant digits for fractions, thousands separators for counts, text as it is."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
