"""A Python of its own that finds modules where its parent does: a worker, a rank."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

__all__ = ["command"]

# The path is set once the interpreter is up: in PYTHONPATH a folder with a types.py, say a script's own, would come before the standard library.
START = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def command(module: str, *args: object, path: Sequence[str]) -> list[str]:
    """What to start for `python -m module args`, with `path` as its sys.path."""
    return [sys.executable, "-P", "-c", START, json.dumps([part or os.getcwd() for part in path]), module, *map(str, args)]
