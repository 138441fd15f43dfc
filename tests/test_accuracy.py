"""Accuracy through the cache: questions are the same for every format, tokens are scored from what the cache gives back, runs go on where they stopped."""
import json
import re

import numpy as np
import pytest
import torch

from minengine import LLM, ConfigError, SamplingParams
from minengine.accuracy import Outcomes, agreement, continuations, difference, interval, needle, perplexity, recall, stored
from minengine.accuracy import run as runs
from minengine.accuracy.needle import NAMES, make_needle
from minengine.accuracy.perplexity import CHUNK, token_nll
from minengine.cli import main
from minengine.results import ResultError, read_results
from minengine.workload.texts import TEXTS, paragraphs


def mini(kv_cache_dtype="float32", **options):
    return LLM("glm-mini", **{"kv_cache_dtype": kv_cache_dtype, "max_model_len": 512, "max_num_seqs": 16, **options})


# --- texts --------------------------------------------------------------------------------------------------


def test_texts_are_whole_paragraphs_on_a_line_each():
    constitution, declaration = map(paragraphs, TEXTS)
    assert any(one.startswith("We the People of the United States, in Order to form a more perfect Union") for one in constitution)
    assert any(one.startswith("When in the Course of human events") for one in declaration)
    assert all("\n" not in one and one == one.strip() for one in constitution + declaration)
    with pytest.raises(ValueError, match="name='moby-dick': use one of us-constitution, us-declaration"):
        paragraphs("moby-dick")


# --- recall -------------------------------------------------------------------------------------------------


def test_recall_keeps_every_answer_so_that_formats_can_be_paired():
    plain, coarse = (recall(mini(name), 128, 30, contexts=3, queries=10, seed=5) for name in ("bfloat16", "int2"))
    assert plain.n == len(plain.answers) == 30 and plain.right == sum(plain.answers)
    assert plain.outcomes.counts == (10, 10, 10) and plain.outcomes.mean == plain.share
    assert coarse.right < plain.right
    found = difference(coarse.outcomes, plain.outcomes)
    assert found.value == pytest.approx(coarse.share - plain.share) and found.high < 0
    some, of_one = (recall(mini("int3"), 128, 30, contexts, queries=10, seed=5) for contexts in (3, 1))
    assert some.answers[:10] == of_one.answers and 0 < of_one.right < 10  # in the questions' order


# --- perplexity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "fp8_ds_mla", "int2"])
def test_a_token_s_score_is_what_the_engine_gave_it_when_it_said_it(kv_cache_dtype):
    """Decoded one by one through the cache, or scored in chunks through it: the same numbers, on both sides of a chunk's edge."""
    llm = mini(kv_cache_dtype, block_size=16)
    prompt = np.random.default_rng(0).integers(3, 500, CHUNK - 8).tolist()
    said = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1))[0].outputs[0]
    wanted = [-one[token].logprob for one, token in zip(said.logprobs, said.token_ids)]
    got = token_nll(llm, [*prompt, *said.token_ids])
    assert got.shape == (len(prompt) + 19,) and got[-20:].tolist() == pytest.approx(wanted, abs=2e-3)
    again = token_nll(llm, [*prompt, *said.token_ids])
    assert torch.equal(got, again)  # what the blocks held before does not count


def test_a_row_format_changes_the_score_and_a_text_that_does_not_fit_is_refused():
    ids = np.random.default_rng(1).integers(3, 500, 300).tolist()
    exact, coarse = (token_nll(mini(name), ids) for name in ("float32", "int2"))
    assert (exact - coarse).abs().max() > 0.05
    small = mini(num_gpu_blocks_override=4, block_size=16, max_model_len=64)
    with pytest.raises(ValueError, match="300 tokens do not fit: the cache holds 64, a request 64"):
        token_nll(small, ids)
    small.llm_engine.add_request("open", [5, 6, 7])
    with pytest.raises(ValueError, match="has requests in its cache"):
        token_nll(small, ids[:10])


