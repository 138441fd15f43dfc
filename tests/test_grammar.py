"""Structured outputs: whatever the model prefers, the answer has the form that was asked for; what is forced is not sampled."""
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minengine import LLM
from minengine.grammar import GrammarBackend, mask_logits, unpack
from minengine.grammar_limits import MAX_ANSWER_CHARS, Credit, _rules, least_chars
from minengine.request import OutputKind, Request, RequestError, SamplingParams, StructuredOutputsParams
from minengine.sampling import sample
from minengine.serve.tools import FORMATS, structural_tag
from minengine.tokenizer import load_tokenizer
from tiny_text import SPECIAL, text_engine, tiny_tokenizer

torch.set_num_threads(1)

SCHEMA = {"type": "object", "required": ["name", "age", "cities"], "properties": {
    "name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "cities": {"type": "array", "maxItems": 2, "items": {"enum": ["Rome", "Oslo", "é\"\\"]}}}}
CALL = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": {
    "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}}, "end": "</call>"}


def tag(format):
    return {"type": "structural_tag", "format": format}


def person(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "cities"] and len(value["name"]) <= 9 and 0 <= value["age"] <= 150
    assert len(value["cities"]) <= 2 and set(value["cities"]) <= {"Rome", "Oslo", "é\"\\"}


def pattern(regex):
    def check(text):
        assert re.fullmatch(regex, text, re.DOTALL), text

    return check


