"""The benchmark's own logic: the workload is the same everywhere, ratios and targets say what they claim, runs go there and back."""
import json
import sys

import pytest

from bench.harness import Bench, BenchError, Variant
from bench.table import Row, as_json, at_least, at_most, figure, ratio, render
from bench.workload import FIRST_TEXT_TOKEN, VOCAB, Item, make_workload, prompt, workload_hash

# --- the workload ------------------------------------------------------------------------------------------------


def test_the_workload_is_the_same_on_every_machine():
    work = make_workload()
    assert workload_hash(work) == "fc8e166e033cac5e411743b9baa8d7d430f86b44c1b1f973a488b959cfc4b7c8"
    assert (sum(len(i.prompt_token_ids) for i in work), sum(i.output_tokens for i in work)) == (8248, 2379)


def test_lengths_fill_their_ranges_and_ids_are_text():
    work = make_workload(2000, (1, 4), (2, 3), seed=5)
    assert {len(i.prompt_token_ids) for i in work} == {1, 2, 3, 4}
    assert {i.output_tokens for i in work} == {2, 3}
    assert all(FIRST_TEXT_TOKEN <= token < VOCAB for i in work for token in i.prompt_token_ids)


def test_hash_sees_every_length_and_id():
    base = workload_hash([Item((1, 2), 3), Item((4,), 5)])
    others = [[Item((1, 2), 4), Item((4,), 5)], [Item((2, 1), 3), Item((4,), 5)], [Item((4,), 5), Item((1, 2), 3)], [Item((1, 2), 3)],
              [Item((12,), 3), Item((4,), 5)]]
    assert base not in {workload_hash(other) for other in others}


def test_prompts_of_different_seeds_share_no_block():
    assert prompt(64, 3) == prompt(64, 3)
    assert len({tuple(prompt(64, seed)[:16]) for seed in range(50)}) == 50


# --- ratios, targets, table --------------------------------------------------------------------------------------


def test_ratio_is_median_over_median_and_its_spread_is_the_widest():
    # ours: median 20, middle half 15 to 25; theirs: median 10, middle half 9 to 11
    row = ratio("speed", [10, 15, 20, 25, 30], [8, 9, 10, 11, 12], at_least(2.0), "tok/s")
    assert (row.value, row.low, row.high, row.unit) == (2.0, 15 / 11, 25 / 9, "x")
    assert row.met is True  # the limit itself is met


def test_a_figure_is_judged_by_its_median():
    row = figure("start-up", [1.0, 2.0, 100.0], at_most(2.0), "s")
    assert (row.value, row.met) == (2.0, True)
    assert figure("start-up", [1.0, 2.5, 3.0], at_most(2.0), "s").met is False
    assert figure("seen", [1.0], None, "s").met is None


@pytest.mark.parametrize("target, value, met", [(at_least(3), 2.999, False), (at_least(3), 3.0, True), (at_most(5), 5.0, True), (at_most(5), 5.001, False)])
def test_target(target, value, met):
    assert target.met_by(value) is met


def test_table_shows_both_sides_their_counts_and_what_is_missed():
    text = render([ratio("speed", [10, 10, 10], [10, 10], at_least(3.0), "tok/s", note="a note"), figure("pool", [0.5], None, "GB")])
    header, _, speed, pool, note = text.splitlines()
    cells = [cell.strip() for cell in speed.strip("|").split("|")]
    assert cells == ["speed", "10.0 tok/s (10.0 to 10.0)", "3", "10.0 tok/s (10.0 to 10.0)", "2", "1.00x (1.00 to 1.00)", ">= 3.00x", "NO"]
    assert [cell.strip() for cell in pool.strip("|").split("|")] == ["pool", "0.500 GB (0.500 to 0.500)", "1", "", "", "0.500 GB (0.500 to 0.500)",
                                                                    "reported", ""]
    assert len({len(line) for line in (header, speed, pool)}) == 1 and note.strip() == "speed: a note"


