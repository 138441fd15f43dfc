"""Build the site: nothing if nothing changed, else all pages anew with only the stale notebooks executed.

The Sphinx side is always built from scratch (seconds) so that no page, warning or link of an earlier build
survives; the dear part, running the notebooks, is what the cache saves. A new site replaces the old one
only when the build went through.
"""
from __future__ import annotations

import argparse
import fcntl
import functools
import http.server
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Sequence

from .inputs import ROOT, Inputs

__all__ = ["SITE", "build", "is_fresh", "main"]

OUT = ROOT / "_build"
SITE = OUT / "html"
STAMP = OUT / "site.sha256"


def is_fresh() -> bool:
    """True when the site on disk was made from the files as they are now."""
    return (SITE / "index.html").is_file() and STAMP.is_file() and STAMP.read_text() == Inputs().site()


def build() -> int:
    """Bring the site up to date; returns 0, or 1 after saying what failed. A second build started meanwhile waits."""
    OUT.mkdir(exist_ok=True)
    with open(OUT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build()


def _build() -> int:
    if is_fresh():
        print(f"nothing changed; the book is {_address()}")
        return 0
    start = time.perf_counter()
    before = Inputs().site()
    fresh = OUT / "html.new"
    shutil.rmtree(fresh, ignore_errors=True)
    STAMP.unlink(missing_ok=True)
    failure = _sphinx(fresh)
    if failure:
        print(f"the book was not built: {failure}", file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    fresh.rename(SITE)
    STAMP.write_text(before)  # as read before the build: an edit made meanwhile leaves the site stale, as it is
    print(f"built in {time.perf_counter() - start:.0f} s; the book is {_address()}")
    return 0


def preview(port: int) -> int:
    """Serve the built site on this machine until interrupted."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="book/build.py", description="Build the book, executing the chapters that need it.")
    parser.add_argument("--preview", action="store_true", help="serve the site after building it")
    parser.add_argument("--port", type=int, default=8000, help="for --preview (default: 8000)")
    parser.add_argument("--assets", action="store_true", help="only install the front-end parts")
    args = parser.parse_args(argv)
    if args.assets:
        from . import assets

        try:
            assets.install()
        except assets.AssetError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    return build() or (preview(args.port) if args.preview else 0)


def _address() -> str:
    return os.path.join(os.path.relpath(SITE), "index.html")


def _sphinx(target: Path) -> str:
    """Run Jupyter Book; returns what failed in one line, or nothing."""
    from jupyter_book.sphinx import build_sphinx
    from myst_nb.core.execute.base import ExecutionError

    # Chapters, and the build itself, run the packages of this checkout, the ones that were hashed, whatever is installed.
    path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "widgets")]
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = build_sphinx(
        ROOT, target, noconfig=True, path_config=ROOT / "_config.yml", confoverrides={"latex_individualpages": False},
        doctreedir=OUT / "doctrees", freshenv=True, force_all=True, quiet=True, warningiserror=True, keep_going=True,
    )
    if isinstance(result, ExecutionError):
        return f"a cell of {os.path.relpath(str(result), ROOT)} failed; its traceback is above"
    return "" if result == 0 else "the warnings and errors above must go"
