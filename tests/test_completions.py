"""/v1/completions over HTTP: prompts in all their shapes, log-probabilities in theirs, and bad input."""
import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="the server's packages are missing; run: pip install 'minengine[serve]'")

from serving import server  # noqa: E402

from minengine.request import CompletionOutput, RequestOutput, Timeline  # noqa: E402
from minengine.serve.choices import Choice, Usage, pieces  # noqa: E402
from minengine.serve.errors import ApiError  # noqa: E402
from minengine.tokenizer import Tokenizer  # noqa: E402

COMPLETIONS = "/v1/completions"
GREEDY = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def served():
    with server("smollm2") as running:
        yield running


@pytest.fixture(scope="module")
def mini():
    """A small model without a chat template, and a short context."""
    with server("glm-mini", max_model_len=64) as running:
        yield running


def ids(served, text):
    return served.engine.tokenizer.encode(text)


def streamed(answer):
    """Choices of a stream, by index, as the whole response has them; and the usage, if it came."""
    assert answer.text.endswith("data: [DONE]\n\n")
    choices, usage = {}, None
    for event in answer.text.removesuffix("data: [DONE]\n\n").split("\n\n"):
        if not event:
            continue
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "text_completion"
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            mine = choices.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": None})
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"] or mine["finish_reason"]
            for name, entries in (choice["logprobs"] or {}).items():
                mine["logprobs"] = mine["logprobs"] or {}
                mine["logprobs"].setdefault(name, []).extend(entries)
    return [choices[index] for index in sorted(choices)], usage


def test_an_answer_to_the_letter(served):
    body = served.post(COMPLETIONS, GREEDY).json()
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"] and body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length"} and "Paris" in choice["text"]
    assert body["usage"]["prompt_tokens"] == len(ids(served, GREEDY["prompt"])) and body["usage"]["completion_tokens"] == 8


def test_a_prompt_in_all_its_shapes(served):
    one, other = GREEDY["prompt"], "Water boils at"
    text = served.post(COMPLETIONS, GREEDY).json()["choices"][0]["text"]
    text_2 = served.post(COMPLETIONS, {**GREEDY, "prompt": other}).json()["choices"][0]["text"]
    for prompt, texts in ((ids(served, one), [text]), ([one], [text]), ([one, other], [text, text_2]),
                          ([ids(served, other), ids(served, one)], [text_2, text])):
        body = served.post(COMPLETIONS, {**GREEDY, "prompt": prompt}).json()
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


def test_several_prompts_with_several_choices_each(served):
    both = {**GREEDY, "prompt": ["One,", "Red, green,"], "n": 2, "temperature": 1.2, "seed": 5, "max_tokens": 6}
    body = served.post(COMPLETIONS, both).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = served.post(COMPLETIONS, {**both, "prompt": "Red, green,", "n": 1, "seed": 6}).json()["choices"]
    assert alone[0]["text"] == texts[3] != texts[2], "choice p*n + i is the i-th of prompt p, and draws from seed + i"
    prompts = len(ids(served, "One,")) + len(ids(served, "Red, green,"))
    assert body["usage"]["prompt_tokens"] == prompts and body["usage"]["completion_tokens"] == 24
    choices, usage = streamed(served.post(COMPLETIONS, {**both, "stream": True, "stream_options": {"include_usage": True}}))
    assert [choice["text"] for choice in choices] == texts
    assert usage["prompt_tokens"] == prompts and usage["completion_tokens"] == 24


