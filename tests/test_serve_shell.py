"""What stands around the endpoints: who may ask, how much, what is told, and what can be seen of the server."""
import asyncio
import json
import logging
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ENGINE, loaded

import minengine
from minengine.async_llm import AsyncLLM, EngineDead, EngineDraining, EngineOverloaded
from minengine.config import ConfigError, EngineArgs
from minengine.engine import LLMEngine
from minengine.request import CompletionOutput, RequestError, RequestOutput, Timeline
from minengine.serve.app import create_app
from minengine.serve.args import ServeArgs
from minengine.serve.auth import ApiKeys, is_loopback
from minengine.serve.limits import ServeLimits
from minengine.serve.metrics import ServerMetrics
from minengine.tokenizer import Tokenizer

ARGS = EngineArgs(model="glm-mini", **ENGINE)
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
         408: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def new_engine():
    model, tokenizer = loaded("glm-mini")
    talking = Tokenizer(tokenizer.backend, chat_template="{% for turn in messages %}{{ turn.content }} {% endfor %}")
    return AsyncLLM(LLMEngine(ARGS, model=model, tokenizer=talking))


@pytest.fixture(scope="module")
def engine():
    llm = new_engine()
    yield llm
    asyncio.run(llm.shutdown())


def app_of(engine, **serve):
    return create_app(engine, ServeArgs(engine=ARGS, **serve))


