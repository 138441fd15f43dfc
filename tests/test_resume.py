"""A request that one engine began and another goes on with gives what one engine alone gives: tokens, text, log-probabilities, stop, in
deltas that nobody can tell apart; and blocks go back on both sides."""
import itertools
from dataclasses import replace
from functools import lru_cache

import pytest

from minengine.request import OutputKind, RequestError, Resume, SamplingParams, StructuredOutputsParams
from test_engine import assert_same, alone, engine, prompt
from tiny_text import text_engine

PROMPT = "name: aa age: 12 city: no yes"


@lru_cache
def shared_engine():
    return text_engine()


def deltas(e, name, params, **options):
    """Serve one request; its deltas as (tokens, text, logprobs, finish_reason, stop_reason), joined up to each."""
    e.add_request(name, PROMPT, params, output_kind=OutputKind.DELTA, seed=5, **options)
    found = []
    while name in e.requests:
        for out in e.step():
            c = out.outputs[0]
            found.append((tuple(c.token_ids), c.text, c.logprobs, c.finish_reason, c.stop_reason))
        e.scheduler.check()
    return found


def joined(parts):
    """(tokens, text, how it ended) of deltas."""
    return tuple(itertools.chain.from_iterable(p[0] for p in parts)), "".join(p[1] for p in parts), parts[-1][3:]


def chosen(parts):
    """The log-probability and rank of each token."""
    pairs = [(entry[t].logprob, entry[t].rank) for p in parts for entry, t in zip(p[2], p[0])]
    return pytest.approx([logprob for logprob, _ in pairs], abs=1e-3), [rank for _, rank in pairs]


