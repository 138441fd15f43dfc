"""The public face and the command line with the real model: what a user types, what they read."""
import io
import subprocess
import sys

import pytest

from minengine import LLM, ConfigError, RequestError, SamplingParams
from minengine.cli import main
from minengine.request import OutputKind

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2", block_size=16, max_num_batched_tokens=256, num_threads=1)


def test_it_answers(llm):
    out = llm.generate(["The capital of France is"], GREEDY)[0]
    assert out.outputs[0].text.startswith(" Paris")
    assert out.finished and out.outputs[0].finish_reason in ("length", "stop")
    assert out.metrics.ttft_s > 0


def test_prompt_forms_agree_and_keep_their_order(llm):
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text)
    outs = llm.generate([text, {"prompt": text}, {"prompt_token_ids": ids}, "The sky is"], [GREEDY] * 3 + [SamplingParams(max_tokens=2, temperature=0.0)])
    assert outs[0].outputs[0].token_ids == outs[1].outputs[0].token_ids == outs[2].outputs[0].token_ids
    assert outs[3].prompt == "The sky is" and len(outs[3].outputs[0].token_ids) == 2
    assert llm.generate("The sky is", GREEDY)[0].prompt == "The sky is"


def test_streaming_gives_the_same_text_bit_by_bit(llm):
    prompt = "Write the word cafe with an accent, then an emoji:"
    params = SamplingParams(max_tokens=24, temperature=0.0)
    whole = llm.generate(prompt, params)[0].outputs[0]
    seen = [out.outputs[0].text for out in llm.stream(prompt, params)]
    assert seen[-1] == whole.text
    assert all(b.startswith(a) for a, b in zip(seen, seen[1:]))


def test_closing_a_stream_aborts_the_request(llm):
    free = llm.kv_cache.num_free_blocks
    stream = llm.stream("Count to a thousand: 1, 2,", SamplingParams(max_tokens=500, temperature=0.0))
    next(stream)
    next(stream)
    assert llm.kv_cache.num_free_blocks < free
    stream.close()
    assert llm.kv_cache.num_free_blocks == free and not llm.llm_engine.has_unfinished_requests()


def test_two_streams_and_a_batch_share_the_engine(llm):
    params = SamplingParams(max_tokens=6, temperature=0.0)
    a, b = llm.stream("The sky is", params), llm.stream("Once upon a time", params)
    first = [next(a), next(b)]
    batch = llm.generate(["The capital of France is"], GREEDY)[0]
    ends = [list(a)[-1], list(b)[-1]]
    assert batch.outputs[0].text.startswith(" Paris") and len(first) == 2
    for out, text in zip(ends, ("The sky is", "Once upon a time")):
        assert out.finished and out.outputs[0].token_ids == llm.generate(text, params)[0].outputs[0].token_ids
    stream = llm.stream("The sky is", params)
    llm.llm_engine.abort_request(next(stream).request_id)
    with pytest.raises(RequestError, match="aborted"):
        next(stream)


def test_streamed_text_never_shrinks_before_a_stop_string(llm):
    prompt, n = "One, two, three, four,", SamplingParams(max_tokens=16, temperature=0.0)
    whole = llm.generate(prompt, n)[0].outputs[0].text
    stop = whole[6:14]
    seen = [out.outputs[0].text for out in llm.stream(prompt, SamplingParams(max_tokens=16, temperature=0.0, stop=[stop]))]
    assert all(b.startswith(a) for a, b in zip(seen, seen[1:])) and seen[-1] == whole[: whole.find(stop)]


@pytest.mark.parametrize("options", [{}, {"stop": ["France", "the capital of"]}, {"logprobs": 2}])
def test_deltas_joined_are_the_final_output(llm, options):
    params = SamplingParams(max_tokens=24, temperature=0.0, **options)
    whole = llm.generate("The capital of France is", params)[0].outputs[0]
    engine = llm.llm_engine
    engine.add_request("deltas", "The capital of France is", params, output_kind=OutputKind.DELTA)
    parts = []
    while engine.has_unfinished_requests():
        parts += [out.outputs[0] for out in engine.step()]
    assert len(parts) > 1 and parts[-1].finish_reason == whole.finish_reason and not any(part.finish_reason for part in parts[:-1])
    assert "".join(part.text for part in parts) == whole.text
    assert sum((part.token_ids for part in parts), []) == whole.token_ids
    assert whole.logprobs == (None if whole.logprobs is None else sum((part.logprobs for part in parts), []))


