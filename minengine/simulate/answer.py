"""Questions and answers as JSON has them: how a widget asks for a simulation, of a kernel or of the page's own Python."""
from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["answer"]


def answer(call: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function of a dotted path (`minengine.simulate.timeline.timeline`) with the settings.

    Returns:
        `settings`, and either `value` or, where the settings are refused, `error` with the sentence that says why.
    """
    module, name = call.rsplit(".", 1)
    function = getattr(import_module(module), name)
    try:
        return {"settings": dict(settings), "value": function(**settings)}
    except ValueError as error:
        return {"settings": dict(settings), "error": str(error)}
