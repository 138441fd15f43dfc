"""What the widgets share: counts within limits, and words that stand in the page where no script runs."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anywidget
import traitlets
from minengine.config import ConfigError

__all__ = ["VIEW_MIME", "PageWidget", "between", "refuse_unknown", "within"]

VIEW_MIME = "application/vnd.jupyter.widget-view+json"


def refuse_unknown(given: Iterable[str], known: Iterable[str], also: Iterable[str] = ()) -> None:
    """
    Args:
        also: options that a constructor takes by name, for the message.

    Raises:
        ConfigError: an option that is not known.
    """
    known = tuple(known)
    if unknown := next((name for name in given if name not in known), None):
        raise ConfigError(f"unknown option '{unknown}'; known options: {', '.join((*also, *known))}")


def within(limits: tuple[int, int], name: str, value: Any) -> int:
    """The value, if it is a count within `limits`.

    Raises:
        TraitError: it is not; the message names the trait and the limits.
    """
    least, most = limits
    if isinstance(value, bool) or not least <= value <= most:
        raise traitlets.TraitError(f"{name}={value}: use a whole number from {least} to {most}")
    return value


def between(limits: tuple[float, float], name: str, value: float) -> float:
    """The value, if it is a number within `limits`.

    Raises:
        TraitError: it is not; the message names the trait and the limits.
    """
    least, most = limits
    if not least <= value <= most:
        raise traitlets.TraitError(f"{name}={value}: use a number from {least:g} to {most:g}")
    return value


class PageWidget(anywidget.AnyWidget):
    """A widget that a static page keeps alive; `_in_words()` says what it shows.

    `needs` names what the site must hold for it besides the page, where that is made for a site that has such a widget: "grammar".
    """

    needs = ""

    def _in_words(self) -> str:
        raise NotImplementedError

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The view, and in words what a page without scripts shows in its place."""
        data, metadata = super()._repr_mimebundle_(**options)
        data["text/plain"] = self._in_words()
        return data, {**metadata, VIEW_MIME: {"minwidget": data["text/plain"], **({"needs": self.needs} if self.needs else {})}}
