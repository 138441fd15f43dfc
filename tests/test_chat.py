"""Chat over HTTP: forms to the letter, bad input, and what a client that leaves gives back."""
import json
import socket
import subprocess
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="the server's packages are missing; run: pip install 'minengine[serve]'")

from serving import server  # noqa: E402

from minengine.serve.chat import ChatAnswer  # noqa: E402

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Name three colours."}
GREEDY = {"messages": [USER], "temperature": 0, "max_tokens": 8}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}


@pytest.fixture(scope="module")
def served():
    with server("smollm2") as running:
        yield running


@pytest.fixture(scope="module")
def without_grammar():
    """A server that does not hold calls to their tools: what a model may write, structured outputs make it write."""
    with server("smollm2", serve={"tool_grammar": False}) as running:
        yield running


def events(text):
    """The JSON of a stream's events; the last one, [DONE], is left out."""
    assert text.endswith("data: [DONE]\n\n")
    lines = [event.removeprefix("data: ") for event in text.removesuffix("data: [DONE]\n\n").split("\n\n") if event]
    return [json.loads(line) for line in lines]


def added_up(chunks):
    """The deltas of choice 0 as the message that they make, and its finish_reason."""
    message, reason = {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for call in value:
                        assert call.pop("index") == len(message.setdefault(name, [])), "calls come whole and in order"
                        message[name].append(call)
                else:
                    message[name] = message.get(name, "") + value if isinstance(value, str) and name != "role" else value
            reason = choice["finish_reason"] or reason
    return message, reason


# --- form ---------------------------------------------------------------------------------------------------------------------------


def test_a_whole_answer_to_the_letter(served):
    answer = served.post(CHAT, {**GREEDY, "model": "smollm2"})
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    (choice,) = body["choices"]
    assert choice | {"message": None} == {"index": 0, "message": None, "logprobs": None, "finish_reason": "length"}
    assert list(choice["message"]) == ["role", "content", "refusal"]
    usage = body["usage"]
    assert usage == {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 8, "total_tokens": usage["prompt_tokens"] + 8,
                     "prompt_tokens_details": usage["prompt_tokens_details"]}
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}


