"""Sweeps: which points a grid asks for, a line a finished one, going on after an interruption; and `minengine simulate`."""
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from sim_scenes import sessions

from minengine.cli import main
from minengine.config import ConfigError
from minengine.simulate import command, sweep as sweep_module
from minengine.simulate.points import key, points, run_point
from minengine.simulate.sweep import finished, run_here, run_on_ray, sweep
from minengine.workload.traces import Session, TraceRequest, write_agentx

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
    ({"grid": {"concurrency": [True]}}, "concurrency=True: use a whole number"),
    ({"run": {"duration_s": "abc"}}, "duration_s='abc': use a number"),
    ({"run": {"duration_s": float("inf")}}, "duration_s=inf"),
    ({"run": {"slo": 5}}, "slo=5: use a mapping with numbers"),
    ({"run": {"slo": {"speed": 5}}}, "slo=.*: use a mapping"),
    ({"run": {"slo": {"ttft_s": -1}}}, "slo ttft_s=-1: use a positive limit"),
    ({"run": {"seed": [1]}}, r"seed=\[1\]: use a whole number"),
    ({"run": {"trace": 5}}, "trace=5: use agentx"),
    ({"run": {"gaps": 7}}, "gaps=7: use recorded"),
    ({1: {}}, "1 is unknown"),
    ({"deployment": {"topology": "TP1", "machine": {"kind": "linear", "measured": {"date": datetime.date(2026, 1, 1)}}}}, "something that JSON does not have"),
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


def test_a_point_that_is_asked_for_twice_is_one():
    assert len(points({**GRID, "grid": {"concurrency": [2, 2, 2]}, "points": [{"concurrency": 2}]})) == 1


def test_a_trace_that_is_not_there_ends_its_point_alone(grid, tmp_path):
    asked = points({**grid, "grid": {"trace": [str(tmp_path / "nowhere"), grid["run"]["trace"]]}, "points": []})
    bad, good = sweep(asked, tmp_path / "out.jsonl", processes=1)
    assert "nowhere" in bad["error"] and "metrics" in good


def test_requests_that_failed_are_told_with_the_first_error(grid):
    line = run_point(points({**grid, "grid": {}, "points": [{"cached_tokens": 16}]})[0], sessions(0), records=True)
    assert 0 < line["failures"]["requests"] == sum(record["error"] is not None for record in line["records"])
    assert "the smallest pool has 1" in line["failures"]["first"]
    assert "failures" not in run_point(points(grid)[0], sessions(0)) and "records" not in run_point(points(grid)[0], sessions(0))


@pytest.mark.parametrize("processes", [0, -3, 1.5, True])
def test_no_processes_are_no_number_of_them(grid, tmp_path, processes):
    with pytest.raises(ConfigError, match=f"processes={processes}: use a whole number, 1 or more"):
        sweep(points(grid), tmp_path / "out.jsonl", processes=processes)


def test_two_sweeps_do_not_write_to_one_file(grid, tmp_path):
    pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"

    def meanwhile(done, of):
        with pytest.raises(ConfigError, match="another sweep is writing to it"):
            sweep(points(grid), out, processes=1)

    assert len(sweep(points(grid)[:1], out, processes=1, progress=meanwhile)) == 1
    assert len(sweep(points(grid), out, processes=1)) == len(out.read_text().splitlines()) == 5, "when it has ended the next one may"


def test_ctrl_c_says_how_far_the_sweep_has_come(grid, tmp_path):
    file, out = tmp_path / "grid.yml", tmp_path / "grid.jsonl"
    long = [{"duration_s": 1e6, "concurrency": n} for n in (1, 2, 3)]
    file.write_text(json.dumps({**grid, "grid": {}, "points": [{"concurrency": 1}, *long]}))
    code = "import sys; from minengine.cli import main; sys.exit(main(sys.argv[1:]))"
    started = subprocess.Popen([sys.executable, "-c", code, "simulate", "--sweep", str(file), "--processes", "2"], start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    while not (out.is_file() and out.read_text().endswith("\n")):
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, error = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in error
    assert f"1 of 4 points are in {out}; the same command again goes on from there" in error


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
    for text, says in (("my notes", "line 1: is no point"), ('{\n "a": 1\n}', "line 1: is no point"), (b"\xff\xfe\x00", "is no text")):
        out.write_bytes(text if isinstance(text, bytes) else text.encode())
        before = out.read_bytes()
        with pytest.raises(ConfigError, match=says):
            sweep(points(grid), out)
        assert out.read_bytes() == before
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


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nosuch.invalid:1", "nowhere"])
def test_a_cluster_that_cannot_be_reached_is_told_before_ray_is_asked(grid, monkeypatch, address):
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **how: pytest.fail("Ray was asked"), shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError, match=f"cluster='{address}': cannot be reached"):
        next(run_on_ray(points(grid), address))


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
    assert "commit" in written and written["machine"] and written["date"] and len(written["records"]) == written["counts"]["requests_in"]
    again = main(written["command"].replace(str(out), str(tmp_path / "again.json")).split()[1:])  # repeats it
    assert again == 0 and json.loads((tmp_path / "again.json").read_text())["digest"] == written["digest"]


