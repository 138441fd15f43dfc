"""Sweeps: which points a grid asks for, a line a finished one, going on after an interruption; and `minengine simulate`."""
import json
import sys

import pytest
from sim_scenes import sessions

from minengine.cli import main
from minengine.config import ConfigError
from minengine.simulate import sweep as sweep_module
from minengine.simulate.points import key, points, run_point
from minengine.simulate.sweep import finished, run_here, run_on_ray, sweep
from minengine.workload.traces import write_agentx

LINEAR = {"kind": "linear", "base_s": 0.02, "decode_s": 0.001, "prefill_s": 0.001, "attention_s": 0.0}
GRID = {
    "deployment": {"topology": "TP1", "machine": LINEAR, "cached_tokens": 20_000, "block_size": 16},
    "run": {"duration_s": 5.0, "gap_cap_s": 0.5},
    "grid": {"max_num_seqs": [2, 4], "concurrency": [1, 2]},
    "points": [{"concurrency": 3}],
}


@pytest.fixture
def grid(tmp_path):
    """With a trace of its own."""
    folder = tmp_path / "trace"
    folder.mkdir()
    write_agentx(folder, sessions(0))
    return {**GRID, "run": {**GRID["run"], "trace": str(folder)}}


def test_a_grid_is_every_combination_and_the_points_listed():
    found = [(one["deployment"]["max_num_seqs"], one["run"]["concurrency"]) for one in points(GRID)]
    assert found == [(2, 1), (2, 2), (4, 1), (4, 2), (256, 3)]
    assert len({key(one) for one in points(GRID)}) == 5
    assert all(one["run"]["trace"] == "agentx" for one in points(GRID))


@pytest.mark.parametrize("changes, says", [
    ({"grids": {}}, "grids is unknown; use deployment, run, grid, points"),
    ({"grid": {"decoders": 4}}, "decoders=4: use a list of values"),
    ({"grid": {"decoders": []}}, "decoders=.*: use a list"),
    ({"grid": {"decoder": [4]}}, "decoder is unknown; use a field of a deployment"),
    ({"grid": {}, "points": []}, "asks for nothing"),
    ({"points": {"a": 1}}, "use a list of mappings"),
    ({"run": [1]}, "run=.*: use a mapping"),
    ({"grid": {"engines": [0]}}, "engines=0: use a whole number"),
])
def test_what_is_wrong_with_a_grid_is_said(changes, says):
    with pytest.raises(ConfigError, match=says):
        points({**GRID, **changes})


def test_a_sweep_goes_on_where_it_was_interrupted(grid, tmp_path, monkeypatch):
    out, asked, seen = tmp_path / "out.jsonl", points(grid), []
    whole = sweep(asked, out, processes=1, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(i, 5) for i in range(6)] and [key(line) for line in whole] == [key(one) for one in asked]
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:100])  # interrupted while the third was written
    ran = []
    monkeypatch.setattr(sweep_module, "run_here", lambda left, processes: ran.extend(left) or run_here(left, 1))
    assert sweep(asked, out) == whole
    assert len(ran) == 3 and len(finished(out)) == 5
    assert sweep(asked, out) == whole and len(ran) == 3, "what is there is not run again"


def test_a_point_that_cannot_be_says_so_and_is_tried_again(grid, tmp_path):
    out, asked = tmp_path / "out.jsonl", points({**grid, "grid": {"cached_tokens": [8, 20_000]}, "points": []})
    bad, good = sweep(asked, out, processes=1)
    assert "less than a block" in bad["error"] and "metrics" in good
    assert finished(out).keys() == {key(good)}


def test_several_processes_give_the_same_lines(grid, tmp_path):
    asked = points(grid)
    one, two = sweep(asked, tmp_path / "one.jsonl", processes=1), sweep(asked, tmp_path / "two.jsonl", processes=2)
    assert one == two == [json.loads(json.dumps(line)) for line in one]


def test_a_file_of_something_else_is_not_touched(grid, tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1: is no point of a sweep"):
        sweep(points(grid), out)
    assert out.read_text() == "my notes\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        sweep(points(grid), tmp_path / "no" / "such" / "folder.jsonl", processes=1)


def test_a_point_is_its_run_again(grid):
    asked = points(grid)[0]
    line = run_point(asked, sessions(0))
    assert line["digest"] == run_point(asked, sessions(0))["digest"] and line["gpus"] == 1
    assert run_point({**asked, "run": {**asked["run"], "slo": {"e2e_tok_s": 1.0}}}, sessions(0))["metrics"]["goodput_req_s"] > 0


def test_a_cluster_that_is_not_there(grid, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray.*minengine\[ray\]"):
        next(run_on_ray(points(grid), "auto"))


def test_a_ray_cluster_gives_the_same_lines(grid, tmp_path):
    pytest.importorskip("ray", reason="pip install 'minengine[ray]'")
    asked = points(grid)[:2]
    assert sweep(asked, tmp_path / "ray.jsonl", address="local") == sweep(asked, tmp_path / "here.jsonl", processes=1)


# --- from a terminal ---------------------------------------------------------------------------------------------------

def test_the_command_simulates_one_deployment(grid, tmp_path, capsys):
    settings, out = tmp_path / "deployment.yml", tmp_path / "out.json"
    settings.write_text(json.dumps(grid["deployment"]))  # JSON is YAML, but for numbers like 1e-05
    code = main(["simulate", "--deployment", str(settings), "--trace", grid["run"]["trace"], "--concurrency", "2", "--duration-s", "5", "--warm-s", "1",
                 "--gap-cap-s", "0.5", "--max-num-seqs", "3", "--slo-e2e-tok-s", "10", "--out", str(out)])
    shown = capsys.readouterr().out
    assert code == 0 and "1 GPU\n" in shown and "output_tok_s_gpu" in shown and "goodput_share" in shown and "digest" in shown
    written = json.loads(out.read_text())
    assert written["deployment"]["max_num_seqs"] == 3 and written["run"]["concurrency"] == 2 and written["metrics"]["requests"] > 0


def test_the_command_sweeps(grid, tmp_path, capsys):
    file = tmp_path / "grid.yml"
    file.write_text(json.dumps(grid))
    assert main(["simulate", "--sweep", str(file), "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "max_num_seqs" in shown and "5 points in" in shown and len((tmp_path / "grid.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("arguments, says", [
    (["--sweep", "nowhere.yml"], "cannot be read"),
    (["--decode", "TP0"], "topology='TP0'"),
    (["--trace", "nowhere"], "nowhere"),
    (["--machine", "nowhere", "--duration-s", "1"], "machine='nowhere'"),
])
def test_what_is_wrong_with_a_command_is_one_sentence(arguments, says, capsys):
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("minengine: ") and "Traceback" not in error