def test_a_stream_to_the_letter(served):
    answer = served.post(CHAT, {**GREEDY, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(answer.text)
    assert all(list(chunk) == ["id", "object", "created", "model", "choices"] and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0] == {"index": 0, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None, "finish_reason": None}
    assert all(list(one["delta"]) == ["content"] and one["finish_reason"] is None for one in deltas[1:-1])
    assert deltas[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


def test_usage_comes_last_with_no_choice_and_null_before(served):
    chunks = events(served.post(CHAT, {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8


def test_a_timeline_is_told_when_asked_for(served):
    whole = served.post(CHAT, {**GREEDY, "return_timeline": True}).json()["timeline"]
    streamed = events(served.post(CHAT, {**GREEDY, "return_timeline": True, "stream": True}).text)[-1]
    for times in (whole, streamed["timeline"]):
        assert list(times) == ["queue_s", "ttft_s", "e2e_s", "token_s", "num_preemptions"]
        assert 0 <= times["queue_s"] <= times["ttft_s"] == times["token_s"][0] <= times["token_s"][-1] <= times["e2e_s"]
        assert len(times["token_s"]) == 8 and times["num_preemptions"] == 0
    assert streamed["usage"]["completion_tokens"] == 8


def test_the_best_tokens_are_as_many_as_asked_for_whatever_was_chosen(served):
    body = {**GREEDY, "temperature": 3, "seed": 1, "logprobs": True}
    for top in (0, 1):
        entries = served.post(CHAT, body | {"top_logprobs": top}).json()["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [top] * 8
    assert any(entry["top_logprobs"][0]["token"] != entry["token"] for entry in entries)


def test_cached_tokens_are_those_that_nobody_computed(served):
    body = {**GREEDY, "messages": [{"role": "user", "content": "A question that was not asked before, " + "again and " * 30}]}
    usage = [served.post(CHAT, body | salt).json()["usage"] for salt in ({}, {}, {"cache_salt": "another"})]
    first, second, salted = (one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert second > first and second > usage[0]["prompt_tokens"] - 32
    assert salted == 0, "a salted prompt shares nothing"


def test_curl_reads_a_stream(served):
    answer = subprocess.run(["curl", "-sN", f"{served.base_url}{CHAT}", "-H", "Content-Type: application/json", "-d",
                             json.dumps({**GREEDY, "stream": True})], capture_output=True, text=True, timeout=120, check=True)
    whole = served.post(CHAT, GREEDY).json()["choices"][0]
    message, reason = added_up(events(answer.stdout))
    assert (message, reason) == (whole["message"], whole["finish_reason"])


def test_fields_without_meaning_here_change_nothing(served):
    plain = served.post(CHAT, GREEDY).json()["choices"]
    ignored = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
               "prompt_cache_retention": "24h", "reasoning_effort": "low", "parallel_tool_calls": True, "n": 1}
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "modalities": ["text"], "stop": None,
               "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "min_tokens": 0, "audio": None}
    assert served.post(CHAT, {**GREEDY, **ignored, **neutral}).json()["choices"] == plain


# --- tool calls without a grammar ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("written, call, code", [
    ('{"name": "add", "parameters": {"a": 5}}', ("add", {"a": 5}), None),
    ('{"name": "subtract", "parameters": {"a": 5}}', ("subtract", {"a": 5}), "undeclared_tool"),
    ('{"name": "add", "parameters": {"a": "x"}}', ("add", {"a": "x"}), "malformed_arguments"),
])
def test_a_call_is_never_dropped_in_silence(without_grammar, stream, written, call, code):
    body = {"messages": [USER], "tools": [ADD], "max_tokens": 60, "structured_outputs": {"choice": [written]}, "stream": stream}
    answer = without_grammar.post(CHAT, body)
    if stream:
        message, reason = added_up(events(answer.text))
    else:
        message, reason = answer.json()["choices"][0]["message"], answer.json()["choices"][0]["finish_reason"]
    (made,) = message["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == call and reason == "tool_calls"
    assert (made["error"]["code"] if code else made.get("error")) == code
    assert list(made)[:3] == ["id", "type", "function"]


def test_a_marked_call_may_come_back_in_the_history(served):
    marked = {**CALL, "index": 0, "error": {"code": "undeclared_tool", "message": "..."}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [marked], "refusal": None, "annotations": [],
                "audio": None, "function_call": None},
               {"role": "tool", "tool_call_id": "c1", "content": "no such tool"}]
    assert served.post(CHAT, {**GREEDY, "messages": history}).status_code == 200


# --- reasoning ----------------------------------------------------------------------------------------------------------------------


def test_reasoning_stands_beside_the_content(tmp_path):
    template = tmp_path / "thinks.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    with server("smollm2", serve={"chat_template": str(template)}) as thinking:
        body = {**GREEDY, "max_tokens": 60, "structured_outputs": {"choice": ["I think so</think>It is blue."]}}
        whole = thinking.post(CHAT, body).json()["choices"][0]["message"]
        assert (whole["reasoning_content"], whole["content"]) == ("I think so", "It is blue.")
        assert added_up(events(thinking.post(CHAT, {**body, "stream": True}).text))[0] == whole
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
        asked = {**GREEDY, "max_tokens": 4, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        choice = thinking.post(CHAT, asked).json()["choices"][0]
        assert not choice["message"]["reasoning_content"].startswith("{"), "a schema leaves reasoning free"


# --- bad input ----------------------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize("fields, param, says", [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "use a text or a list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content", "'image_url'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "part 0 has no text"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages.0.colour", "not a field"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "c9", "content": "x"}]}, "messages.1.tool_call_id", "no earlier message"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 10_000}, "n", "send fewer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "use a whole number"),
    ({"max_tokens": 100_000}, "max_tokens", "ask for at most"),
    ({"max_tokens": None, "max_completion_tokens": 100_000}, "max_completion_tokens", "ask for at most"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": ["x"] * 100}, "stop", "send fewer"),
    ({"seed": 1 << 70}, "seed", "less than"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 100}, "top_logprobs", "send fewer"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "leave it out"),
    ({"presence_penalty": -1}, "presence_penalty", "leave it out"),
    ({"logit_bias": {"7": 5}}, "logit_bias", "leave it out"),
    ({"modalities": ["text", "audio"]}, "modalities", "leave it out"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs.json"),
    ({"guided_regex": "a+"}, "guided_regex", "use structured_outputs.regex"),
    ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
    ({"guided_grammar": "root ::= \"a\""}, "guided_grammar", "use structured_outputs.grammar"),
    ({"grammar": "root ::= \"a\""}, "grammar", "use structured_outputs.grammar"),
    ({"json_schema": {"type": "object"}}, "json_schema", "use structured_outputs.json"),
    ({"min_tokens": 5}, "min_tokens", "ignore_eos"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"return_timeline": True, "n": 2}, "return_timeline", "n=1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them"),
    ({"user": "u" * 1000}, "user", "send fewer"),
    ({"temprature": 1}, "temprature", "check its spelling"),
    ({"tools": [{"type": "retrieval", "function": ADD["function"]}]}, "tools.0.type", "use 'function'"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name", "use a text that matches"),
    ({"tools": [ADD, ADD]}, "tools.1.function.name", "declared twice"),
    ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice.function.name", "no tool of this request"),
    ({"tool_choice": "required"}, "tool_choice", "send tools"),
    ({"tools": [ADD], "response_format": {"type": "json_object"}}, "response_format", "declare its properties, or send no tools"),
    ({"tools": [ADD], "structured_outputs": {"regex": "a"}}, "structured_outputs", "or send tool_choice='none'"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json.uniqueItems",
     "cannot be enforced by a grammar; leave it out"),
    ({"structured_outputs": {"json": "false"}}, "structured_outputs.json", "allows nothing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "string", "format": "phone"}}}},
     "response_format.json_schema.schema.format", "'phone' is none that a grammar knows; use one of date,"),
    ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "structured_outputs", "leave one out"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"n": {"$ref": "#/none"}}}}}]},
     "tools.0.function.parameters.properties.n.$ref", "or set tools.0.function.strict to false"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"anyOf": [{"type": "array", "uniqueItems": True}]}}}},
     "response_format.json_schema.schema.anyOf.0.uniqueItems", "or set response_format.json_schema.strict to false"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}}}, "response_format.json_schema.schema.type", "use one"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "remove it"),
    ({"cache_salt": "s" * 1000}, "cache_salt", "send fewer"),
])
def test_bad_input_names_the_field_and_the_remedy(served, fields, param, says):
    for stream in (False, True):
        answer = served.post(CHAT, {**GREEDY, "stream": stream, **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and says in error["message"], error
        assert error["message"].startswith(param) and error["type"] == "invalid_request_error"
        assert any(remedy in error["message"] for remedy in ("; ", ": use ", ": send "))


def test_a_prompt_longer_than_the_context_is_refused_before_a_stream_begins(served):
    for stream in (False, True):
        answer = served.post(CHAT, {"messages": [{"role": "user", "content": "word " * 4000}], "stream": stream})
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "context_length_exceeded" and answer.json()["error"]["param"] == "messages"


# --- clients that leave, engines that fail ------------------------------------------------------------------------------------------


@contextmanager
def raw(served, body):
    """A request on a socket of its own."""
    host, port = served.base_url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                           % (CHAT.encode(), len(payload), payload))
        yield connection


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 3}, {"n": 3, "stream": True}], ids=["stream", "whole", "n", "n-stream"])
def test_a_client_that_leaves_gives_everything_back(served, fields):
    before = served.engine.stats().finished.get("abort", 0)
    count = fields.get("n", 1)
    with raw(served, {"messages": [USER], "ignore_eos": True, "max_tokens": 1900, **fields}) as connection:
        served.wait_until(lambda stats: stats.num_running == count)
        assert served.engine.stats().kv_cache_usage > 0
        if "stream" in fields:
            assert connection.recv(12) == b"HTTP/1.1 200"
    served.wait_until(lambda stats: stats.finished.get("abort", 0) == before + count)
    served.wait_until(lambda stats: stats.num_running == stats.num_waiting == 0 and stats.kv_cache_usage == 0)
    assert served.post(CHAT, GREEDY).status_code == 200