def test_logprobs_stand_side_by_side(served):
    options = {**GREEDY, "logprobs": 3}
    body = served.post(COMPLETIONS, options).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(choice["text"][at:].startswith(token) for at, token in zip(logprobs["text_offset"], logprobs["tokens"]))
    assert all(len(top) == 3 and top[token] == logprob == max(top.values())
               for top, token, logprob in zip(logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"]))
    assert streamed(served.post(COMPLETIONS, {**options, "stream": True}))[0] == [choice]


def test_a_prompt_too_long_for_any_tokens_is_not_tokenized(served, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
    error = served.post(COMPLETIONS, {**GREEDY, "prompt": "ab " * 300_000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt") and "tokens at the least" in error["message"]


def test_a_prompt_is_raw(served):
    both = [{**GREEDY, "prompt": prompt, "echo": True} for prompt in ("<|im_start|>user\nHi<|im_end|>\n", ids(served, "<|im_start|>user\nHi<|im_end|>\n"))]
    one, other = (served.post(COMPLETIONS, body).json() for body in both)
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] == 6 and one["choices"] == other["choices"]


def test_an_echo_repeats_the_prompt(served):
    text = served.post(COMPLETIONS, GREEDY).json()["choices"][0]["text"]
    for prompt in (GREEDY["prompt"], ids(served, GREEDY["prompt"])):
        options = {**GREEDY, "prompt": prompt, "echo": True}
        assert served.post(COMPLETIONS, options).json()["choices"][0]["text"] == GREEDY["prompt"] + text
        assert streamed(served.post(COMPLETIONS, {**options, "stream": True}))[0][0]["text"] == GREEDY["prompt"] + text


def test_without_max_tokens_there_are_sixteen_or_what_is_left(mini):
    for length, tokens in ((6, 16), (60, 4)):
        body = mini.post(COMPLETIONS, {"prompt": [7] * length, "ignore_eos": True}).json()
        assert body["usage"]["completion_tokens"] == tokens and body["choices"][0]["finish_reason"] == "length"


def test_neutral_values_are_taken(served):
    plain = served.post(COMPLETIONS, GREEDY).json()["choices"]
    neutral = {"best_of": 1, "suffix": None, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "user": "u", "echo": False,
               "min_tokens": 0}
    assert served.post(COMPLETIONS, {**GREEDY, **neutral}).json()["choices"] == plain
    filled = served.post(COMPLETIONS, {**GREEDY, "ignore_eos": True, "min_tokens": 8})
    assert filled.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("fields, param, says", [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "use a text"),
    ({"prompt": [[]]}, "prompt", "use a text"),
    ({"prompt": ["a", [1]]}, "prompt", "use a text"),
    ({"prompt": [1, True]}, "prompt", "use a text"),
    ({"prompt": [-1]}, "prompt", "not a token"),
    ({"prompt": [10**9]}, "prompt", "not a token"),
    ({"prompt": ["a"] * 1000}, "prompt", "send fewer"),
    ({"prompt": "word " * 4000}, "prompt", "send less"),
    ({"max_tokens": 3000}, "max_tokens", "ask for at most"),
    ({"best_of": 4}, "best_of", "leave it out"),
    ({"suffix": "the end"}, "suffix", "leave it out"),
    ({"logprobs": -1}, "logprobs", "0"),
    ({"logprobs": 1000}, "logprobs", "send fewer"),
    ({"logprobs": 1, "echo": True}, "echo", "leave out"),
    ({"messages": []}, "messages", "not a field"),
    ({"tools": []}, "tools", "not a field"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1"),
])
def test_bad_input_names_the_field_and_the_remedy(served, fields, param, says):
    for stream in (False, True):
        answer = served.post(COMPLETIONS, {**GREEDY, "stream": stream, **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and says in error["message"], error


def test_another_model_is_not_found(served):
    answer = served.post(COMPLETIONS, {**GREEDY, "model": "gpt"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_model_without_a_chat_template_completes_and_says_why_it_does_not_chat(mini):
    body = mini.post(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "temperature": 0}).json()
    assert body["usage"]["completion_tokens"] == 12
    error = mini.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).json()["error"]
    assert error["param"] == "messages" and "no chat template" in error["message"]


def test_a_form_that_the_vocabulary_cannot_write_is_the_clients_error(mini):
    for stream in (False, True):
        answer = mini.post(COMPLETIONS, {"prompt": [5, 6, 7], "structured_outputs": {"regex": "[ab]+"}, "stream": stream})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs"


# --- choices that run together ------------------------------------------------------------------------------------------------------


class Observed(list):
    def observe(self, output):
        self.append(output.request_id)


def output(name, text, reason=None, error=None):
    return RequestOutput(name, None, [1, 2], [CompletionOutput(0, text, [3], reason)], reason is not None, 1, Timeline(), error)


def closing(log, name, outputs, error=None):
    async def generator():
        try:
            for one in outputs:
                yield one
                await asyncio.sleep(0)
            if error is not None:
                raise error
            if outputs[-1].outputs[0].finish_reason is None:
                await asyncio.Event().wait()
        finally:
            log.append(name)
    return generator()


def gather(generators, take=None):
    async def main():
        choices, observed, usage = [Choice(index) for index in range(len(generators))], Observed(), Usage(len(generators))
        texts = [""] * len(choices)
        batches = pieces(choices, generators, usage, observed)
        try:
            async for ready, _ in batches:
                for piece in ready:
                    texts[piece.choice.index] += piece.content
                if take is not None and sum(map(len, texts)) >= take:
                    break
        finally:
            await batches.aclose()
        return texts, observed, usage
    return asyncio.run(main())


def test_choices_run_together_and_a_prompt_counts_once():
    log = []
    texts, observed, usage = gather([closing(log, "a", [output("a", "1"), output("a", "2", "stop")]),
                                     closing(log, "b", [output("b", "3", "length")])])
    assert texts == ["12", "3"] and sorted(observed) == sorted(log) == ["a", "b"]
    assert usage.body() == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def test_one_that_fails_ends_the_others():
    for error, reason in ((RuntimeError("boom"), None), (None, "error"), (None, "abort")):
        log = []
        failing = closing(log, "b", [output("b", "3", reason, "it outgrew the pool")], error)
        with pytest.raises(RuntimeError if error else ApiError) as raised:
            gather([closing(log, "a", [output("a", "1")]), failing])
        assert sorted(log) == ["a", "b"]
        assert error or raised.value.status == {"error": 500, "abort": 503}[reason]


def test_a_reader_that_leaves_closes_all():
    for number in (1, 3):
        log = []
        gather([closing(log, name, [output(name, "1")]) for name in range(number)], take=1)
        assert sorted(log) == list(range(number))
