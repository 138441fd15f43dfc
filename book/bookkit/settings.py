"""The role {setting}: a link that opens a widget at a setting.

    {setting}`8 bits <RowBytes.kv_cache_dtype=fp8>`                                      on the same page
    {setting}`8 bits <chapters/03-the-latent-row#RowBytes.kv_cache_dtype=fp8&RowBytes.tokens=200000>`

What follows the # is what the widget itself writes to the page's address (book/static/widgets.js).
"""
from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

__all__ = ["check", "setup"]

SETTING = re.compile(r"(?:(?P<page>[\w/-]+)#)?(?P<address>[\w-]+\.\w+=[^&#]*(?:&[\w-]+\.\w+=[^&#]*)*)")


def check(address: str) -> None:
    """
    Raises:
        ValueError: no widget, or no trait of it, has that name.
    """
    import minwidgets

    for name in (part.split("=")[0] for part in address.split("&")):
        key, trait = name.split(".")
        widget = re.sub(r"-\d+$", "", key)  # RowBytes-2: the second one of a page
        if widget not in minwidgets.__all__:
            raise ValueError(f"there is no widget '{widget}'; there are {', '.join(minwidgets.__all__)}")
        traits = getattr(minwidgets, widget).class_own_traits(sync=True)
        if trait not in traits:
            raise ValueError(f"{widget} has no trait '{trait}'; it has {', '.join(sorted(traits))}")


class Setting(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        words, _, rest = self.text.rpartition("<")
        found = SETTING.fullmatch(rest.removesuffix(">"))
        try:
            if not (words.strip() and found):
                raise ValueError("write {setting}`words <Widget.trait=value>`, or <page#Widget.trait=value>")
            check(found["address"])
            if found["page"] and found["page"] not in self.env.found_docs:
                raise ValueError(f"there is no page '{found['page']}'")
        except ValueError as error:
            return [], [self.inliner.reporter.error(f"setting `{self.text}`: {error}", line=self.lineno)]
        page = self.env.app.builder.get_relative_uri(self.env.docname, found["page"]) if found["page"] else ""
        return [nodes.reference("", words.strip(), refuri=f"{page}#{found['address']}", internal=True)], []


def setup(app: Sphinx) -> None:
    app.add_role("setting", Setting())