NUMBER_LIST = StructuredOutputsParams(regex=r'\{"name": "(aa|bb)+", "age": 1200[0-9]{1,3}\}')
FREE = StructuredOutputsParams(grammar='root ::= "<call" [a-z ]{3,20} "</call>" root | "yes"')
CASES = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0),
    "drawn": SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9),
    "own seed": SamplingParams(max_tokens=20, temperature=0.8, seed=11),
    "logprobs": SamplingParams(max_tokens=12, temperature=0.7, logprobs=3),
    "stop strings": SamplingParams(max_tokens=40, temperature=1.5, stop=["ab", "}x", "q", "\u00e9", "  "]),
    "stop tokens": SamplingParams(max_tokens=40, temperature=1.5, stop_token_ids=list(range(30, 50))),
    "grammar, forced": SamplingParams(max_tokens=60, temperature=1.0, structured_outputs=NUMBER_LIST),
    "grammar, drawn": SamplingParams(max_tokens=40, temperature=2.0, structured_outputs=FREE),
    "grammar, sampled throughout": SamplingParams(max_tokens=60, temperature=1.0, structured_outputs=NUMBER_LIST, logprobs=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_cut_at_every_token_nothing_shows(case, seed):
    """Another engine goes on after each delta of the first with the deltas that the first would have given: the same tokens, the same text
    held back where a stop string may begin, the same run of forced tokens at once."""
    params = CASES[case]
    if params.seed is None:
        params = replace(params, seed=seed)
    e = shared_engine()
    whole = deltas(e, "whole", params)
    assert whole[-1][3] is not None
    for cut in range(1, len(whole)):
        tokens, text, _ = joined(whole[:cut])
        after = deltas(e, f"after {cut}", params, resume=Resume(output_token_ids=tokens, sent_chars=len(text)))
        assert [d[:2] + d[3:] for d in after] == [d[:2] + d[3:] for d in whole[cut:]], f"cut after {len(tokens)} tokens"
        if params.logprobs is not None:
            assert chosen(after)[1] == chosen(whole[cut:])[1] and [len(d[2]) for d in after] == [1] * len(after)
            assert [entry[t].logprob for d in after for entry, t in zip(d[2], d[0])] == chosen(whole[cut:])[0]
    assert e.num_free_blocks == e.pool.num_blocks


@pytest.mark.parametrize("case", ["grammar, forced", "drawn", "stop strings"])
def test_cut_inside_a_delta(case):
    """A reader that got only part of a delta: a run of forced tokens is found again, and nothing of it comes twice."""
    e, params = shared_engine(), CASES[case]
    tokens, text, reason = joined(deltas(e, "whole", params))
    for n in range(1, len(tokens)):
        after = deltas(e, f"after {n}", params, resume=Resume(output_token_ids=tokens[:n], sent_chars=0))
        again, all_text, ended = joined(after)
        assert (tokens[:n] + again, all_text, ended) == (tokens, text, reason), f"cut after {n} tokens"


def test_stamps_of_both_engines_are_one_timeline():
    e = shared_engine()
    e.add_request("first", PROMPT, CASES["greedy"], output_kind=OutputKind.DELTA)
    first = [e.step()[0] for _ in range(3)]
    e.abort_request("first")
    tokens = tuple(t for out in first for t in out.outputs[0].token_ids)
    timeline = first[-1].metrics
    request = e.add_request("second", PROMPT, CASES["greedy"], output_kind=OutputKind.DELTA,
                            resume=Resume(output_token_ids=tokens, timeline=timeline, num_cached_tokens=16, sent_chars=3))
    out = e.step()[0]
    t = out.metrics
    assert t.token_s[:3] == timeline.token_s[:3] and len(t.token_s) == 4 and t.token_s == sorted(t.token_s)
    assert (t.arrival_s, t.admitted_s) == (timeline.arrival_s, timeline.admitted_s) and t.decode_admitted_s > t.token_s[2]
    assert out.num_cached_tokens == 16 and request.num_computed_tokens == request.num_tokens - 1
    e.abort_request("second")


def test_what_cannot_be_resumed_is_refused():
    e = shared_engine()
    with pytest.raises(RequestError, match="leave no token to generate"):
        e.add_request("r", PROMPT, SamplingParams(max_tokens=3), output_kind=OutputKind.DELTA, resume=Resume(output_token_ids=(5, 6, 7)))
    with pytest.raises(RequestError, match="does not allow token 40"):
        e.add_request("r", PROMPT, CASES["grammar, forced"], output_kind=OutputKind.DELTA, resume=Resume(output_token_ids=(40,)))
    with pytest.raises(ValueError, match="only be deltas"):
        e.add_request("r", PROMPT, SamplingParams(max_tokens=9), resume=Resume(output_token_ids=(5, 6, 7)))
    assert not e.requests and not e.has_unfinished_requests()


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_an_engine_without_the_rows_computes_them(kind):
    """What a worker lost, another goes on with; also with a prompt and output so long that they take several steps."""
    tokens, margins = alone(kind, "float32", 95, 2, 20)
    for n in (1, 7, 19):
        e = engine(kind, max_num_batched_tokens=24)
        e.add_request("r", prompt(e.config.vocab_size, 95, 2), SamplingParams(max_tokens=20, temperature=0.0), output_kind=OutputKind.DELTA,
                      resume=Resume(output_token_ids=tuple(tokens[:n])))
        got = []
        while e.has_unfinished_requests():
            got += [t for out in e.step() for t in out.outputs[0].token_ids]
            e.scheduler.check()
        assert_same(tokens[:n] + got, tokens, margins)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_a_held_request_keeps_its_blocks_until_it_is_released(kind):
    e = engine(kind, num_gpu_blocks_override=9)
    r = e.add_request("r", prompt(e.config.vocab_size, 50, 1), SamplingParams(max_tokens=9, temperature=0.0), output_kind=OutputKind.DELTA, hold=True)
    out, = e.step()
    assert out.outputs[0].token_ids == r.output_token_ids and not out.finished
    assert e.held("r") is r and not e.has_unfinished_requests() and e.num_free_blocks == 5
    assert e.step() == [] and e.idle and "r" in e.requests
    e.scheduler.check()
    for _ in range(2):
        e.release_request("r")
        assert e.held("r") is None and e.num_free_blocks == 9 and "r" not in e.requests
    assert r.finish_reason == "handed_over"
    e.add_request("again", r.token_ids[:50] + [1], SamplingParams(max_tokens=1))
    assert run_one(e).num_cached_tokens == 48  # what was handed over stays cached
    e.add_request("one", prompt(e.config.vocab_size, 20, 2), SamplingParams(max_tokens=1), hold=True)
    assert run_one(e).finished and e.held("one") is None, "what its first token ends is not held"
    e.add_request("gone", prompt(e.config.vocab_size, 20, 2), SamplingParams(max_tokens=5), hold=True)
    e.step()
    assert e.abort_request("gone").outputs[0].finish_reason == "abort" and e.num_free_blocks == 9


def run_one(e):
    out, = [out for out in e.step() if out.finished]
    return out