def ask(app, method, path, *, host="localhost", **options):
    """One request to the app in this process."""
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def refused(answer, status, param=None, *words):
    """The error of an answer, after checking its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == TYPES[status]
    assert error["param"] == param
    for word in words:
        assert word in error["message"], error["message"]
    return error


def samples(text):
    """{(name, labels but the model's and the engine's): value}"""
    return {(sample.name, *sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine"))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


# --- what is open, and to whom --------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# the first one is old\nsk-one\n\n  sk-two  \n")
    return str(path)


def test_with_keys_only_the_page_and_health_are_open(engine, key_file):
    app = app_of(engine, api_key_file=key_file)
    for path in ("/health", "/ping", "/", "/page/page.js"):
        assert ask(app, "GET", path).status_code == ask(app, "HEAD", path).status_code == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/openapi.json"), ("POST", "/tokenize"), ("POST", "/v1/chat/completions"),
                         ("POST", "/v1/completions"), ("GET", "/nothing"), ("GET", "/health/")):
        answer = ask(app, method, path)
        error = refused(answer, 401, None, "Authorization", "send Authorization: Bearer KEY")
        assert error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header, ok", [
    ("Bearer sk-one", True), ("Bearer sk-two", True), ("bearer sk-one", True), ("Bearer  sk-one ", True),
    ("Bearer sk-on", False), ("Bearer sk-onee", False), ("Bearer", False), ("Bearer ", False), ("sk-one", False), ("Basic sk-one", False),
    ("Bearer # the first one is old", False), ("Bearer sk-one sk-two", False), ("", False),
])
def test_a_key_of_the_file_opens(engine, key_file, header, ok):
    answer = ask(app_of(engine, api_key_file=key_file), "GET", "/v1/models", headers={"Authorization": header})
    assert answer.status_code == (200 if ok else 401)
    assert "sk-" not in answer.text


def test_every_key_is_compared_whichever_it_is(key_file, monkeypatch):
    """A comparison that ended at the first match would tell by its time which key it was."""
    compared = []
    monkeypatch.setattr("minengine.serve.auth.hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    keys = ApiKeys(key_file)
    for header in (b"Bearer sk-one", b"Bearer sk-two"):
        keys.check(header)
        assert len(compared) == 2
        assert all(len(digest) == 32 for digest in compared)
        compared.clear()


def test_a_key_file_may_begin_with_a_byte_order_mark(engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text("sk-one\n", encoding="utf-8-sig")
    assert ask(app_of(engine, api_key_file=str(path)), "GET", "/v1/models", headers={"Authorization": "Bearer sk-one"}).status_code == 200


@pytest.mark.parametrize("content, words", [
    (b"sk-one # of Ann\n", "line 1 is no key; use .* a line of its own for a comment"), (None, "cannot be read"), (b"# only a comment\n\n", "holds no key"), (b"one two\n", "line 1 is no key"), ("# a\nsch\u00f6n\n".encode(), "line 2 is no key"),
    (b"\xff\xfe", "cannot be read"),
])
def test_a_key_file_that_is_none_is_refused_before_the_server_starts(engine, tmp_path, content, words):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        app_of(engine, api_key_file=str(path))
    assert "one two" not in str(caught.value) and "sch" not in str(caught.value).replace(str(path), "")


def test_on_loopback_a_name_from_elsewhere_is_refused(engine, key_file):
    """A page whose name was made to resolve to 127.0.0.1 must not drive the server of whoever looks at it."""
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "chat.localhost"):
        assert ask(app_of(engine), "GET", "/health", host=host).status_code == 200
    for host in ("example.org", "localhost.example.org", "127.0.0.1.example.org", "192.168.0.1", "[2001:db8::1]"):
        refused(ask(app_of(engine), "GET", "/health", host=host), 403, None, "localhost", "--api-key-file")
    assert ask(app_of(engine, api_key_file=key_file), "GET", "/health", host="example.org").status_code == 200
    assert ask(app_of(engine, host="0.0.0.0"), "GET", "/health", host="example.org").status_code == 200


def test_a_page_of_another_origin_gets_no_word_of_permission(engine):
    """Its form or plain text, which a browser sends unasked, is refused; for JSON the browser asks first, and is not told yes."""
    app, origin = app_of(engine), {"Origin": "https://example.org"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = ask(app, "POST", "/v1/chat/completions", content=json.dumps(CHAT), headers={**origin, "Content-Type": kind})
        refused(answer, 415, None, "send Content-Type: application/json")
    asked = ask(app, "OPTIONS", "/v1/chat/completions", headers={**origin, "Access-Control-Request-Method": "POST"})
    refused(asked, 405)
    for answer in (asked, ask(app, "GET", "/v1/models", headers=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host, loopback", [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
                                            ("::", False), ("", False), ("10.0.0.1", False), ("example.org", False)])
def test_loopback_is_what_only_this_machine_reaches(host, loopback):
    assert is_loopback(host) == loopback


# --- how much ---------------------------------------------------------------------------------------------------


async def _drip(size):
    for _ in range(size // 100):
        yield b" " * 100


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_whether_or_not_its_length_was_announced(engine, announced):
    app = app_of(engine, limits=ServeLimits(max_body_bytes=1000))
    for path in ("/tokenize", "/v1/chat/completions", "/v1/completions"):
        def send(size):
            return ask(app, "POST", path, content=b" " * size if announced else _drip(size), headers={"Content-Type": "application/json"})

        answer = send(1100)
        assert refused(answer, 413, None, "max_body_bytes=1000", "--max-body-bytes")["code"] == "request_too_large"
        assert answer.headers["connection"] == "close"
        assert send(1000).status_code == 400  # blanks are no JSON, but few enough


def test_a_body_over_the_limit_is_not_read_to_its_end(engine):
    """The server stops at the limit: what it takes in does not depend on what is sent."""
    app = app_of(engine, limits=ServeLimits(max_body_bytes=1000))
    sent = []

    async def endless():
        while True:
            sent.append(100)
            yield b" " * 100

    async def main():  # httpx would read an endless body before it calls the app
        body, answers = endless(), []

        async def receive():
            return {"type": "http.request", "body": await anext(body), "more_body": True}

        async def send(message):
            answers.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await app({"type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize", "query_string": b"", "headers": headers}, receive, send)
        return answers[0]["status"]

    assert asyncio.run(main()) == 413
    assert sum(sent) == 1100


def test_a_body_that_does_not_go_on_is_given_up(engine, monkeypatch):
    monkeypatch.setattr("minengine.serve.gate.BODY_GAP_S", 0)

    async def main():
        parts, answers = [b"{", None], []

        async def receive():
            if (part := parts.pop(0)) is None:
                await asyncio.Event().wait()  # for ever
            return {"type": "http.request", "body": part, "more_body": True}

        async def send(message):
            answers.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await app_of(engine)({"type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize", "query_string": b"",
                              "headers": headers}, receive, send)
        return answers[0], json.loads(answers[1]["body"])["error"]

    start, error = asyncio.run(main())
    assert (start["status"], error["code"]) == (408, "request_timeout")
    assert (b"connection", b"close") in start["headers"]


def test_behind_the_body_a_client_may_wait_for_as_long_as_it_likes(engine, monkeypatch):
    monkeypatch.setattr("minengine.serve.gate.BODY_GAP_S", 0)
    answer = ask(app_of(engine), "POST", "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 40})
    assert answer.text.endswith("data: [DONE]\n\n") and "error" not in answer.text


def test_an_announced_length_beyond_all_numbers_is_refused(engine):
    async def main():
        answers = []

        async def send(message):
            answers.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9" * 10_000)]
        await app_of(engine)({"type": "http", "method": "POST", "path": "/tokenize", "raw_path": b"/tokenize", "query_string": b"",
                              "headers": headers}, None, send)
        return answers[0]["status"]

    assert asyncio.run(main()) == 413


# --- what is told -------------------------------------------------------------------------------------------------


def test_paths_and_methods_that_there_are_not(engine):
    app = app_of(engine)
    for path in ("/nothing", "/v1", "/v1/models/", "/docs", "/redoc", "/page/", "/page/nothing.js", "/page/..%2Fapp.py", "/health/"):
        refused(ask(app, "GET", path), 404, "model" if path == "/v1/models/" else None)
    for method, path, allowed in (("POST", "/health", "GET"), ("GET", "/tokenize", "POST"), ("DELETE", "/v1/models", "GET"), ("GET", "/v1/completions", "POST")):
        answer = ask(app, method, path)
        refused(answer, 405, None, "Allow")
        assert answer.headers["allow"] == allowed


def test_another_model_is_404_everywhere(engine):
    app = app_of(engine, served_model_name="mini")
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        error = refused(ask(app, "POST", path, json={**body, "model": "gpt-9"}), 404, "model", "model='gpt-9'", "use 'mini'")
        assert error["code"] == "model_not_found"
    refused(ask(app, "GET", "/v1/models/gpt-9"), 404, "model", "use 'mini'")


@pytest.mark.parametrize("error, status, param, headers", [
    (RequestError("top_p=2: use at most 1"), 400, "top_p", {}),
    (RequestError("tools.0.function.parameters: is no schema; send one"), 400, "tools.0.function.parameters", {}),
    (EngineOverloaded(7, 3), 429, None, {"retry-after": "3"}),
    (EngineDraining("draining; go elsewhere"), 503, None, {"retry-after": "1"}),
    (EngineDead("the engine has stopped; restart the server"), 503, None, {}),
    (KeyError("PROMPT"), 500, None, {}),
    (RecursionError("PROMPT"), 500, None, {}),
])
def test_every_exception_becomes_an_answer_and_the_log_tells_no_prompt(engine, monkeypatch, caplog, error, status, param, headers):
    async def failing(*_):
        raise error

    app = app_of(engine)
    monkeypatch.setattr(app.state.server.prompts, "prompt", failing)
    with caplog.at_level(logging.DEBUG, "minengine"):
        answer = ask(app, "POST", "/v1/chat/completions", json=CHAT)
    refused(answer, status, param)
    assert headers.items() <= dict(answer.headers).items()
    assert "PROMPT" not in answer.text + caplog.text
    if status == 500:
        assert f"POST /v1/chat/completions failed with {type(error).__name__} at test_serve_shell.py" in caplog.text
    else:
        assert not caplog.text


def test_a_drained_server_says_so(engine):
    app = app_of(engine, drain_timeout_s=7)
    app.state.server.draining = True
    for method, path, body in (("GET", "/health", None), ("POST", "/v1/chat/completions", CHAT), ("POST", "/tokenize", {"prompt": "a"})):
        answer = ask(app, method, path, json=body)
        assert refused(answer, 503, None, "another one")["code"] == "draining"
        assert answer.headers["retry-after"] == "7"
    assert ask(app, "GET", "/metrics").status_code == 200


def test_health_says_when_the_engine_has_ended():
    llm = new_engine()
    app = app_of(llm)
    for path in ("/health", "/ping"):
        assert ask(app, "GET", path).json() == {"status": "ok"}
    asyncio.run(llm.shutdown())
    assert refused(ask(app, "GET", "/health"), 503)["code"] == "engine_dead"
    refused(ask(app, "POST", "/v1/chat/completions", json=CHAT), 503)


# --- what can be seen -----------------------------------------------------------------------------------------------


def test_the_version_is_the_package_s(engine):
    assert ask(app_of(engine), "GET", "/version").json() == {"version": minengine.__version__}


def test_head_is_counted_as_what_it_is(engine):
    app = app_of(engine)
    got, head = (ask(app, method, "/health") for method in ("GET", "HEAD"))
    assert head.status_code == 200 and head.headers == got.headers
    assert ask(app, "HEAD", "/tokenize").headers["allow"] == "POST"
    assert samples(ask(app, "GET", "/metrics").text)["http_requests_total", ("handler", "/health"), ("method", "HEAD"), ("status", "200")] == 1


def test_models(engine):
    app = app_of(engine)
    listed = ask(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    card, = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("glm-mini", "model", 2048)
    assert ask(app, "GET", "/v1/models/glm-mini").json() == card


def test_a_directory_is_served_under_its_last_name(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert ServeArgs(engine=EngineArgs(model=str(tmp_path / "my-model"))).model_name == "my-model"
    assert ServeArgs(engine=EngineArgs(model="org/some-model")).model_name == "org/some-model"


def test_metrics_count_what_was_served(engine):
    app = app_of(engine)
    before = samples(ask(app, "GET", "/metrics").text)
    for _ in range(2):
        assert ask(app, "POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 3}).status_code == 200
    refused(ask(app, "POST", "/v1/chat/completions", json={}), 400, "messages")
    ask(app, "GET", "/made-up-by-a-client")
    answer = ask(app, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    after = samples(answer.text)
    assert 'model_name="glm-mini"' in answer.text and "made-up-by-a-client" not in answer.text

    def grown(name, *labels):
        return after[name, *labels] - before.get((name, *labels), 0)

    prompt = ask(app, "POST", "/tokenize", json={"messages": CHAT["messages"]}).json()["count"]
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") == 2 * prompt
    assert grown("vllm:prefix_cache_hits_total") == 0  # no prompt fills a block
    assert grown("vllm:generation_tokens_total") == 6
    assert grown("vllm:request_success_total", ("finished_reason", "length")) == 2
    assert after["vllm:num_requests_running",] == after["vllm:num_requests_waiting",] == after["vllm:kv_cache_usage_perc",] == 0
    for name, count in (("time_to_first_token_seconds", 2), ("inter_token_latency_seconds", 4), ("request_time_per_output_token_seconds", 2),
                        ("e2e_request_latency_seconds", 2), ("request_queue_time_seconds", 2), ("request_prompt_tokens", 2)):
        assert after[f"vllm:{name}_count",] == after[f"vllm:{name}_bucket", ("le", "+Inf")] == count
    handler = ("handler", "/v1/chat/completions"), ("method", "POST")
    assert after["http_requests_total", *handler, ("status", "200")] == 2
    assert after["http_requests_total", *handler, ("status", "400")] == 1
    assert after["http_requests_total", ("handler", "none"), ("method", "GET"), ("status", "404")] == 1


def test_tokens_found_in_the_prefix_cache_are_counted(engine):
    app = app_of(engine)

    def hits():
        return samples(ask(app, "GET", "/metrics").text)["vllm:prefix_cache_hits_total",]

    before, body = hits(), {"prompt": list(range(40, 90)), "max_tokens": 1, "cache_salt": "of this test alone"}
    for cached in (0, 48):  # of 50 tokens three blocks of 16
        assert ask(app, "POST", "/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert hits() - before == 48


def test_histograms_are_of_the_timeline(engine):
    """Arrival at 10; admitted at 10.5, tokens at 11, 11.01 and 11.03, finished at 11.04."""
    metrics = ServerMetrics(engine, "m")
    times = Timeline(10.0, 10.5, [11.0, 11.01, 11.03], 11.04)
    metrics.observe(RequestOutput("r", None, [1, 2], [CompletionOutput(0, "", [3], "stop")], True, 0, times))
    found = samples(metrics.render().decode())
    for name, total in (("request_queue_time", .5), ("time_to_first_token", 1), ("inter_token_latency", .03), ("request_time_per_output_token", .015),
                        ("e2e_request_latency", 1.04), ("request_prefill_time", .5), ("request_decode_time", .04), ("request_inference_time", .54)):
        assert found[f"vllm:{name}_seconds_sum",] == pytest.approx(total)
    assert found["vllm:request_generation_tokens_sum",] == 3
    assert found["vllm:time_to_first_token_seconds_bucket", ("le", "0.75")] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", ("le", "1.0")] == 1  # a bucket holds its own bound


def test_a_request_that_was_never_admitted_has_no_times_but_its_end(engine):
    metrics = ServerMetrics(engine, "m")
    metrics.observe(RequestOutput("r", None, [1], [CompletionOutput(0, "", [], "abort")], True, 0, Timeline(1.0, finished_s=3.0)))
    found = samples(metrics.render().decode())
    assert found["vllm:e2e_request_latency_seconds_sum",] == 2
    assert found["vllm:time_to_first_token_seconds_count",] == found["vllm:request_queue_time_seconds_count",] == 0


@pytest.mark.parametrize("source, words", [
    ("", "is empty"), (" \n", "is empty"), ("{{ messages", "is not jinja2"), ("{{ messages[0].a.b }}", "cannot render one message of a user"),
    ("{{ 1 / 0 }}", "division by zero"), ("{{ 'a'.encode('no-such') }}", "no-such"), ("{{ raise_exception('no') }}", "(no)"),
    ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
])
def test_a_chat_template_that_cannot_render_is_refused_before_the_server_starts(engine, tmp_path, source, words):
    path = tmp_path / "template.jinja"
    path.write_text(source)
    with pytest.raises(ConfigError, match="^chat_template") as caught:
        app_of(engine, chat_template=str(path))
    assert words in str(caught.value) and "; " in str(caught.value)


def test_tokens_there_and_back(engine):
    app, tokenizer = app_of(engine), engine.tokenizer
    text = tokenizer.decode(list(range(40, 60)), skip_special_tokens=False)
    answer = ask(app, "POST", "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert ask(app, "POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": tokenizer.decode(answer["tokens"], skip_special_tokens=False)}
    assert ask(app, "POST", "/tokenize", json={"prompt": text}).json()["token_strs"] is None


def test_as_many_tokens_as_the_model_takes_are_made_a_text(engine):
    app, most = app_of(engine), engine.max_model_len
    assert ask(app, "POST", "/detokenize", json={"tokens": [40] * most}).json() == {"prompt": engine.tokenizer.decode([40] * most)}
    refused(ask(app, "POST", "/detokenize", json={"tokens": [40] * (most + 1)}), 400, "tokens", f"has {most + 1} ids", f"max_model_len is {most}")


@pytest.mark.parametrize("path, body", [("/tokenize", {"prompt": "a"}), ("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [40, 41]})])
def test_tokens_are_made_beside_the_event_loop(engine, monkeypatch, path, body):
    app, threads = app_of(engine), set()

    def noting(made):
        return lambda *args, **options: threads.add(threading.current_thread()) or made(*args, **options)

    for name in ("encode", "decode", "token_bytes"):
        monkeypatch.setattr(engine.tokenizer, name, noting(getattr(engine.tokenizer, name)))
    assert ask(app, "POST", path, json=body).status_code == 200
    assert threads and threading.current_thread() not in threads


def test_tokens_of_messages_are_those_that_a_chat_is_charged_for(engine):
    app = app_of(engine)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    for body in ({"messages": CHAT["messages"]}, {"messages": CHAT["messages"], "tools": tools}):
        counted = ask(app, "POST", "/tokenize", json=body).json()["count"]
        assert ask(app, "POST", "/v1/chat/completions", json={**CHAT, **body}).json()["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "x"}}]}, "tools"), ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"), ("/tokenize", {"prompt": "a" * 101}, "prompt"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens.1"), ("/detokenize", {"tokens": [1, 10**6]}, "tokens.1"), ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens.0"), ("/detokenize", {"tokens": [True]}, "tokens.0"), ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [10**400]}, "tokens.0"),
])
def test_tokens_refuse_by_field(engine, path, body, param):
    refused(ask(app_of(engine, limits=ServeLimits(max_prompt_chars=100)), "POST", path, json=body), 400, param, param)


def test_the_page_loads_nothing_from_elsewhere(engine):
    app = app_of(engine)
    answer = ask(app, "GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text.replace("http://www.w3.org", "")
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")):
        assert ask(app, "GET", f"/page/{name}").headers["content-type"].startswith(kind)


def test_the_document_tells_of_every_error_and_of_nothing_that_is_not_so(engine, key_file):
    document = ask(app_of(engine), "GET", "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/version", "/metrics", "/tokenize", "/detokenize", "/"} == set(document["paths"])
    for operations in document["paths"].values():
        for operation in operations.values():
            assert set(map(str, TYPES)) <= set(operation["responses"])
            assert "422" not in operation["responses"] and "security" not in operation
            for status in map(str, TYPES):
                assert operation["responses"][status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    assert not {"ValidationError", "HTTPValidationError"} & set(document["components"]["schemas"])
    keyed = ask(app_of(engine, api_key_file=key_file), "GET", "/openapi.json", headers={"Authorization": "Bearer sk-one"}).json()
    assert keyed["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert {path for path, operations in keyed["paths"].items() if "security" not in next(iter(operations.values()))} == {"/", "/health"}
