"""The engine's pure-Python files that a page may run, as one JSON file of the site: {path: text}.

It is made from the package itself in each build, by following imports, so it can never differ from the engine.
"""
from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Iterator

from .inputs import ROOT

__all__ = ["ENTRIES", "FILE", "PageEngineError", "closure", "write"]

ENTRIES = (  # the one that is asked, what a widget may ask for, and what that imports when it needs it
    "minengine.simulate.answer", "minengine.simulate.timeline", "minengine.simulate.disagg", "minengine.simulate.sizing", "minengine.simulate.step_model")
FILE = "minengine.json"


class PageEngineError(RuntimeError):
    """A file that a page is to run needs what a page's Python does not have; the message names both."""


def closure(root: Path = ROOT, entries: tuple[str, ...] = ENTRIES) -> dict[str, str]:
    """The texts of the entries and of everything that importing them imports, by path.

    Raises:
        PageEngineError: one of them imports something that is neither a file here nor of the standard library.
    """
    found: dict[str, str] = {}
    queue = list(entries)
    while queue:
        module = queue.pop()
        file = _file(root, module)
        name = file.relative_to(root).as_posix()
        if name in found:
            continue
        found[name] = file.read_text(encoding="utf8")
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for wanted in (*_parents(module), *_imports(ast.parse(found[name], name), package)):
            if wanted.partition(".")[0] == module.partition(".")[0]:
                if _exists(root, wanted):
                    queue.append(wanted)
            elif wanted.partition(".")[0] not in sys.stdlib_module_names:
                raise PageEngineError(f"{name} imports {wanted}, which a page's Python does not have: import it where it is used")
    return dict(sorted(found.items()))


def write(target: Path) -> None:
    """Lay the file under `target`, a folder of the site's static files."""
    (target / FILE).write_text(json.dumps(closure()), encoding="utf8")


def _parents(module: str) -> Iterator[str]:
    """The packages around a module: importing it imports them."""
    parts = module.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts)))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules that running a file imports: names inside functions are imported later, or never."""
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # a name may be a module
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            queue += ast.iter_child_nodes(node)


def _candidates(root: Path, module: str) -> list[Path]:
    path = root.joinpath(*module.split("."))
    return [path.with_suffix(".py"), path / "__init__.py"]


def _exists(root: Path, module: str) -> bool:
    return any(file.is_file() for file in _candidates(root, module))


def _file(root: Path, module: str) -> Path:
    for file in _candidates(root, module):
        if file.is_file():
            return file
    raise PageEngineError(f"{module}: there is no such file under {root.name}")
