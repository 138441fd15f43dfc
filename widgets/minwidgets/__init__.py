"""What the chapters show: figures that read well everywhere, and widgets that live on a static page."""
from __future__ import annotations

from typing import Any

__all__ = ["RowBytes"]


def __getattr__(name: str) -> Any:
    """Widgets load when they are asked for: figures need no anywidget."""
    if name != "RowBytes":
        raise AttributeError(f"module 'minwidgets' has no attribute '{name}'")
    from .row_bytes import RowBytes

    return RowBytes