def test_half_a_surrogate_pair_is_refused(llm):
    with pytest.raises(RequestError, match="character 1 is half"):
        llm.generate("a\ud800b", GREEDY)


def test_stop_strings_cut_the_text_wherever_they_fall(llm):
    whole = llm.generate("One, two, three, four,", SamplingParams(max_tokens=20, temperature=0.0))[0].outputs[0].text
    for stop in (whole[3:6], whole[7:12], whole[2:3]):
        out = llm.generate("One, two, three, four,", SamplingParams(max_tokens=20, temperature=0.0, stop=[stop]))[0].outputs[0]
        assert out.text == whole[: whole.find(stop)] and out.finish_reason == "stop" and out.stop_reason == stop
    missing = llm.generate("One, two, three, four,", SamplingParams(max_tokens=20, temperature=0.0, stop="\x00never"))[0].outputs[0]
    assert missing.text == whole and missing.finish_reason == "length"


def test_a_conversation_keeps_its_prefix(llm):
    messages = [{"role": "user", "content": "Name a colour."}]
    cached = []
    for question in ("Name another.", "And a third.", None):
        out = llm.chat(messages, SamplingParams(max_tokens=20, temperature=0.0))
        cached.append(out.num_cached_tokens)
        messages += [{"role": "assistant", "content": out.outputs[0].text}, {"role": "user", "content": question}]
    assert cached[0] < cached[1] < cached[2]


def test_logprobs_name_their_tokens(llm):
    out = llm.generate("The capital of France is", SamplingParams(max_tokens=1, temperature=0.0, logprobs=3))[0].outputs[0]
    best = out.logprobs[0][out.token_ids[0]]
    assert best.decoded_token == " Paris" and best.rank == 1 and best.logprob == pytest.approx(out.cumulative_logprob)
    assert len(out.logprobs[0]) == 3


def test_a_bad_prompt_among_good_ones_runs_none(llm):
    free = llm.kv_cache.num_free_blocks
    with pytest.raises(RequestError, match="is empty"):
        llm.generate(["fine", {"prompt_token_ids": []}], GREEDY)
    with pytest.raises(RequestError, match="2 given for 1 prompts"):
        llm.generate(["fine"], [GREEDY, GREEDY])
    assert not llm.llm_engine.has_unfinished_requests() and llm.kv_cache.num_free_blocks == free


def test_unknown_model_and_option_are_one_sentence():
    with pytest.raises(ConfigError, match="smollm2"):
        LLM("no-such-model")
    for nothing in (None, "", 5):
        with pytest.raises(ConfigError, match="model="):
            LLM(nothing)
    with pytest.raises(ConfigError, match="unknown option 'block_sise'"):
        LLM("smollm2", block_sise=16)


def test_generate_command(capsys):
    assert main(["generate", "The capital of France is", "--max-tokens", "4", "--num-threads", "1", "--kv-cache-dtype", "fp8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The capital of France is Paris") and "first token after" in captured.err


def test_chat_command_holds_a_conversation(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\nWhat is the capital of France?\n"))
    assert main(["chat", "--max-tokens", "24", "--block-size", "16", "--num-threads", "1"]) == 0
    captured = capsys.readouterr()
    cached = [int(line.split("(")[1].split(" cached")[0]) for line in captured.err.splitlines() if " cached)" in line]
    assert "Paris" in captured.out and len(cached) == 2 and cached[1] > cached[0]


def test_errors_go_to_stderr_with_code_2(capsys):
    assert main(["generate", "x", "--model", "no-such-model"]) == 2
    assert main(["generate", "x", "--temperature", "-1"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "no-such-model" in err[0] and "temperature=-1" in err[1]


def test_doctor_says_all_is_well_or_names_a_remedy(capsys):
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert (code == 0) == ("all well" in out) and ("remedy" in out) == (code != 0)
    for word in ("Python", "torch", "Triton", "NIXL", "memory", "smollm2", "chapter"):
        assert word in out


def test_arithmetic_and_config_need_neither_torch_nor_numpy():
    code = "import sys, minengine.arithmetic, minengine.schedule, minengine.kv.blocks; assert not {'torch', 'numpy'} & set(sys.modules), 'torch or numpy came along'"
    subprocess.run([sys.executable, "-c", code], check=True)
