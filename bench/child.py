"""`python -m bench.child SPEC`: the other end of `Bench.run`. Calls one function and writes what it returns as JSON."""
from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

__all__ = ["main", "seconds_since_spawn"]

_spawned_s = time.time()


def seconds_since_spawn() -> float:
    """Seconds since the parent asked for this process: the interpreter's own start and all imports included."""
    return time.time() - _spawned_s


def main(text: str) -> None:
    global _spawned_s
    spec = json.loads(text)
    _spawned_s = spec["spawned_s"]
    module, _, name = spec["call"].partition(":")
    result = getattr(importlib.import_module(module), name)(**spec["options"])
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    # The module that variants import, not this `__main__` copy of it: both must see the same spawn time.
    from bench.child import main

    main(sys.argv[1])