def test_prefixes_are_forgotten_once_their_blocks_are_overwritten():
    llm = mini(block_size=16)
    prompt = {"prompt_token_ids": np.random.default_rng(2).integers(3, 500, 64).tolist()}
    first = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    token_nll(llm, list(range(3, 200)))
    second = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    assert second.num_cached_tokens == 0 and second.outputs[0].token_ids == first.outputs[0].token_ids


# --- needles ------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text, add_special_tokens=False):
        return [ord(one) for one in text]


def test_a_needle_context_says_every_code_twice_in_exactly_that_many_tokens():
    letters = Letters()
    for seed in range(20):
        task = make_needle(letters, np.random.default_rng(seed), 1600, 5)
        text = "".join(map(chr, task.context))
        assert len(task.context) == 1600 and len(task.questions) == len(task.codes) == len(set(task.questions)) == 5
        for question, code in zip(task.questions, task.codes):
            fact = "".join(map(chr, question)) + code
            assert re.fullmatch(r"The secret code of [A-Z][a-z]+ is \d{4}", fact) and text.count(f"{fact}.\n\n") == 2
        assert len(re.findall("secret code", text)) == 10
        assert task == make_needle(letters, np.random.default_rng(seed), 1600, 5)
    with pytest.raises(ValueError, match=f"codes=99: use 1 to {len(NAMES)}"):
        make_needle(letters, np.random.default_rng(0), 1600, 99)
    with pytest.raises(ValueError, match=r"length=300: 5 codes take \d+ tokens"):
        make_needle(letters, np.random.default_rng(0), 300, 5)


@pytest.fixture(scope="module")
def smollm2():
    return LLM("smollm2", kv_cache_dtype="bfloat16", block_size=16, max_model_len=512)


def test_smollm2_finds_needles_in_its_cache_and_nothing_in_an_empty_one(smollm2, monkeypatch):
    found = needle(smollm2, contexts=2, codes=2, lengths=(150, 200))
    assert found.counts == (2, 2) and found.mean >= 0.5
    generate = smollm2.generate

    def forgetful(prompts, params):
        outs = generate(prompts, params)
        smollm2.zero_kv_cache()
        return outs

    monkeypatch.setattr(smollm2, "generate", forgetful)
    assert needle(smollm2, contexts=2, codes=2, lengths=(150, 200)).mean == 0
    monkeypatch.setattr(smollm2, "generate", lambda prompts, params: (smollm2.reset_prefix_cache(), generate(prompts, params))[1])
    with pytest.raises(RuntimeError, match="context 0: only 0 of 160 tokens came from the cache"):
        needle(smollm2, contexts=2, codes=2, lengths=(150, 200))
    with pytest.raises(ValueError, match=re.escape("lengths=(17, 31): no whole number of blocks of 16")):
        needle(smollm2, lengths=(17, 31))


def test_perplexity_and_continuations_of_smollm2(smollm2):
    found = perplexity(smollm2, window=48, windows=2)
    assert found.counts == (1, 1) and 1 < np.exp(found.mean) < 60
    answers = continuations(smollm2, prompts=2, tokens=5, passage=24)
    assert [len(one) for one in answers] == [5, 5] and answers == continuations(smollm2, prompts=2, tokens=5, passage=24)
    assert agreement(answers, answers).by_context == ((5,), (5,))
    with pytest.raises(ValueError, match="window=1: use 2 to"):
        perplexity(smollm2, window=1)


def test_agreement_counts_to_the_first_difference():
    assert agreement([(1, 2, 3), (4, 5, 6), (7, 8, 9)], [(1, 2, 3), (4, 0, 6), (0, 8, 9)]).by_context == ((3,), (1,), (0,))
    with pytest.raises(ValueError, match="got 1 and 2 answers"):
        agreement([(1,)], [(1,), (2,)])


# --- runs and what they store -------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Recall answered by chance, with the number of times it was asked."""
    calls = []

    def answer(llm, length, pairs, contexts, queries, seed):
        calls.append((length, llm.kv_cache.kv_cache_dtype))
        return type("Score", (), {"outcomes": Outcomes.of(np.random.default_rng((seed, len(calls))).integers(2, size=contexts * queries), queries)})

    monkeypatch.setattr(runs, "recall", answer)
    return calls