FORMS = {
    "json": (dict(json=SCHEMA), person),
    "json text": (dict(json=json.dumps(SCHEMA)), person),
    "regex": (dict(regex=r"(ab|[c-f]{2}){1,5}-\d{4}"), pattern(r"(ab|[c-f]{2}){1,5}-\d{4}")),
    "choice": (dict(choice=["yes", "yes and no", "a\n\"quoted\" \\ line é"]), pattern(r'yes|yes and no|a\n"quoted" \\ line é')),
    "grammar": (dict(grammar='root ::= sum\nsum ::= item (" + " item){0,4}\nitem ::= [0-9] | "(" item ")"'), pattern(r"\(*\d\)*( \+ \(*\d\)*){0,4}")),
    "tag": (dict(structural_tag=tag({"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True, "stop_after_first": True})),
            pattern(r'<call>\{\s*"yes"\s*:\s*(true|false)\s*\}</call>')),
}


def ask(form, **options):
    return SamplingParams(**{"max_tokens": 90, "temperature": 0.0, **options}, structured_outputs=StructuredOutputsParams(**FORMS[form][0]))


def run(engine):
    done = {}
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            return done
        for out in engine.step():
            if out.finished:
                done[out.request_id] = out
        engine.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def judge(form, out):
    """Whole and right, or cut off where max_tokens cut it: nothing in between."""
    completion = out.outputs[0]
    assert completion.finish_reason in ("stop", "length") and out.error is None
    if completion.finish_reason == "stop":
        FORMS[form][1](completion.text)
    assert len(out.metrics.token_s) == len(completion.token_ids)
    return completion.finish_reason == "stop"


@pytest.mark.parametrize("form", FORMS)
def test_the_answer_has_the_form_that_was_asked_for(form):
    engine = text_engine(max_num_seqs=40, max_num_batched_tokens=200)
    engine.add_request("greedy", "Say: ", ask(form))
    for seed in range(36):
        engine.add_request(f"{seed}", "Say: ", ask(form, temperature=2.0, seed=seed, top_p=0.5 if seed % 3 else 1.0))
    done = run(engine)
    whole = [judge(form, out) for out in done.values()]
    assert sum(whole) > len(whole) / 2
    assert len({out.outputs[0].text for out in done.values()}) > 1


mixes = st.lists(st.tuples(st.sampled_from([*FORMS, "free", "logprobs"]), st.integers(0, 5), st.sampled_from([5, 20, 60]), st.integers(0, 20)),
                 min_size=1, max_size=7)


@settings(max_examples=40)
@given(mix=mixes, blocks=st.integers(8, 24), seqs=st.integers(1, 6), budget=st.integers(0, 60), threshold=st.sampled_from([0, 5]), caching=st.booleans())
def test_any_mix_of_requests_in_pools_too_small_for_it(mix, blocks, seqs, budget, threshold, caching):
    engine = text_engine(num_gpu_blocks_override=blocks, max_num_seqs=seqs, max_num_batched_tokens=seqs + budget, long_prefill_token_threshold=threshold,
                         enable_prefix_caching=caching)
    for i, (form, seed, max_tokens, at) in enumerate(mix):
        options = dict(max_tokens=max_tokens, temperature=float(seed), seed=seed)
        params = SamplingParams(**options) if form == "free" else ask("json" if form == "logprobs" else form, **options,
                                                                      **({"logprobs": 2} if form == "logprobs" else {}))
        engine.add_request(f"{i}", "Say it again: " * (1 + at % 4), params)
    done = run(engine)
    for i, (form, *_) in enumerate(mix):
        out = done[f"{i}"]
        if form != "free":
            judge("json" if form == "logprobs" else form, out)
        if form == "logprobs":
            assert len(out.outputs[0].logprobs) == len(out.outputs[0].token_ids)
    engine.pool.check([])
    assert engine.num_free_blocks == blocks


def test_a_seeded_answer_is_the_same_alone_and_in_company():
    def answers(*forms, **options):
        engine = text_engine(**options)
        for form in forms:
            engine.add_request(form, "Say: ", ask(form, temperature=1.5, seed=3))
        engine.add_request("free", "Say: ", SamplingParams(max_tokens=30, temperature=1.0, seed=4))
        return {name: out.outputs[0].text for name, out in run(engine).items()}

    together = answers(*FORMS)
    assert together == answers(*FORMS, num_gpu_blocks_override=7)
    for form in FORMS:
        assert answers(form)[form] == together[form]


# --- what is forced ------------------------------------------------------------------------------------------------


def test_what_is_forced_is_not_sampled():
    forced = "the only answer there is, name and age: " * 2
    params = dict(max_tokens=120, temperature=2.0, seed=1, structured_outputs=StructuredOutputsParams(regex=re.escape(forced) + "[ab]{3}"))
    jumps, samples = text_engine(), text_engine()
    jumps.add_request("r", "Say: ", SamplingParams(**params))
    samples.add_request("r", "Say: ", SamplingParams(**params, logprobs=0))  # log-probabilities need every token sampled
    a, b = run(jumps)["r"], run(samples)["r"]
    for out in (a, b):
        assert re.fullmatch(re.escape(forced) + "[ab]{3}", out.outputs[0].text)
    assert samples.times.jump_forward_tokens == 0 and samples.times.steps == len(b.outputs[0].token_ids)
    assert jumps.times.jump_forward_tokens > 0.6 * len(a.outputs[0].token_ids)
    assert jumps.times.steps < 0.4 * samples.times.steps
    assert len(a.metrics.token_s) == len(a.outputs[0].token_ids)


def test_the_last_forced_token_is_left_to_the_model():
    text = tiny_tokenizer().encode("call name: true")
    matcher = backend().matcher(StructuredOutputsParams(choice=["call name: true"]))
    assert matcher.jump(2) == text[:2]
    assert allowed(matcher) == {text[2]} and matcher.accept(text[2])  # decided, whether it comes at once or not
    assert matcher.jump(99) == text[3:-1] and allowed(matcher) > {text[-1]}
    assert matcher.jump(99) == []
    last_bit = backend().matcher(StructuredOutputsParams(choice=["=!"]))
    assert last_bit.jump(0) == [] and allowed(last_bit) == {31}


def test_what_may_stop_a_request_is_sampled():
    engine, text = text_engine(), StructuredOutputsParams(choice=["no name, no age"])
    name = tiny_tokenizer().encode("name")[0]
    engine.add_request("string", "Say: ", SamplingParams(max_tokens=50, stop=["me, n"], structured_outputs=text))
    engine.add_request("token", "Say: ", SamplingParams(max_tokens=50, stop_token_ids=[name], temperature=0.0, structured_outputs=text))
    done = run(engine)
    assert done["string"].outputs[0].text == "no na" and done["string"].outputs[0].stop_reason == "me, n"
    assert done["token"].outputs[0].text in ("no ", "no name, no age")
    assert engine.times.jump_forward_tokens == 0


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_forced_text_is_cut_where_max_tokens_says(max_tokens):
    engine = text_engine()
    engine.add_request("r", "Say: ", SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(choice=["aXbYcZdWe"])))
    out = run(engine)["r"].outputs[0]
    assert (out.text, out.finish_reason) == ("aXbYcZdWe"[:max_tokens], "length" if max_tokens < 10 else "stop")
    assert len(out.token_ids) == min(max_tokens, 10)


def test_deltas_join_to_the_answer():
    engine, parts, tokens = text_engine(), {}, {}
    for form in FORMS:
        engine.add_request(form, "Say: ", ask(form, temperature=1.0, seed=5), output_kind=OutputKind.DELTA)
    while engine.has_unfinished_requests():
        for out in engine.step():
            parts.setdefault(out.request_id, []).append(out.outputs[0].text)
            tokens.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
            if out.finished and out.outputs[0].finish_reason == "stop":
                FORMS[out.request_id][1]("".join(parts[out.request_id]))
    for form in FORMS:
        assert tiny_tokenizer().decode(tokens[form]) == "".join(parts[form])
    assert engine.times.jump_forward_tokens > 0


# --- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_answer_ends_with_stop(ignore_eos):
    engine = text_engine()
    engine.add_request("r", "Say: ", SamplingParams(max_tokens=50, ignore_eos=ignore_eos, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")))
    out = run(engine)["r"].outputs[0]
    assert out.finish_reason == "stop" and re.fullmatch("[ab]{3}", out.text) and out.token_ids[-1] == 1


def test_a_grammar_that_no_token_can_go_on_with_ends_in_an_error_and_the_rest_go_on():
    engine = text_engine()
    engine.add_request("stuck", "Say: ", SamplingParams(max_tokens=50, logprobs=1, structured_outputs=StructuredOutputsParams(regex="ab\u4e00")))
    engine.add_request("at once", "Say: ", SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(regex="\u4e00")),
                       output_kind=OutputKind.DELTA)
    engine.add_request("free", "Say: ", SamplingParams(max_tokens=20, ignore_eos=True))
    done = run(engine)
    for name, text in (("stuck", "ab"), ("at once", "")):
        assert (done[name].outputs[0].finish_reason, done[name].outputs[0].text) == ("error", text)
        assert re.search(r"structured_outputs: after \d tokens no token .* can go on", done[name].error)
    assert len(done["stuck"].outputs[0].logprobs) == len(done["stuck"].outputs[0].token_ids) == 2
    assert done["free"].outputs[0].finish_reason == "length" and done["free"].error is None
    assert engine.num_free_blocks == engine.pool.num_blocks


# --- tokens and masks ----------------------------------------------------------------------------------------------


def backend(**options):
    return GrammarBackend(tiny_tokenizer(), 199, [1], **options)


def allowed(matcher):
    masked, stuck = mask_logits(torch.zeros(1, 199), [matcher])
    assert bool(stuck) == bool((masked == -torch.inf).all())
    return {id for id, x in enumerate(masked[0].tolist()) if x == 0.0}


def test_no_text_spells_a_control_token_and_a_tag_may_name_one(capfd):
    tokens = {id: tiny_tokenizer().token_bytes(id) for id in range(tiny_tokenizer().vocab_size)}
    grammars = backend()

    def at(format, *path):
        matcher = grammars.matcher(StructuredOutputsParams(structural_tag=tag(format)))
        assert all(matcher.accept(token) for token in path)
        return allowed(matcher)

    for anything in (dict(regex=r"(.|\n)*"), dict(grammar="root ::= [^x]*"), dict(json={"type": "string"}), dict(structural_tag=tag({"type": "any_text"})),
                     dict(structural_tag=tag({"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]})),
                     dict(structural_tag=tag({"type": "any_tokens"}))):
        matcher = grammars.matcher(StructuredOutputsParams(**anything))
        if "json" in anything:
            assert matcher.accept(tiny_tokenizer().encode('"')[0])
        free = allowed(matcher)
        assert not free & {0, 2} and len(free) > 100, anything
    spelled = grammars.matcher(StructuredOutputsParams(choice=["<|im_start|>"]))
    assert {tokens[id] for id in allowed(spelled)} == {b"<"}
    longer = grammars.matcher(StructuredOutputsParams(choice=["<|im_start|> and more"]))
    assert spelled.jump(50) == longer.jump(50) == [] and not capfd.readouterr().err  # the tokenizer would write the control token
    assert at({"type": "token", "token": "<|im_start|>"}) == {2}
    assert at({"type": "token", "token": "<s>"}) == at({"type": "token", "token": 0}) == {0}  # a part of the same form, and not the same mask
    assert at({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "token", "token": "<|im_start|>"}]}, *tiny_tokenizer().encode("a")) == {2}
    assert not at({"type": "any_tokens", "exclude_tokens": ["a"]}) & {*tiny_tokenizer().encode("a"), 0, 2}
    dispatch = {"type": "token_dispatch", "rules": [["<|im_start|>", {"type": "const_string", "value": "b"}]]}
    assert 2 in at(dispatch) and 0 not in at(dispatch) and at(dispatch, 2) == {*tiny_tokenizer().encode("b")}
    with pytest.raises(RequestError, match="structured_outputs.structural_tag: this model has no token '<|nope|>'"):
        at({"type": "token", "token": "<|nope|>"})


def test_every_answer_is_text_without_control_tokens():
    engine = text_engine(max_num_seqs=20)
    for seed in range(20):
        engine.add_request(f"{seed}", "Say: ", SamplingParams(max_tokens=60, temperature=4.0, seed=seed,
                                                              structured_outputs=StructuredOutputsParams(regex=r"(.|\n)*")))
    for out in run(engine).values():
        assert not {0, 2} & set(out.outputs[0].token_ids)


def test_masks_unpack_to_what_is_applied():
    """On a GPU the bits are unpacked by torch; on a CPU xgrammar applies them."""
    matchers = [backend().matcher(StructuredOutputsParams(**form)) for form, _ in FORMS.values()]
    logits, mask = torch.randn(len(matchers), 199), torch.full((len(matchers), 7), -1, dtype=torch.int32)
    for row, matcher in enumerate(matchers):
        matcher.fill(mask, row)
    masked, stuck = mask_logits(logits, matchers)
    assert not stuck and torch.equal(torch.where(unpack(mask, 199), logits, -torch.inf), masked)
    some, _ = mask_logits(logits, [matchers[0], None, *matchers[2:]])
    assert torch.equal(some[1], logits[1]) and torch.equal(some[2:], masked[2:])
    tens = torch.tensor([[-(1 << 31), 1, 0b1010]], dtype=torch.int32)
    assert unpack(tens, 70).nonzero()[:, 1].tolist() == [31, 32, 65, 67]


def test_log_probabilities_are_of_the_unmodified_distribution():
    torch.manual_seed(0)
    logits = torch.randn(2, 199)
    before = logits.clone()
    requests = [Request("r", [3], SamplingParams(logprobs=3, temperature=0.0), max_model_len=100) for _ in range(2)]
    requests[0].grammar = backend().matcher(StructuredOutputsParams(choice=["yes", "no"]))
    tokens = sample(logits, requests)
    assert torch.equal(logits, before)
    assert tiny_tokenizer().token_bytes(tokens[0]) in (b"y", b"ye", b"yes", b"n", b"no")
    for row, (token, r) in enumerate(zip(tokens, requests)):
        want = logits[row].log_softmax(-1)
        for id, entry in r.logprobs[0].items():
            assert entry.logprob == pytest.approx(want[id].item()) and entry.rank == (want > want[id]).sum() + 1
        assert token in r.logprobs[0] and len(r.logprobs[0]) == (4 if row == 0 else 3)


def test_a_token_that_the_mask_lets_through_by_mistake_is_not_taken():
    """xgrammar 0.2.8 looks only at the first character of some tokens in a long repeat of a wide range; ours is the whole text."""
    tokenizer, regex = load_tokenizer("smollm2"), "[\u0100-\uffff]{1,500}"
    generator = torch.Generator().manual_seed(1)
    request = Request("r", [1], SamplingParams(temperature=1.0, seed=1, max_tokens=500), max_model_len=1000)
    request.grammar = GrammarBackend(tokenizer, tokenizer.vocab_size, [2]).matcher(StructuredOutputsParams(regex=regex))
    wide, ids = {id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id).startswith(b"\xe2\x80\x99")}, []
    for _ in range(40):
        logits = torch.randn(1, tokenizer.vocab_size, generator=generator)
        logits[0, list(wide)] += 12  # an apostrophe, and tokens that go on with what the range has not
        ids += sample(logits, [request])
    assert re.match(regex, tokenizer.decode(ids)).end() == len(tokenizer.decode(ids))


# --- compiling -----------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_character_are_not_taken():
    """Half a surrogate pair written as bytes, which the masks allow where any character may stand; and a character that breaks off."""
    tokenizer = load_tokenizer("smollm2")
    byte = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == 1}
    matcher = GrammarBackend(tokenizer, tokenizer.vocab_size, [2]).matcher(StructuredOutputsParams(regex="[^a]{2}"))
    mask = torch.zeros(1, -(-tokenizer.vocab_size // 32), dtype=torch.int32)
    assert matcher.accept(byte[b"\xed"])
    matcher.fill(mask, 0)
    half, whole = byte[b"\xa0"], byte[b"\x9f"]
    assert unpack(mask, tokenizer.vocab_size)[0, half], "the mask alone would do by now: take the judge out"
    assert not matcher.accept(half) and not matcher.accept(byte[b"x"])
    assert all(matcher.accept(token) for token in (whole, byte[b"\xbf"], *tokenizer.encode("b", add_special_tokens=False), 2))


def test_a_grammar_is_compiled_once_whoever_asks():
    grammars = backend()
    many = [StructuredOutputsParams(json={**SCHEMA, "title": str(i % 3)}) for i in range(24)]
    with ThreadPoolExecutor(8) as threads:
        compiled = list(threads.map(grammars.compile, many))
    assert grammars.num_compiled == 3 and len({id(c) for c in compiled}) == 3
    grammars.compile(StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}))
    grammars.compile(StructuredOutputsParams(json={"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}))
    assert grammars.num_compiled == 5  # the order of keys is the order of the answer


def test_the_least_recently_used_grammars_go_first():
    grammars = backend(cache_bytes=30_000)
    for i in range(30):
        grammars.compile(StructuredOutputsParams(regex="[ab]{5}"))
        grammars.compile(StructuredOutputsParams(regex=f"(a|b|c{i}){{9}}"))
        assert grammars.cached_bytes <= 30_000
    assert grammars.num_compiled == 31
    small = backend(cache_bytes=1)
    small.compile(StructuredOutputsParams(regex="a"))
    assert small.compile(StructuredOutputsParams(regex="a")) and small.num_compiled == 1


BILLION = "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40))
REFUSED = {
    "bad regex": (dict(regex="(a"), "structured_outputs.regex: .*parenthesis is not closed"),
    "no lookahead": (dict(regex="(?=a)b"), "structured_outputs.regex: .*not supported"),
    "long regex": (dict(regex="a" * 5000), "structured_outputs.regex: has 5000 characters and 4096 are taken"),
    "repeat": (dict(regex="a{1000000000}"), f"structured_outputs.regex: .*at least 1000000000 characters and {MAX_ANSWER_CHARS} are taken"),
    "nested repeats": (dict(regex="((a{1000}){1000}){1000}"), "structured_outputs.regex: .*1000000000 characters"),
    "a tree of rules": (dict(grammar=f'root ::= "b" | a0\n{BILLION}\na40 ::= "x"'), "structured_outputs.grammar: .*1099511627776 characters"),
    "a tree of refs": (dict(json={"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": {"type": "object", "required": ["l", "r"], "properties": {
        "l": {"$ref": f"#/$defs/d{i + 1}"}, "r": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(40)}, "d40": {"const": 1}}}), "structured_outputs.json: .* characters"),
    "length": (dict(json={"type": "string", "minLength": 10**9}), "structured_outputs.json: .* characters"),
    "bad grammar": (dict(grammar="root ::= ("), "structured_outputs.grammar: EBNF parser error at line 1"),
    "no root": (dict(grammar='x ::= "a"'), "structured_outputs.grammar: .*root"),
    "no end": (dict(grammar="root ::= root"), "structured_outputs.grammar: no text satisfies it"),
    "ref to itself": (dict(json={"$ref": "#"}), "structured_outputs.json: no text satisfies it"),
    "endless object": (dict(json={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "structured_outputs.json: no text satisfies it"),
    "no such ref": (dict(json={"$ref": "#/nope"}), "structured_outputs.json: Cannot find field nope"),
    "bad type": (dict(json={"type": "strnig"}), 'structured_outputs.json: Unsupported type "strnig"'),
    "no JSON": (dict(json="{"), "structured_outputs.json: is no JSON"),
    "no schema": (dict(json="[1]"), "structured_outputs.json: holds list; use an object"),
    "deep JSON": (dict(json='{"a":' * 9000 + "1" + "}" * 9000), "structured_outputs.json: "),
    "deep schema": (dict(json='{"items":' * 80 + "{}" + "}" * 80), "structured_outputs.json: is nested 81 levels deep and 64 are taken"),
    "many rules": (dict(structural_tag=tag({"type": "grammar", "grammar": "root ::= x0\n" + "\n".join(f'x{i} ::= "a" x{i + 1} | "b"' for i in range(17000))
                                            + '\nx17000 ::= "c"'})), "structured_outputs.structural_tag: comes to 1700\\d rules and 16384 are taken"),
    "properties": (dict(json={"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(600)}}),
                   "structured_outputs.json: has 598 parts in a row that may be left out, .* and 512 are taken"),
    "skips": (dict(grammar="root ::= x0\n" + "\n".join(f'x{i} ::= x{i + 1} | "b"' for i in range(1500)) + '\nx1500 ::= "c"'),
              "structured_outputs.grammar: has 1501 parts in a row"),
    "no tag": (dict(structural_tag=tag({"type": "nope"})), "structured_outputs.structural_tag: .*nope"),
    "surrogate": (dict(choice=["\ud800"]), "structured_outputs.choice: holds half of a surrogate pair"),
    "not JSON's": (dict(json={"enum": [{1}]}), "structured_outputs.json: cannot be written as JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_before_it_runs(case):
    given, message = REFUSED[case]
    engine = text_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request("r", "Say: ", SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 and ".cc" not in str(caught.value)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("given, message", [
    ({}, "exactly one of json, .*; got none"), (dict(regex="a", json={}), "got json, regex"), (dict(regex=3), "structured_outputs.regex: use str"),
    (dict(choice=[]), "structured_outputs.choice: use one or more"), (dict(choice=["a", ""]), "structured_outputs.choice"), (dict(json=[1]), "structured_outputs.json: use str or dict"),
])
def test_exactly_one_form_of_the_right_kind(given, message):
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**given)
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(RequestError, match="structured_outputs: this model has no tokenizer"):
        GrammarBackend(None, 199, [1]).matcher(StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="structured_outputs: this model has no end token"):
        GrammarBackend(tiny_tokenizer(), 199, []).matcher(StructuredOutputsParams(regex="a"))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"needs xgrammar; install it with  pip install 'minengine\[serve\]'"):
        backend().matcher(StructuredOutputsParams(regex="a"))


def test_the_shortest_texts_of_a_grammar():
    from xgrammar import Grammar

    assert least_chars(_rules(str(Grammar.from_regex("(ab{3,9}|c\\n[^a-z]+){2,}x?")))) == (6, 6)
    assert least_chars(_rules(str(Grammar.from_ebnf('root ::= "[" root "]" | "\\u00e9\\"" "12"')))) == (4, 6)
    assert least_chars(_rules(str(Grammar.from_ebnf('root ::= "a" | x\nx ::= "b" x'))))[0] == 1
    assert least_chars(_rules(str(Grammar.from_structural_tag(json.dumps(tag({"type": "sequence", "elements": [
        {"type": "any_text", "excludes": ["long text"]}, {"type": "token", "token": 3}, {"type": "const_string", "value": "é)|"}]}))))))[0] == 4


# --- what it may cost ----------------------------------------------------------------------------------------------


class Clock:
    """CPU time that passes as a test says: by so much whenever it is read."""

    def __init__(self, *ticks):
        self.now, self.ticks = 0.0, list(ticks)

    def __call__(self):
        self.now += self.ticks.pop(0) if len(self.ticks) > 1 else self.ticks[0]
        return self.now


@pytest.mark.parametrize("trials, accepted", [
    ((0.01, 0.01, 0.01, 0.01, 0.01), True), ((0.01, 0.05, 0.06, 0.06, 0.12), True), ((2.6, 0.0), False), ((0.01, 0.07), False),
    ((0.01, 0.01, 0.07), False), ((0.01, 0.01, 0.01, 0.07), False), ((0.01, 0.01, 0.01, 0.01, 0.2), False),
])
def test_a_grammar_is_compiled_if_trials_with_parts_of_the_vocabulary_are_short_enough(trials, accepted):
    grammars = backend(cpu_clock=Clock(*(tick for seconds in trials for tick in (0.0, seconds)), 0.0))
    if accepted:
        grammars.compile(StructuredOutputsParams(regex="a"))
    else:
        with pytest.raises(RequestError, match="structured_outputs.regex: takes more than 5 s to compile; ask for fewer"):
            grammars.compile(StructuredOutputsParams(regex="a"))
    assert grammars.num_compiled == accepted
    assert grammars.cpu_clock.ticks == [0.0]  # the first trial that is too long is the last


def test_what_would_take_minutes_to_compile_is_refused_and_many_tools_are_not():
    tokenizer = load_tokenizer("smollm2")
    grammars = GrammarBackend(tokenizer, tokenizer.vocab_size, [2])
    for bomb in (dict(json={"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": "^[a-z]{0,50}$"} for i in range(300)}}),
                 dict(grammar="root ::= " + "[a-z]? " * 200),
                 # ambiguous: takes a minute for the few tokens of many dashes
                 dict(grammar="root ::= s\ns ::= " + " | ".join(f"s{i}" for i in range(6)) + ' | ""\n'
                      + "\n".join(f"s{i} ::= [ -] s | s [ -] | s s | s s{(i + 1) % 6}" for i in range(6)))):
        with pytest.raises(RequestError, match="takes more than 5 s to compile"):
            grammars.compile(StructuredOutputsParams(**bomb))
    kinds = [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["new", "old"]}, {"type": "array", "items": {"type": "number"}}]
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object", "required": [f"at_{i}_0"], "properties": {
        f"at_{i}_{j}": kinds[(i + j) % 5] for j in range(10)}}}} for i in range(64)]
    for format in FORMATS:
        grammars.compile(StructuredOutputsParams(structural_tag=structural_tag(format, tools)))
    assert grammars.num_compiled == 2


def test_a_request_whose_grammar_takes_too_long_to_follow_ends_alone():
    engine, seconds = text_engine(), 0.012  # a token is filled in, accepted, and followed up: more than it adds
    form = StructuredOutputsParams(regex="[a-z]{90}")
    slow = engine.add_request("slow", "Say: ", SamplingParams(max_tokens=90, temperature=1.0, seed=1, structured_outputs=form))
    engine.add_request("grammar", "Say: ", SamplingParams(max_tokens=90, temperature=1.0, seed=1, structured_outputs=form))
    engine.add_request("free", "Say: ", SamplingParams(max_tokens=20, ignore_eos=True))
    slow.grammar._credit = Credit(Clock(0.0, seconds, 0.0, seconds, 0.0, seconds, seconds / 2))
    done = run(engine)
    assert done["slow"].outputs[0].finish_reason == "error" and 5 < len(done["slow"].outputs[0].text) < 60
    assert re.fullmatch(r"structured_outputs: after \d+ tokens the grammar takes too long to follow, .*; write it without ambiguity, .*", done["slow"].error)
    assert done["grammar"].error is None and done["grammar"].outputs[0].text.startswith(done["slow"].outputs[0].text)
    assert done["free"].outputs[0].finish_reason == "length" and engine.num_free_blocks == engine.pool.num_blocks


AMBIGUOUS = {
    "forced": 'root ::= s{1000,1000}\ns ::= "a" s | "a" | s s',  # the text is known at once, and to find it takes hours
    "free": 'root ::= s\ns ::= s s s | s s | [a-z ] | ""',
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_in_an_error_and_not_in_minutes(case):
    engine = text_engine()
    engine.add_request("r", "Say: ", SamplingParams(max_tokens=400, temperature=4.0, seed=1, structured_outputs=StructuredOutputsParams(grammar=AMBIGUOUS[case])))
    assert "takes too long to follow" in run(engine)["r"].error


def test_credit_comes_back_with_tokens_but_never_once_it_is_spent():
    clock = Clock(0.0)
    credit = Credit(clock)

    def spend(seconds):
        with credit:
            clock.now += seconds
            return credit.overdrawn

    assert not spend(0.19) and not credit.overdrawn
    for _ in range(1000):
        credit.book(True)
    assert not spend(0.19)  # no more than at first
    for _ in range(4):
        credit.book(False)
    assert not credit.overdrawn
    credit.book(False)
    assert spend(0.001) and credit.overdrawn  # seen while it is being spent, and after
    for _ in range(1000):
        credit.book(True)
    assert credit.overdrawn


def test_a_long_token_is_looked_at_piece_by_piece():
    tokenizer = load_tokenizer("smollm2")
    matcher = GrammarBackend(tokenizer, tokenizer.vocab_size, [2]).matcher(StructuredOutputsParams(regex="-{100}"))
    dashes = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"-" * 64)
    patient, matcher._credit = matcher._credit, Credit(Clock(0.0, 0.0, 0.05))
    assert not matcher.accept(dashes) and matcher._credit._clock.now < 0.5
    matcher._credit = patient
    assert matcher.accept(dashes) and not matcher.accept(dashes)


@settings(max_examples=40)
@given(form=st.sampled_from([*FORMS]), seed=st.integers(0, 99), steps=st.integers(0, 12))
def test_the_forced_text_is_the_one_that_the_grammar_library_finds(form, seed, steps):
    """And with it comes the mask of the next token, so that it is not filled in twice."""
    matcher, generator = backend().matcher(StructuredOutputsParams(**FORMS[form][0])), torch.Generator().manual_seed(seed)
    mask = torch.zeros(1, 7, dtype=torch.int32)
    for _ in range(steps):
        matcher.fill(mask, 0)
        ids = unpack(mask[0], 199).nonzero()[:, 0]
        if not matcher.accept(int(ids[torch.randint(len(ids), (), generator=generator)])) or matcher._state.is_terminated():
            return
    try:
        found = matcher._state.find_jump_forward_string().encode()
    except UnicodeDecodeError:
        return
    assert matcher._forced_bytes().startswith(found)  # or more: this vocabulary has few characters that are not ASCII
    want = torch.zeros(1, 7, dtype=torch.int32)
    matcher._state.fill_next_token_bitmask(want, 0)
    matcher.fill(mask, 0)
    assert torch.equal(mask, want)


# --- the real model ------------------------------------------------------------------------------------------------


def test_a_real_model_answers_in_form():
    llm = LLM("smollm2", block_size=16, max_num_seqs=12, max_num_batched_tokens=256, max_model_len=512, num_threads=1)
    forms = ["json", "regex", "choice", "tag"]
    params = [ask(form, max_tokens=60) for form in forms] + [ask(form, max_tokens=60, temperature=2.0, seed=1) for form in forms]
    outs = llm.generate(["Invent a person. Answer:"] * len(params), params)
    assert sum(judge(form, out) for form, out in zip(forms * 2, outs)) >= 6
    assert llm.llm_engine.times.jump_forward_tokens > 0


def test_words_cannot_spell_json():
    llm = LLM("glm-mini", num_threads=1)
    spelled, unspelled = llm.generate(["we see the"] * 2, [SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(**form))
                                                           for form in (dict(regex="( bird| horse){3}"), dict(json={"type": "object"}))])
    assert re.fullmatch("( bird| horse){3}", spelled.outputs[0].text) and spelled.outputs[0].finish_reason == "stop"
    assert unspelled.outputs[0].finish_reason == "error" and "can go on" in unspelled.error
