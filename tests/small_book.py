"""A small book for the browser tests, built as the real one is, of the checkout's own engine and widgets."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""


def cell(code):
    return f"```{{code-cell}} python\n{code}\n```\n"


def small_book(root, pages):
    """Build `pages` (name of a chapter -> its text) under `root`; returns the folder of the site."""
    pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
    from bookkit import assets

    assets.install()
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    for name in ("book/node_modules", "minengine", "widgets", "_config.yml"):
        (root / name).symlink_to(ROOT / name)
    (root / "constraints.txt").touch()
    (root / "chapters").mkdir()
    for name, text in pages.items():
        (root / f"chapters/{name}.md").write_text(HEADER + text)
    (root / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters:\n" + "".join(f"- file: chapters/{name}\n" for name in pages))
    (root / "index.md").write_text("# Small\n\nText.\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "book/build.py"], cwd=root, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "_build/html"
