"""The engine's own scheduler under a virtual clock: pure Python, so that a page's Python runs these same files."""
from __future__ import annotations

from typing import Any

__all__ = ["Deployment", "Result", "simulate"]

_PLACES = {"Deployment": "deployment", "Result": "result", "simulate": "cluster"}


def __getattr__(name: str) -> Any:
    """The cluster's simulator, when it is asked for: a page that runs one engine's timeline need not read it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
