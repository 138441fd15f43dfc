"""Sampling against its definition: what each filter keeps, the law of the draws, seeds, log-probabilities."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minengine.request import Request, RequestError, SamplingParams
from minengine.sampling import distribution, sample


def request(**params):
    return Request("r", [1], SamplingParams(**params), max_model_len=1000)


def kept(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The tokens that keep probability, by the definitions, one filter at a time in plain Python."""
    exps = [math.exp((x - max(logits)) / temperature) for x in logits]
    probs = [e / sum(exps) for e in exps]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    alive = [i for i in order if probs[i] >= min_p * probs[order[0]]]
    alive = [i for i in alive if not top_k or i in order[:top_k]]
    total, mass, nucleus = sum(probs[i] for i in alive), 0.0, []
    for i in alive:
        if top_p == 1.0 or mass < top_p * total:
            nucleus.append(i)
        mass += probs[i]
    return {i: probs[i] for i in nucleus}


@settings(max_examples=200)
@given(logits=st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=2, max_size=12), temperature=st.sampled_from([0.3, 1.0, 2.5]),
       min_p=st.sampled_from([0.0, 0.07, 0.6]), top_k=st.sampled_from([0, 1, 3, 100]), top_p=st.sampled_from([1.0, 0.83, 0.31]))
def test_filters_keep_what_their_definitions_keep(logits, temperature, min_p, top_k, top_p):
    probs, ids = distribution(torch.tensor([logits]), temperature=[temperature], min_p=[min_p], top_k=[top_k], top_p=[top_p])
    got = {i: p for i, p in zip(ids[0].tolist(), probs[0].tolist()) if p > 0}
    want = kept(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    # A token whose mass lies within rounding of the nucleus' edge may fall on either side.
    edge = {i for i in got.keys() ^ want.keys()}
    if edge:
        wider = kept(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p + 1e-5)
        narrower = kept(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p - 1e-5)
        assert edge <= wider.keys() - narrower.keys()
    for i in got.keys() & want.keys():
        assert got[i] == pytest.approx(want[i], rel=1e-4)


def test_greedy_takes_the_best_and_mixes_with_sampled_rows():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    greedy = [request(temperature=0.0) for _ in range(3)]
    drawn = [request(temperature=1.0, top_k=1) for _ in range(3)]  # top_k=1 leaves one token, whatever the draw
    rows = [r for pair in zip(greedy, drawn) for r in pair]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


def test_the_best_token_survives_every_filter():
    torch.manual_seed(4)
    logits = torch.randn(1, 30)
    for extreme in (dict(top_p=1e-46), dict(temperature=1e-46), dict(temperature=1e-5), dict(min_p=1.0), dict(top_k=1, top_p=1e-30, min_p=1.0)):
        assert sample(logits, [request(**extreme)]) == [logits.argmax().item()], extreme


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5]])
    r = request(temperature=0.8, top_k=5, seed=3)
    n = 20_000
    counts = torch.zeros(6)
    for _ in range(n // 100):
        for token in sample(logits.expand(100, -1), [r] * 100):
            counts[token] += 1
    want = (logits[0] / 0.8).softmax(-1)
    want[3] = 0
    want /= want.sum()
    chi2 = sum((counts[i].item() - n * want[i].item()) ** 2 / (n * want[i].item()) for i in range(6) if i != 3)
    assert counts[3] == 0 and chi2 < 18.5, chi2  # the 99.9% point at 4 degrees of freedom


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(30, 40)
    alone = request(temperature=1.3, seed=42)
    want = [sample(row[None], [alone])[0] for row in logits]
    crowd, other = request(temperature=1.3, seed=42), request(temperature=0.7, seed=1, top_p=0.5)
    got = [sample(torch.stack([torch.randn(40), row]), [other, crowd])[1] for row in logits]
    assert got == want
    different = request(temperature=1.3, seed=43)
    assert [sample(row[None], [different])[0] for row in logits] != want


def test_logprobs_are_of_the_unmodified_distribution():
    torch.manual_seed(2)
    logits = torch.randn(3, 20)
    rows = [request(temperature=0.0, logprobs=3), request(temperature=0.0), request(temperature=5.0, seed=0, logprobs=0)]
    tokens = sample(logits, rows)
    logp = logits.double().log_softmax(-1)
    entry = rows[0].logprobs[0]
    assert list(entry) == logp[0].topk(3).indices.tolist() and entry[tokens[0]].rank == 1
    for token, value in entry.items():
        assert value.logprob == pytest.approx(logp[0, token].item(), abs=1e-5)
    assert rows[1].logprobs is None
    (token, value), = rows[2].logprobs[0].items()
    assert token == tokens[2] and value.logprob == pytest.approx(logp[2, token].item(), abs=1e-5)
    assert value.rank == (logp[2] > logp[2, token]).sum().item() + 1


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=0), dict(top_p=1.5), dict(top_k=-2), dict(top_k=1.5),
                                 dict(min_p=2), dict(max_tokens=0), dict(stop=""), dict(stop=["a", ""]), dict(stop_token_ids=[-1]), dict(logprobs=99),
                                 dict(stop=5), dict(stop_token_ids=5), dict(temperature="hot"), dict(seed="x")])
def test_bad_parameters_name_the_field(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
