"""What the bench decides without measuring: the workload is the same everywhere, ratios and targets mean what they say."""
from bench.table import as_json, at_least, at_most, figure, ratio, render
from bench.workload import FIRST_TEXT_TOKEN, VOCAB, make_workload, prompt, workload_hash


def test_the_workload_is_the_same_on_every_machine():
    work = make_workload()
    assert workload_hash(work) == "fc8e166e033cac5e411743b9baa8d7d430f86b44c1b1f973a488b959cfc4b7c8"
    assert workload_hash(work) != workload_hash(make_workload(seed=1)) != workload_hash(work[:-1])
    assert len(work) == 32
    for item in work:
        assert 32 <= len(item.prompt_token_ids) <= 512 and 16 <= item.output_tokens <= 128
        assert all(FIRST_TEXT_TOKEN <= token < VOCAB for token in item.prompt_token_ids)
    assert len(prompt(1024, 1)) == 1024 and prompt(100, 1) != prompt(100, 2)


def test_a_ratio_is_median_over_median_and_its_spread_the_widest():
    row = ratio("speed", [90, 100, 110], [40, 50, 60], at_least(2.0), "tok/s")
    assert row.value == 2.0 and row.met
    assert row.low == row.ours.low / row.theirs.high < 2.0 < row.high == row.ours.high / row.theirs.low


def test_targets_judge_in_their_own_direction():
    assert figure("start-up", [9.0, 9.9, 30.0], at_most(10.0), "s").met
    assert not figure("start-up", [9.0, 10.1, 30.0], at_most(10.0), "s").met
    assert not ratio("speed", [1.0], [1.0], at_least(1.1), "tok/s").met
    assert figure("seen", [1.0], None, "s").met is None


def test_the_table_says_whether_a_target_is_missed_and_keeps_samples_counted():
    text = render([ratio("slow", [1.0, 1.0], [2.0], at_least(3.0), "tok/s", "a note"), figure("only seen", [0.5], None, "s")])
    slow, seen = text.splitlines()[2:4]
    assert "0.500x" in slow and ">= 3.00x" in slow and "NO" in slow and "| 2 " in slow
    assert "reported" in seen and "NO" not in seen and "slow: a note" in text
    assert as_json([figure("x", [1.0], at_most(2.0), "s")])[0]["met"] is True
