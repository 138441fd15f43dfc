"""What the outputs of a chapter depend on, as one hash.

jupyter-cache looks at the cells alone, so an edited engine would leave old numbers in the book. Here a
notebook's key also covers every first-party package its cells mention, whatever that package imports in
turn, the data, the lock and the Python version. Of the claims registry it covers the claims whose ids the cells
mention, so cells take claims by id and never go through all of them; and of stored results all, for a chapter that
reads some. Prose and presentation tags are not in it.
"""
from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Iterator

import yaml

__all__ = ["Inputs", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"minengine": "minengine", "minkernels": "kernels/minkernels", "minwidgets": "widgets/minwidgets"}
DATA = ("../shared/data",)  # real traces, where the checkout has them beside it
TRACES = "MINENGINE_TRACES"  # or in the folder that this variable names
CLAIMS = "book/claims.yml"
SEEN = ("value", "unit", "label", "book", "what", "formula")  # the fields of a claim that a cell can show or compute with
RESULTS, READS_RESULTS = "book/results", re.compile(r"\bread_results\b|\bstored\(")  # minengine.results, minengine.accuracy
LOCK = "constraints.txt"
BOOK = ("_config.yml", "_toc.yml", "index.md", "chapters", "reference", "book", *PACKAGES.values(), LOCK)
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
            parts += [f"data {self._data}", f"claims {self._claims_of(code)}"]
        if READS_RESULTS.search(code):
            parts.append(f"results {self._hash([RESULTS])}")
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

    def _claims_of(self, code: str) -> str:
        """What `code` can see of the claims that it mentions, and of those whose stated values their formulas take."""
        found = self._claims.keys() & set(re.findall(r"\w+", code))
        formulas = " ".join(str(self._claims[name].get("formula", "")) for name in found)
        found |= self._claims.keys() & set(re.findall(r"\w+", formulas))
        return json.dumps([[name, *(self._claims[name].get(field) for field in SEEN)] for name in sorted(found)])

    def site(self) -> str:
        """Hash of everything the built site is made from."""
        return hashlib.sha256("\n".join([sys.version, self._hash(BOOK), self._data]).encode()).hexdigest()

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        return {name: {top for file in self._files(folder) if file.suffix == ".py" for top in _imported(file)} & set(PACKAGES)
                for name, folder in PACKAGES.items()}

    @cached_property
    def _claims(self) -> dict[str, dict[str, Any]]:
        path = self.root / CLAIMS
        sections = yaml.safe_load(path.read_text(encoding="utf8")) if path.is_file() else None
        return {row["id"]: row for rows in (sections or {}).values() for row in rows}

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
