"""What the chapters show: figures that read well everywhere, and widgets that live on a static page."""
from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {"CopyCount": "copy_count", "KernelFloor": "kernel_floor", "MemoryLadder": "memory_ladder", "ParetoExplorer": "pareto_explorer",
         "PrefillDecode": "prefill_decode", "RowBytes": "row_bytes", "StepTimeline": "step_timeline", "TokenMask": "token_mask"}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Widgets load when they are asked for: figures need no anywidget."""
    if name not in _HOME:
        raise AttributeError(f"module 'minwidgets' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