def test_an_engine_that_dies_ends_a_stream_with_an_error_event():
    with server("smollm2") as dying, dying.http() as client:
        execute, steps = dying.engine.engine.runner.execute, iter(range(4))

        def fail_later(step):
            if next(steps) == 3:
                raise RuntimeError("the machine's memory is full")
            return execute(step)

        dying.engine.engine.runner.execute = fail_later
        answer = client.post(CHAT, json={**GREEDY, "stream": True})
        *chunks, last = events(answer.text)
        assert answer.status_code == 200 and chunks and last["error"]["code"] == "engine_dead" and last["error"]["type"] == "server_error"
        answer = client.post(CHAT, json={**GREEDY, "stream": True})  # on the same connection
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"


def test_a_fault_in_midstream_is_told_and_logged(served, monkeypatch, caplog):
    well, left = ChatAnswer.chunk, iter([True, True])
    monkeypatch.setattr(ChatAnswer, "chunk", lambda self, piece: well(self, piece) if next(left, False) else piece.nonsense)
    *chunks, last = events(served.post(CHAT, {**GREEDY, "stream": True}).text)
    assert len(chunks) == 3 and last["error"]["code"] == "internal_error" and "nonsense" not in last["error"]["message"]
    served.wait_until(lambda stats: stats.num_running == 0 and stats.kv_cache_usage == 0 and "failed with AttributeError" in caplog.text)


