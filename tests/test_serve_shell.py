"""The endpoints beside the two that generate: what is told, and what can be seen of the server."""
import asyncio
import logging
import threading

import pytest
from asking import CHAT, TYPES, app_of, ask, new_engine, refused, samples

import minengine
from minengine.async_llm import EngineDead, EngineDraining, EngineOverloaded
from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.request import CompletionOutput, RequestError, RequestOutput, Timeline
from minengine.serve.args import ServeArgs
from minengine.serve.limits import ServeLimits
from minengine.serve.metrics import ServerMetrics


@pytest.fixture(scope="module")
def engine():
    llm = new_engine()
    yield llm
    asyncio.run(llm.shutdown())


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
    (EngineDraining(), 503, None, {"retry-after": "1"}),
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


def test_the_document_tells_of_every_error_and_of_nothing_that_is_not_so(engine, tmp_path):
    document = ask(app_of(engine), "GET", "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/version", "/metrics", "/tokenize", "/detokenize", "/"} == set(document["paths"])
    for operations in document["paths"].values():
        for operation in operations.values():
            assert set(map(str, TYPES)) <= set(operation["responses"])
            assert "422" not in operation["responses"] and "security" not in operation
            for status in map(str, TYPES):
                assert operation["responses"][status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    assert not {"ValidationError", "HTTPValidationError"} & set(document["components"]["schemas"])
    (tmp_path / "keys").write_text("sk-one\n")
    keyed = ask(app_of(engine, api_key_file=str(tmp_path / "keys")), "GET", "/openapi.json", headers={"Authorization": "Bearer sk-one"}).json()
    assert keyed["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert {path for path, operations in keyed["paths"].items() if "security" not in next(iter(operations.values()))} == {"/", "/health"}
