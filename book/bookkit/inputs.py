"""What the outputs of a chapter depend on, as one hash.

jupyter-cache looks at the cells alone, so an edited engine would leave old numbers in the book. Here a
notebook's key also covers every first-party package its cells mention, whatever that package imports in
turn, the data, the lock and the Python version. Prose and presentation tags are not in it.
"""
from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Iterable, Iterator

__all__ = ["Inputs", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"minengine": "minengine", "minkernels": "kernels/minkernels", "minwidgets": "widgets/minwidgets"}
DATA = ("book/claims.yml", "../shared/data")  # the claims registry; real traces, where the checkout has them beside it
TRACES = "MINENGINE_TRACES"  # or in the folder that this variable names
LOCK = "constraints.txt"
BOOK = ("_config.yml", "_toc.yml", "index.md", "chapters", "book", *PACKAGES.values(), LOCK)
SKIP = {"__pycache__", "node_modules", ".ipynb_checkpoints", ".pytest_cache"}


class Inputs:
    """The files of one checkout, hashed once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = Path(root)

    def key(self, code: str) -> str:
        """Hash of all that decides the outputs of a notebook whose code cells are `code`, apart from the cells themselves."""
        parts = [f"python {sys.version_info[0]}.{sys.version_info[1]}", self._hash([LOCK])]
        used = self.packages_used(code)
        parts += [f"{name} {self._hash([PACKAGES[name]])}" for name in sorted(used)]
        if used:
            parts.append(f"data {self._data}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def packages_used(self, code: str) -> set[str]:
        """First-party packages that `code` mentions (an import, `!minengine ...`, a subprocess), and those they import."""
        found = {name for name in PACKAGES if re.search(rf"\b{name}\b", code)}
        queue = list(found)
        while queue:
            new = self._imports[queue.pop()] - found
            found |= new
            queue += new
        return found

    def site(self) -> str:
        """Hash of everything the built site is made from."""
        return hashlib.sha256("\n".join([sys.version, self._hash(BOOK), self._data]).encode()).hexdigest()

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        return {name: {top for file in self._files(folder) if file.suffix == ".py" for top in _imported(file)} & set(PACKAGES)
                for name, folder in PACKAGES.items()}

    @cached_property
    def _data(self) -> str:
        return self._hash([*DATA, *filter(None, [os.environ.get(TRACES)])])

    def _hash(self, names: Iterable[str]) -> str:
        digest = hashlib.sha256()
        for name in names:
            for file in self._files(name):
                content = file.read_bytes()
                digest.update(f"{name} {file.relative_to(self.root / name)} {len(content)}\n".encode())
                digest.update(content)
        return digest.hexdigest()

    def _files(self, name: str) -> Iterator[Path]:
        path = self.root / name
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file() and not SKIP.intersection(p.relative_to(path).parts))


def _imported(file: Path) -> Iterator[str]:
    """Top-level names of the modules that a Python file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