def test_more_choices_than_the_server_can_ever_hold_are_refused_at_once():
    with server("smollm2", max_num_waiting=1, max_num_seqs=2) as small:
        answer = small.post(CHAT, {**GREEDY, "n": 4})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "n" and "the server holds 3" in answer.json()["error"]["message"]
        answer = small.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
        assert answer.status_code == 400 and "n=2: asks for 4 answers, 2 to each of 2 in prompt, and" in answer.json()["error"]["message"]
        answer = small.post("/v1/completions", {"prompt": ["a"] * 4})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_an_answer_that_outgrows_the_pool_says_so():
    with server("smollm2", num_gpu_blocks_override=3) as small:
        body = {**GREEDY, "max_tokens": 200, "ignore_eos": True}
        answer = small.post(CHAT, body)
        assert answer.status_code == 500 and "blocks" in answer.json()["error"]["message"]
        *chunks, last = events(small.post(CHAT, {**body, "stream": True}).text)
        assert chunks and last["error"]["code"] == "engine_error"
        assert small.post(CHAT, GREEDY).status_code == 200, "the next request is served"


def test_a_full_queue_refuses_and_harms_nobody():
    with server("smollm2", max_num_waiting=1, max_num_seqs=1) as busy:
        long = {"messages": [USER], "ignore_eos": True, "max_tokens": 1900, "stream": True}
        with raw(busy, long) as running:
            busy.wait_until(lambda stats: stats.num_running == 1)
            with raw(busy, long):
                busy.wait_until(lambda stats: stats.num_waiting == 1)
                for stream in (False, True):
                    answer = busy.post(CHAT, {**GREEDY, "stream": stream})
                    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            said = 0
            while said < 12:
                said += running.recv(4096).count(b'"delta":{"content"')
