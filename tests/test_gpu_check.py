"""What `make gpu-check` makes of its samples: cases, targets and the stored file. The samples themselves need a card."""
from itertools import islice
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from kernel_harness import run_python
from minengine.claims import read_claims
from minengine.results import read_results


def measured(**medians):
    return {name: {"name": name, "what": "w", "unit": "µs", "n": 25, "median": value, "spread": [value, value], "claim": None}
            for name, value in medians.items()}


POINT, MANY, QUARTER = (f"{tokens} tokens, 16 heads, {fill}% full, cold L2" for tokens, fill in ((15, 100), (256, 100), (256, 25)))
GOOD = {f"native: {POINT}": 12.0, f"staged: {POINT}": 17.7, f"fp8: {POINT}": 13.7, f"native: {MANY}": 100.0, f"fp8: {MANY}": 130.0,
        f"native: {QUARTER}": 40.0, f"native, share of its floor: {MANY}": 0.7}


def test_the_sources_own_times_meet_the_targets_of_a_card_with_the_instruction():
    assert [line.split()[0] for line in gpu_check.targets(measured(**GOOD), has_convert=True)] == ["met"] * 5


@pytest.mark.parametrize("change, has_convert, missed", [
    ({f"native: {POINT}": 12.4}, True, [0, 1]),  # .7006 of staged, .905 of fp8
    ({f"native: {POINT}": 12.4}, False, []),
    ({f"fp8: {MANY}": 120.0}, True, [2]),
    ({f"native, share of its floor: {MANY}": 0.59}, True, [3]),
    ({f"native: {QUARTER}": 46.0}, True, [4]),
])
def test_a_target_is_missed_by_what_it_judges_alone(change, has_convert, missed):
    lines = gpu_check.targets(measured(**GOOD | change), has_convert)
    assert [i for i, line in enumerate(lines) if line.startswith("MISSED")] == missed


def test_the_targets_cases_are_measured_and_no_two_cases_share_a_name():
    from bench.gpu_kernels import CASES

    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and {POINT, MANY, QUARTER} <= set(names)


def test_a_list_is_filled_from_the_front_and_its_empty_entries_are_what_the_case_says():
    from bench.gpu_kernels import Case, Pool

    pool = Pool(rows=256, device="cpu")
    assert {name: pages.shape for name, pages in pool.pages.items()} == {
        "nvfp4_fp8_ds_mla": (4, 64, 352), "fp8": (4, 64, 576), "fp8_ds_mla": (4, 64, 656)}
    for empty, wanted in (("skipped", -1), ("row zero", 0)):
        first, second = islice(pool.lists(Case(3, fill=0.25, empty=empty)), 2)
        assert first.shape == (3, 2048) and (first[:, 512:] == wanted).all() and (first[:, :512] >= 0).all()
        assert not torch.equal(first, second)  # a cold launch reads other rows than the one before
    assert pool.query(Case(3, heads=64)).shape == (3, 64, 576)


def test_the_file_is_one_that_the_book_reads(tmp_path):
    path = gpu_check.write(tmp_path, "NVIDIA H200", "a" * 40, measured(**GOOD))
    assert path.name == "gpu-h200.json"
    kept = read_results(tmp_path)
    assert kept[f"h200/native: {POINT}"].median == 12.0 and kept[f"h200/native: {POINT}"].command == "make gpu-check"
    assert set(gpu_check.CLAIMS.values()) <= set(read_claims())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, on which this would run everything")
def test_without_a_card_it_says_so_in_one_line():
    result = run_python("-m", "bench.gpu_check")
    assert result.returncode == 1 and result.stderr.strip() == "gpu-check: torch sees no CUDA device; run it on a GPU box with a CUDA build of torch"


def test_the_chapter_on_the_kernel_asks_for_cases_that_are_measured():
    from bench.gpu_kernels import CASES

    text = (Path(__file__).resolve().parents[1] / "chapters/08-a-kernel-that-reads-four-bits.md").read_text(encoding="utf-8")
    names = {}
    exec(text[text.index("point, short = "):text.index('lines = ["| launch |')], names)
    measured = {f"{path}: {case.name}" for case in CASES for path in gpu_check.PATHS}
    assert len(names["cases"]) == 5 and set(names["cases"].values()) <= measured
