"""What stands before the endpoints: who may ask, and how much."""
import asyncio
import json

import pytest
from asking import CHAT, app_of, ask, new_engine, refused

from minengine.config import ConfigError
from minengine.serve.auth import ApiKeys, is_loopback
from minengine.serve.limits import ServeLimits


@pytest.fixture(scope="module")
def engine():
    llm = new_engine()
    yield llm
    asyncio.run(llm.shutdown())


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