def test_the_command_sweeps(grid, tmp_path, capsys):
    file = tmp_path / "grid.yml"
    file.write_text(json.dumps(grid))
    assert main(["simulate", "--sweep", str(file), "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "max_num_seqs" in shown and "5 points in" in shown and len((tmp_path / "grid.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("arguments, says", [
    (["--sweep", "nowhere.yml"], "cannot be read"),
    (["--sweep", "GRID"], "--sweep=GRID: is empty; `minengine simulate --help` shows such a file"),
    (["--deployment", "FOO"], "deployment: foo is unknown; use prefill"),
    (["--decode", "TP0"], "topology='TP0'"),
    (["--out", "FOLDER"], "--out=FOLDER: is a folder"),
    (["--out", "FOLDER/no/a.json"], "there is no folder FOLDER/no"),
    (["--preset", "prime-inference", "--out", "FOLDER"], "--out=FOLDER: is a folder"),
    (["--calibrate", "--out", "FOLDER"], "--out=FOLDER: is a folder"),
    (["--sweep", "FOO", "--duration-s", "5"], "--duration-s is nothing for --sweep, which takes --processes, --cluster, --out; put it into the file"),
    (["--sweep", "FOO", "--decoders", "5"], "--decoders is nothing for --sweep"),
    (["--preset", "prime-inference", "--decoders", "5"], "--decoders is nothing for --preset, which takes --quick, --trace, --out"),
    (["--calibrate", "--trace", "agentx"], "--trace is nothing for --calibrate"),
    (["--quick"], "--quick belongs to --preset or --calibrate"),
    (["--model", "glm-mini"], "--model belongs to --calibrate"),
    (["--processes", "2"], "--processes belongs to --sweep"),
    (["--cold-tokens", "5"], "--cold-tokens is of requests from outside"),
    (["--engines", "3"], "engines=3: is of engines that do both; give their topology too"),
    (["--topology", "TP8", "--decoders", "3"], "decoders=3: is of engines that prefill or decode"),
    (["--topology", "TP8", "--prefill-cached-tokens", "3000"], "prefill_cached_tokens=3000"),
    (["--topology", "TP8", "--deployment", "APART"], "prefill='DEP4'"),
    (["--duration-s", "inf"], "duration_s=inf"),
    (["--trace", "nowhere"], "nowhere"),
    (["--machine", "nowhere", "--duration-s", "1"], "machine='nowhere'"),
])
def test_what_is_wrong_with_a_command_is_one_sentence(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    for name, text in (("GRID", ""), ("FOO", "foo: 1"), ("APART", "prefill: DEP4")):
        (tmp_path / name).write_text(text)
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("minengine: ") and "Traceback" not in error


def test_a_command_whose_requests_all_fail_says_so(grid, tmp_path, capsys):
    settings = tmp_path / "deployment.yml"
    settings.write_text(json.dumps({**grid["deployment"], "cached_tokens": 16}))
    write_agentx(tmp_path, [Session("long", 16, (TraceRequest(0.0, 400, 5, tuple(range(25)), 16, think_time_s=1.0),))])
    assert main(["simulate", "--deployment", str(settings), "--trace", str(tmp_path), "--concurrency", "2", "--duration-s", "5"]) == 1
    error = capsys.readouterr().err
    assert "requests failed; the first: prompt: " in error and "the smallest pool has 1; how large the pools are is said by prefill_cached_tokens" in error


def test_a_command_within_whose_time_nothing_ends_says_so(grid, tmp_path, capsys):
    settings = tmp_path / "deployment.yml"
    settings.write_text(json.dumps(grid["deployment"]))
    assert main(["simulate", "--deployment", str(settings), "--trace", grid["run"]["trace"], "--duration-s", "0.01"]) == 1
    assert "no request ended within the 0.01 s that count; use a longer --duration-s" in capsys.readouterr().err


def test_a_sweep_tells_failed_points_and_failed_requests_apart(grid, tmp_path, capsys):
    file = tmp_path / "grid.yml"
    file.write_text(json.dumps({**grid, "grid": {"cached_tokens": [8, 16, 20_000]}, "points": []}))
    assert main(["simulate", "--sweep", str(file), "--processes", "1"]) == 2
    shown = capsys.readouterr()
    assert "2 points in" in shown.out and "; 1 failed, and are tried again next time" in shown.out
    assert "minengine: cached_tokens=8: cached_tokens: the pool" in shown.err
    assert "requests failed; the first" in shown.err and "(cached_tokens=16)" in shown.err
    file.write_text(json.dumps({**grid, "grid": {"cached_tokens": [8]}, "points": []}))
    main(["simulate", "--sweep", str(file), "--processes", "1"])
    assert "minengine: cached_tokens: the pool" in capsys.readouterr().err, "what all points have is no place"


def test_progress_where_no_bar_can_be_drawn(grid, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minengine.progress.EVERY_S", 0.0)
    file = tmp_path / "grid.yml"
    file.write_text(json.dumps(grid))
    assert main(["simulate", "--sweep", str(file), "--processes", "1"]) == 0
    assert "sweep: 3 of 5 points\n" in capsys.readouterr().err


def test_the_help_s_examples_are_what_they_say(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    for text in (command.DEPLOYMENT_YML, command.GRID_YML):
        assert all(line in shown for line in text.splitlines())
    assert len(points(yaml.safe_load(command.GRID_YML))) == 7
    assert points({"deployment": yaml.safe_load(command.DEPLOYMENT_YML), "points": [{}]})[0]["deployment"]["host_tier_bytes"] == 2 * 10 ** 12
