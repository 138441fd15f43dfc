"""Stored measurements: whole files are read, and whatever is wrong in one is named."""
import json
import subprocess
import sys
from datetime import date

import pytest

from minengine.claims import read_claims
from minengine.results import ResultError, read_results

ONE = {"name": "native", "what": "A launch of the native kernel", "unit": "µs", "n": 30, "median": 12.0, "spread": [11.8, 12.5], "claim": "kernel_native_us"}
RUN = {"machine": "a GPU", "versions": {"python": "3.12.1", "torch": "2.13.0"}, "commit": "0123456789" * 4, "command": "make gpu", "date": "2026-01-31",
       "measurements": [ONE]}


def stored(folder, run, name="a.json"):
    (folder / name).write_text(run if isinstance(run, str) else json.dumps(run), encoding="utf-8")
    return read_results(folder)


def test_a_measurement_carries_what_its_run_was(tmp_path):
    found = stored(tmp_path, RUN)["native"]
    assert (found.median, found.spread, found.n, found.unit, found.claim) == (12.0, (11.8, 12.5), 30, "µs", "kernel_native_us")
    assert (found.machine, found.versions["torch"], found.commit, found.command) == ("a GPU", "2.13.0", "0123456789" * 4, "make gpu")
    assert (found.date, found.file) == (date(2026, 1, 31), "a.json")


def test_no_folder_and_no_file_are_no_results(tmp_path):
    assert read_results(tmp_path) == {} and read_results(tmp_path / "none") == {}


def test_what_the_repository_stores_can_be_read_and_names_claims_that_exist():
    claims = read_claims()
    for measurement in read_results().values():
        assert measurement.claim is None or claims[measurement.claim].book in ("gpu", "run", "simulate", "bound"), measurement.name


@pytest.mark.parametrize("field, value", [
    ("machine", ""), ("machine", None), ("versions", {}), ("versions", {"torch": "2"}), ("versions", {"python": 3}), ("commit", "abc"), ("commit", "G" * 40),
    ("command", " "), ("date", "31.1.2026"), ("date", 20260131), ("measurements", []), ("measurements", [3]), ("measurements", None),
])
def test_a_wrong_field_of_a_run_is_named(tmp_path, field, value):
    with pytest.raises(ResultError, match=rf"^a\.json, field '{field}': is .*; give "):
        stored(tmp_path, {**RUN, field: value})
    with pytest.raises(ResultError, match=rf"^a\.json, field '{field}': is missing; give "):
        stored(tmp_path, {key: value for key, value in RUN.items() if key != field})


@pytest.mark.parametrize("field, value", [
    ("what", 1), ("unit", ""), ("n", 0), ("n", 2.5), ("n", True), ("median", "12"), ("median", float("nan")), ("median", True), ("spread", 1),
    ("spread", [1]), ("spread", [12.5, 11.8]), ("spread", [11.8, None]), ("claim", 3),
])
def test_a_wrong_field_of_a_measurement_is_named(tmp_path, field, value):
    with pytest.raises(ResultError, match=rf"^a\.json, measurement 'native', field '{field}': is .*; give "):
        stored(tmp_path, {**RUN, "measurements": [{**ONE, field: value}]})
    with pytest.raises(ResultError, match=rf"^a\.json, measurement 'native', field '{field}': is missing; give "):
        stored(tmp_path, {**RUN, "measurements": [{key: value for key, value in ONE.items() if key != field}]})


def test_unknown_fields_broken_files_and_impossible_spreads(tmp_path):
    with pytest.raises(ResultError, match="a.json, field 'colour': is unknown; use machine"):
        stored(tmp_path, {**RUN, "colour": "red"})
    with pytest.raises(ResultError, match="measurement 'native', field 'mean': is unknown"):
        stored(tmp_path, {**RUN, "measurements": [{**ONE, "mean": 1}]})
    with pytest.raises(ResultError, match=r"field 'spread': \[11.8, 12.5\] leaves out the median 13"):
        stored(tmp_path, {**RUN, "measurements": [{**ONE, "median": 13}]})
    with pytest.raises(ResultError, match="a.json: is no JSON"):
        stored(tmp_path, "{")
    with pytest.raises(ResultError, match="a.json: is no object"):
        stored(tmp_path, "[]")


def test_a_name_is_there_once(tmp_path):
    stored(tmp_path, RUN)
    with pytest.raises(ResultError, match="b.json, measurement 'native', field 'name': is in a.json too"):
        stored(tmp_path, RUN, "b.json")


def test_reading_results_needs_neither_torch_nor_numpy():
    code = "import sys, minengine.results, minengine.claims; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