def test_report_keeps_the_verdict_and_is_json():
    saved = json.loads(json.dumps(as_json([ratio("speed", [6.0], [2.0], at_least(3.0), "tok/s"), figure("pool", [1.0], None, "GB")])))
    assert [row["met"] for row in saved] == [True, None]
    assert saved[0]["target"] == {"limit": 3.0, "at_least": True} and saved[0]["ours"]["n"] == 1 and saved[1]["theirs"] is None


def test_row_is_judged_by_its_value_not_by_its_spread():
    samples = ratio("speed", [3.0, 3.0, 30.0], [1.0], at_least(3.0), "s")
    assert isinstance(samples, Row) and samples.high == 16.5 and samples.met


# --- the harness, with variants that need no model ---------------------------------------------------------------


def test_variants_run_there_and_back(tmp_path):
    bench = Bench(threads=1, out=tmp_path, log=lambda text: None)
    results = bench.there_and_back([Variant(name, "builtins:dict", {"name": name}) for name in "ab"], rounds=2)
    assert [run.variant for run in bench.runs] == ["a", "b", "b", "a"] * 2
    assert results == {name: [{"threads": 1, "name": name}] * 4 for name in "ab"}
    assert all(run.wall_s > 0 and run.cpu_s > 0 and run.max_rss_bytes > 1 << 20 for run in bench.runs)


def test_a_failed_variant_says_which_and_why(tmp_path):
    bench = Bench(threads=1, out=tmp_path, log=lambda text: None)
    with pytest.raises(BenchError, match=r"(?s)broken ended with exit code 1; it printed last:.*TypeError"):
        bench.run(Variant("broken", "builtins:abs"))  # abs() takes no keyword arguments
    assert bench.runs == []


def test_this_process_stays_small():
    """The parent must not load torch: `python -m bench` measures its children's memory."""
    import subprocess

    code = "import sys, bench.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- the weights that peers load ---------------------------------------------------------------------------------


def test_split_halves_undoes_the_interleaving():
    import torch

    from bench.export_hf import split_halves
    from minengine.model.rope import interleave_rows

    weight = torch.arange(2 * 8 * 3).view(16, 3)  # 2 heads of 8
    assert torch.equal(split_halves(interleave_rows(weight, 2), 2), weight)
    assert not torch.equal(interleave_rows(weight, 2), weight)


# --- replayed churn ----------------------------------------------------------------------------------------------


def test_churn_counts_runs_and_names_equal_tokens_alike():
    from bench import churn
    from minengine.workload.traces import TraceRequest

    assert [churn.num_runs(table) for table in ([4], [4, 5, 6], [6, 5, 4], [0, 1, 9, 10, 2])] == [1, 1, 3, 3]
    one, other = (TraceRequest(0.0, tokens, 1, ids, 512) for tokens, ids in ((1000, (7, 8)), (512 + 64, (7, 9))))
    a, b = churn.hashes(one), churn.hashes(other)
    assert (len(a), len(b)) == (1000 // 64, 9) and len(set(a) | set(b)) == 15 + 1
    assert a[:8] == b[:8] and a[8] != b[8], "a block is the same as long as the trace's ids are"


def test_churn_is_compared_with_the_lowest_free_blocks_and_with_those_that_came_back_first(monkeypatch):
    from bench import churn

    monkeypatch.setattr(churn, "NUM_BLOCKS", 6)
    for order, wanted in (("own", [4, 5, 1]), ("first_fit", [1, 4, 5]), ("queue", [5, 4, 1])):
        pool = churn.make_pool(order)
        tables = [pool.allocate(1), pool.allocate(1), pool.allocate(2), pool.allocate(2)]
        assert tables == [[0], [1], [2, 3], [4, 5]]
        pool.release(tables[3])
        pool.release(tables[1])
        pool.register(0, b"old")
        pool.release([0])
        assert pool.allocate(3) == wanted, order
        assert pool.allocate(1) == [0] and pool.num_evictions == 1