def test_a_run_goes_on_where_it_stopped_and_a_new_seed_starts_anew(tmp_path, asked, monkeypatch):
    answer = runs.recall

    def stop(*args):
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(runs, "recall", stop)
    with pytest.raises(KeyboardInterrupt):
        runs.measure(tmp_path, ["recall"], quick=True)
    assert list(stored(tmp_path)["recall-256-16"].scores) == ["bfloat16", "fp8_ds_mla", "int4"]  # what is finished is there already
    monkeypatch.setattr(runs, "recall", answer)
    path = runs.measure(tmp_path, ["recall"], quick=True)
    assert len(asked) == len(set(asked)) == 8
    written = path.read_text()
    runs.measure(tmp_path, ["recall"], quick=True)
    assert len(asked) == 8 and path.read_text() == written
    runs.measure(tmp_path, ["recall"], seed=1, quick=True)
    assert len(asked) == 16 and stored(tmp_path)["recall-256-16"].seed == 1


def test_what_is_stored_is_what_the_outcomes_say(tmp_path, asked):
    runs.measure(tmp_path, ["recall"], quick=True)
    task = stored(tmp_path)["recall-1024-64"]
    assert (task.kind, task.model, task.baseline, task.unit) == ("recall", "glm-mini", "bfloat16", "share of answers")
    assert task.setting == {"length": 1024, "pairs": 64, "contexts": 2, "queries": 8} and task.versions["torch"] == torch.__version__
    plain = task.scores["bfloat16"]
    assert plain.difference is None and plain.row_bytes > task.scores["int4"].row_bytes
    for score in task.scores.values():
        check(score, plain)
    assert read_results(tmp_path) == {}


def check(score, plain):
    again = interval(score.outcomes)
    assert [score.mean.value, score.mean.low, score.mean.high] == pytest.approx([again.value, again.low, again.high], abs=1e-6)
    if score is plain:
        return
    again = difference(score.outcomes, plain.outcomes)
    assert [score.difference.value, score.difference.low, score.difference.high] == pytest.approx([again.value, again.low, again.high], abs=1e-6)
    lost, won = score.changed(plain)
    if np.isin([score.outcomes.values, plain.outcomes.values], (0, 1)).all():
        assert (won - lost) / score.outcomes.n == pytest.approx(score.difference.value, abs=1e-6)


def test_what_the_repository_stores_can_be_computed_again():
    for task in stored().values():
        plain = task.scores[task.baseline]
        assert plain.difference is None and len(task.commit) == 40
        for score in task.scores.values():
            check(score, plain)


def test_the_command_measures_and_refuses_what_it_does_not_know(tmp_path, asked, capsys):
    assert main(["accuracy", "--out", str(tmp_path), "--only", "recall", "--quick"]) == 0
    assert capsys.readouterr().out.strip().endswith(".json") and len(asked) == 8
    assert main(["accuracy", "--out", str(tmp_path), "--only", "recall,gsm8k"]) == 2
    assert "only='gsm8k': use one or more of recall, perplexity, needle, agreement" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="only='all'"):
        runs.measure(tmp_path, ["all"])
    with pytest.raises(ConfigError, match="seed=-1: use 0 or more"):
        runs.measure(tmp_path, ["recall"], seed=-1)
    (tmp_path / "file").touch()
    assert main(["accuracy", "--out", str(tmp_path / "file"), "--quick"]) == 2
    assert "is no folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("damage, message", [
    (lambda run: "{", "accuracy-a.json: .*; write the file with `minengine accuracy`"),
    (lambda run: json.dumps({**run, "tasks": [{**run["tasks"][0], "scores": run["tasks"][0]["scores"][1:]}]}), "field or baseline 'bfloat16' is missing"),
    (lambda run: json.dumps({key: value for key, value in run.items() if key != "commit"}), "field or baseline 'commit' is missing"),
    (lambda run: json.dumps({**run, "date": "today"}), "accuracy-a.json: .*today"),
])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, asked, damage, message):
    run = json.loads(runs.measure(tmp_path / "run", ["recall"], quick=True).read_text())
    (tmp_path / "accuracy-a.json").write_text(damage(run))
    with pytest.raises(ResultError, match=message):
        stored(tmp_path)
