"""Intervals of paired differences, and how many questions a difference needs: known cases, and coverage in simulation."""
import numpy as np
import pytest

from minengine.accuracy import Outcomes, detectable, difference, interval, noise, questions, sample_size


def answers(share, contexts=40, per_context=50, seed=0):
    return Outcomes.of((np.random.default_rng(seed).random(contexts * per_context) < share).astype(float), per_context)


# --- intervals ----------------------------------------------------------------------------------------------


def test_outcomes_stay_with_their_context():
    found = Outcomes.of([1, 0, 0, 1, 1, 1], 3)
    assert found.by_context == ((1, 0, 0), (1, 1, 1)) and found.counts == (3, 3)
    assert (found.n, found.contexts, found.mean) == (6, 2, 4 / 6)
    with pytest.raises(ValueError, match="per_context=4: must divide the 6 values"):
        Outcomes.of([1, 0, 0, 1, 1, 1], 4)


def test_the_interval_of_independent_answers_is_that_of_a_proportion():
    outcomes = Outcomes.of(answers(0.9).values, 1)  # a context each
    found = interval(outcomes)
    half = 1.96 * np.sqrt(outcomes.mean * (1 - outcomes.mean) / outcomes.n)
    assert found.value == outcomes.mean and found.low == pytest.approx(outcomes.mean - half, abs=half / 20)
    assert found.high == pytest.approx(outcomes.mean + half, abs=half / 20) and (found.n, found.contexts) == (2000, 2000)


def test_a_synthetic_loss_is_found_and_pairing_makes_it_sharp():
    base = answers(0.9)
    lost = base.values * (np.random.default_rng(1).random(base.n) > 0.02)  # 2% of the right answers go wrong
    found = difference(Outcomes.of(lost, 50), base)
    assert found.value == pytest.approx(lost.mean() - base.mean, abs=1e-12)
    assert found.low < found.value < found.high < 0 and -0.03 < found.low
    unpaired = difference(Outcomes.of(np.random.default_rng(2).permutation(lost), 50), base)  # the same scores, other questions
    assert unpaired.high > 0 and unpaired.high - unpaired.low > 2 * (found.high - found.low)


def test_answers_that_stand_or_fall_together_are_worth_one_context():
    luck = (np.random.default_rng(3).random(40) < 0.7).astype(float)
    together, alone = interval(Outcomes.of(np.repeat(luck, 50), 50)), interval(Outcomes.of(np.repeat(luck, 50), 1))
    assert together.value == alone.value and (together.high - together.low) == pytest.approx((alone.high - alone.low) * np.sqrt(50), rel=0.1)


def test_contexts_of_different_sizes_count_by_their_questions():
    found = interval(Outcomes(((1.0,) * 98, (0.0, 0.0))))
    assert found.value == 0.98 and (found.low, found.high) == (0.0, 1.0)  # both draws of one context are in


def test_the_order_of_contexts_changes_nothing_and_the_seed_little():
    base, ours = answers(0.9, seed=4), answers(0.85, seed=5)
    shuffle = np.random.default_rng(6).permutation(40)
    moved = [Outcomes(tuple(one.by_context[i] for i in shuffle)) for one in (ours, base)]
    assert difference(*moved) == difference(ours, base) == difference(ours, base, seed=0)
    assert difference(ours, base, seed=1) != difference(ours, base)
    assert difference(ours, base, seed=1).low == pytest.approx(difference(ours, base).low, abs=2e-3)


def test_intervals_cover_what_they_should():
    """300 samples of 40 contexts that share their luck, true difference -3 points: 95% of the intervals hold it, within what 40 contexts allow.

    Taking questions as independent would cover far less.
    """
    rng = np.random.default_rng(7)
    clustered = naive = 0
    for _ in range(300):
        drop = np.where(rng.random(40) < 0.2, 0.15, 0.0)  # a fifth of the texts lose 15% of their answers
        wrong = rng.random((40, 20)) < drop[:, None]
        ours, base = Outcomes.of(1.0 - wrong.flatten(), 20), Outcomes.of(np.ones(800), 20)
        found = difference(ours, base, resamples=400)
        clustered += found.low <= -0.03 <= found.high
        found = difference(Outcomes.of(ours.values, 1), Outcomes.of(base.values, 1), resamples=400)
        naive += found.low <= -0.03 <= found.high
    assert 0.90 <= clustered / 300 <= 0.97
    assert naive < clustered - 15


