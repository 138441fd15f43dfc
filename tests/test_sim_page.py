"""The cluster's simulator in a page's Python: the same events there as here, from files that need nothing but the standard library."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sim_scenes import StandIn, deployment, sessions

from bookkit.page_engine import closure
from minengine.simulate import Deployment, simulate

ROOT = Path(__file__).resolve().parents[1]
PYODIDE = ROOT / "book" / "node_modules" / "pyodide"
ENTRIES = ("minengine.simulate.cluster", "minengine.simulate.step_model", "minengine.arithmetic.memory")  # the last two are imported when they are needed

RUN = """
import json, sys
sys.path[:0] = {folders}
from sim_scenes import StandIn, deployment, sessions
from minengine.simulate import Deployment, simulate

def run(machine):
    found = []
    for kind in ({{"topology": "DEP2"}}, {{"prefill": "DEP2", "decode": "TP2", "decoders": 2}}, {{"topology": "TP1", "host_tier_bytes": 10 ** 8}}):
        result = simulate(deployment(**kind), sessions(3), concurrency=4, duration_s=10.0, gap_cap_s=1.0, costs=StandIn)
        found.append([result.digest, result.metrics])
    rack = Deployment(prefill="DEP8", decode="TP4", decoders=2, machine=machine, block_size=16, host_tier_bytes=10 ** 9, cached_tokens=4000,
                      model_options={{"draft_tokens": 4, "tokens_per_step": 3.33}})
    result = simulate(rack, sessions(4), concurrency=6, duration_s=60.0, gap_cap_s=1.0)
    found.append([result.digest, result.metrics])
    return found

answer = json.dumps(run(json.loads({machine!r})))
"""
IN_NODE = """
import { readFileSync } from "node:fs";
import { loadPyodide } from "PYODIDE/pyodide.mjs";
const { files, run } = JSON.parse(readFileSync(0, "utf8"));
const pyodide = await loadPyodide({ indexURL: "PYODIDE/" });
for (const [path, text] of Object.entries(files)) {
  pyodide.FS.mkdirTree(`/engine/${path.slice(0, path.lastIndexOf("/") + 1)}`);
  pyodide.FS.writeFile(`/engine/${path}`, text);
}
pyodide.runPython(run);
console.log(pyodide.globals.get("answer"));
"""


@pytest.fixture(scope="module")
def machine():
    from minengine.simulate.machine import machine

    return json.dumps(machine("gb200-nvl72").mapping())


@pytest.fixture(scope="module")
def here(machine):
    scope = {}
    exec(RUN.format(folders=[str(ROOT / "tests")], machine=machine), scope)
    return json.loads(scope["answer"])


@pytest.fixture(scope="module")
def files():
    return {**closure(entries=ENTRIES), "sim_scenes.py": (ROOT / "tests" / "sim_scenes.py").read_text()}


def test_nothing_but_the_standard_library_is_needed(files, here, machine, tmp_path):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    code = RUN.format(folders=[str(tmp_path)], machine=machine) + "print(answer)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here


@pytest.mark.skipif(not shutil.which("node") or not PYODIDE.is_dir(), reason="needs node, and Pyodide: make setup")
def test_the_same_events_in_webassembly(files, here, machine, tmp_path):
    """Another interpreter, another machine's arithmetic: the same picoseconds."""
    script = tmp_path / "run.mjs"
    script.write_text(IN_NODE.replace("PYODIDE", PYODIDE.as_posix()))
    given = json.dumps({"files": files, "run": RUN.format(folders=["/engine"], machine=machine)})
    done = subprocess.run(["node", str(script)], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    there = json.loads(done.stdout)
    assert [digest for digest, _ in there] == [digest for digest, _ in here]
    for (_, one), (_, other) in zip(there, here):
        assert one.keys() == other.keys()
        numbers = [name for name, value in one.items() if value is not None]
        assert [one[name] for name in numbers] == pytest.approx([other[name] for name in numbers], rel=1e-12), "Python 3.12 adds floats up with less error: means differ in their last bit"


def test_here_is_what_simulate_gives(here):
    result = simulate(deployment(topology="DEP2"), sessions(3), concurrency=4, duration_s=10.0, gap_cap_s=1.0, costs=StandIn)
    assert here[0][0] == result.digest and len({digest for digest, _ in here}) == 4
    assert Deployment().gpus == 24
