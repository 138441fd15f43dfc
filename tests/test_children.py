"""Processes that a worker or a rank is: they find modules where their parent does, and what a script's folder holds does not break them."""
import json
import os
import subprocess
import sys

from minengine.children import command


def test_a_child_has_its_parents_path_and_its_own_arguments(tmp_path):
    (tmp_path / "types.py").write_text("raise SystemExit('a folder of the path came before the standard library')")
    (tmp_path / "child.py").write_text("import json, sys\nprint(json.dumps([sys.path, sys.argv[1:], __name__]))")
    done = subprocess.run(command("child", 7, "x y", path=[str(tmp_path), "", *sys.path]), capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path, arguments, name = json.loads(done.stdout)
    assert path == [str(tmp_path), os.getcwd(), *(part or os.getcwd() for part in sys.path)] and (arguments, name) == (["7", "x y"], "__main__")
