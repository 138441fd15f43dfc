"""Scripts run after the page is drawn: the theme and its extensions load theirs in front of it, where a phone waits for each."""
from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

__all__ = ["defer", "setup"]

AT_ONCE = "documentation_options.js"  # a script inside the page changes what it defines


def defer(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Deferred scripts keep their order among themselves, and run after those written into the page.

    The search page stays as it is: its own scripts come undeferred, in its template, and need the others.
    """
    if page == "search":
        return
    context["script_files"] = [_deferred(script) for script in context["script_files"]]


def _deferred(script: Any) -> Any:
    """A copy: pages share the scripts of the whole site."""
    name = str(getattr(script, "filename", None) or "").split("?")[0]
    if not name or name.endswith(AT_ONCE):
        return script
    return type(script)(script.filename, priority=script.priority, **{"defer": "defer", **script.attributes})


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", defer, priority=950)
