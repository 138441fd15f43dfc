"""jupyter-cache with a key that knows the engine, plugged into myst-nb.

Outputs are reused when the code cells, the tags that steer execution and `Inputs.key` are the same. A failed
notebook is never stored, so it runs, and fails, in every build.
"""
from __future__ import annotations

import copy
import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import myst_nb.core.execute.cache as myst_nb_cache
from jupyter_cache.cache.main import JupyterCacheBase
from jupyter_cache.executors.utils import single_nb_execution
from traitlets.config import Config

from .inputs import Inputs
from .status import machine

__all__ = ["EngineCache", "install"]

EXECUTION_TAGS = {"raises-exception", "skip-execution"}  # the tags that change what a run gives; all others are looks


class EngineCache(JupyterCacheBase):
    """The notebook store of one build; `inputs` says what the notebooks depend on."""

    _facts: dict[str, Any] | None = None  # of the notebook that was looked up last; pages are read one after the other

    def __init__(self, path: str | Path, inputs: Inputs) -> None:
        super().__init__(path)
        self.inputs = inputs

    def create_hashed_notebook(self, nb: Any, nb_metadata: Any = None, cell_metadata: Any = None) -> tuple[Any, str]:
        """The notebook as the base class would store it, under our key."""
        plain = copy.deepcopy(nb)
        code = [cell for cell in plain.cells if cell.cell_type == "code"]
        for cell in code:
            cell.metadata = {"tags": sorted(EXECUTION_TAGS.intersection(cell.metadata.get("tags", ())))}
        kernel = plain.metadata.get("kernelspec", {}).get("name", "python3")
        plain.metadata = {"kernelspec": {"name": kernel}, "inputs": self.inputs.key("\n".join(cell.source for cell in code))}
        _, key = super().create_hashed_notebook(plain, ("kernelspec", "inputs"), ("tags",))
        return super().create_hashed_notebook(nb)[0], key

    def merge_match_into_notebook(self, nb: Any, nb_meta: Any = ("kernelspec", "language_info", "widgets"), cell_meta: Any = ()) -> tuple[int, Any]:
        """Stored outputs under today's tags."""
        return super().merge_match_into_notebook(nb, nb_meta, cell_meta)

    def match_cache_notebook(self, nb: Any) -> Any:
        """The record of a notebook's run, whose facts are kept for the status page."""
        record = super().match_cache_notebook(nb)
        EngineCache._facts = record.data
        return record

    def cache_notebook_bundle(self, bundle: Any, *args: Any, **kwargs: Any) -> Any:
        """Store a run with its date and machine, which may be another than the one that builds the page from it."""
        bundle.data.update(machine=machine(), executed=datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M UTC"))
        EngineCache._facts = bundle.data
        return super().cache_notebook_bundle(bundle, *args, **kwargs)

    @classmethod
    def take_facts(cls) -> dict[str, Any] | None:
        """`execution_seconds`, `executed` and `machine` of the notebook looked up since the last call."""
        facts, cls._facts = EngineCache._facts, None
        return facts

    def add_nb_to_project(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """myst-nb calls this right before it executes a notebook: say which, since it can take minutes."""
        print(f"executing {Path(path).relative_to(self.inputs.root)}", flush=True)
        return super().add_nb_to_project(path, *args, **kwargs)


def install(inputs: Inputs) -> None:
    """Make myst-nb's execution mode `cache` use EngineCache, with kernels on local sockets: no port is opened."""
    myst_nb_cache.get_cache = lambda path: EngineCache(path, inputs)
    myst_nb_cache.single_nb_execution = _execute


def _execute(nb: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        sockets = {} if os.name == "nt" else {"transport": "ipc", "ip": os.path.join(folder, "kernel")}
        return single_nb_execution(nb, config=Config({"KernelManager": sockets}), **options)