def test_no_difference_at_all_is_no_proof():
    found = difference(answers(0.9), answers(0.9))
    assert found.value == 0 and found.high == -found.low == pytest.approx(3.69 / 2000, rel=0.01)
    flat = Outcomes.of([2.5, 1.5, 2.0], 1)  # nats: no such bound
    assert difference(flat, flat).high == 0


@pytest.mark.parametrize("ours, base, message", [
    (Outcomes(((1.0,), (0.0,))), Outcomes(((1.0,), (0.0, 1.0))), "must hold the same questions; got 2 of 2 contexts and 3 of 2"),
    (Outcomes(((1.0, 0.0),)), Outcomes(((1.0, 1.0),)), "1 contexts: use at least two"),
])
def test_what_cannot_be_compared_is_refused(ours, base, message):
    with pytest.raises(ValueError, match=message):
        difference(ours, base)


# --- numbers of questions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("score, n, right, runs", [
    (99.39, 164, 163, 1), (99.09, 164, 162.5, 2), (94.82, 164, 155.5, 2), (93.90, 164, 154, 1),  # HumanEval and HumanEval+
    (97.42, 1319, 1285, 1), (97.50, 1319, 1286, 1),  # GSM8K: +0.08 points are one question
    (100, 164, 164, 1), (0, 7, 0, 1), (33.33, 3, 1, 1),
])
def test_a_score_is_a_number_of_questions(score, n, right, runs):
    found = questions(score, n)
    assert (found.right, found.n, found.runs) == (right, n, runs)


def test_a_score_that_no_runs_explain():
    assert questions(50.5, 1).runs is None and questions(50.5, 1).right == 0.505
    with pytest.raises(ValueError, match="score_pct=101, n=10"):
        questions(101, 10)


@pytest.mark.parametrize("p, difference, discordant, n", [
    (0.6, 0.1, None, 356), (0.5, -0.1, None, 388),  # textbook cases, 80% power at the 5% level
    (0.5, 0.1, 0.3, 234), (0.9, -0.02, 0.03, 587),  # McNemar's test by Connor's formula
])
def test_sample_sizes_of_textbooks(p, difference, discordant, n):
    assert sample_size(p, difference, discordant=discordant) == n


@pytest.mark.parametrize("p, drop, discordant", [(0.95, 0.04, None), (0.6, 0.08, 0.2)])
def test_so_many_questions_tell_the_difference_as_often_as_promised(p, drop, discordant):
    """2,000 experiments of that size: McNemar's or the two-proportion test rejects in 80% of them."""
    n, rng, z = sample_size(p, -drop, discordant=discordant), np.random.default_rng(8), 1.959964
    if discordant is None:
        a, b = rng.binomial(n, p, 2000) / n, rng.binomial(n, p - drop, 2000) / n
        mean = (a + b) / 2
        rejected = np.abs(a - b) > z * np.sqrt(2 * mean * (1 - mean) / n)
    else:
        lost, won, _ = rng.multinomial(n, [(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant], 2000).T
        rejected = np.abs(lost - won) > z * np.sqrt(lost + won)
    assert rejected.mean() == pytest.approx(0.8, abs=0.03)


def test_detectable_is_the_inverse():
    for p, n, discordant in ((0.95, 2000, None), (0.95, 2000, 0.02), (0.5, 100, 0.3)):
        drop = detectable(p, n, discordant=discordant)
        assert sample_size(p, -drop, discordant=discordant) <= n < sample_size(p, -0.98 * drop, discordant=discordant)
    assert detectable(0.95, 1) is None and detectable(0.95, 10, discordant=0.01) is None and detectable(0.0, 100) is None


def test_noise_of_two_like_scores():
    rng = np.random.default_rng(9)
    apart = (rng.binomial(164, 0.94, 20_000) - rng.binomial(164, 0.94, 20_000)) / 164
    assert (np.abs(apart) <= noise(0.94, 164)).mean() == pytest.approx(0.95, abs=0.01)
    assert noise(0.94, 164, runs=4) == pytest.approx(noise(0.94, 164) / 2)


@pytest.mark.parametrize("call, message", [
    (lambda: sample_size(0.9, 0), "difference=0: use one other than 0"), (lambda: sample_size(0.9, 0.2), "difference=0.2"),
    (lambda: sample_size(1.2, 0.1), "p=1.2"), (lambda: sample_size(0.9, -0.05, discordant=0.01), "discordant=0.01: a difference of -0.05 makes at least 0.05"),
    (lambda: sample_size(0.9, -0.05, power=1.0), "power=1.0"), (lambda: detectable(0.9, 0), "n=0"), (lambda: noise(0.9, 100, runs=0), "runs=0"),
])
def test_impossible_questions_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
