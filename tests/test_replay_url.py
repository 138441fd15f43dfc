"""A replay against a URL: our own server, and peers that take less."""
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving import random_model, server

from minengine.config import ConfigError
from minengine.replay.drive import replay
from minengine.replay.url import WORDS, UrlTarget
from minengine.tokenizer import load_tokenizer
from minengine.workload.closed_loop import ClosedLoop
from minengine.workload.sessions import Session, TraceRequest


def session(name, turns=3):
    """Prompts that grow by two blocks of 16 a turn, without gaps."""
    return Session(name, 16, tuple(TraceRequest(float(i), 32 * i + 35, 4, tuple(range(2 * i + 2)), 16, 0.1, 0.0) for i in range(turns)))


def records(url, sessions, **options):
    target = UrlTarget(url, **options)
    return target, replay(ClosedLoop(iter(sessions), concurrency=2), target, 600.0)


def test_our_own_server_takes_token_ids_of_exactly_the_traces_lengths():
    with server(**random_model()) as ours:
        target, found = records(ours.base_url, [session("a"), session("b")])
    assert (target.asks, target.ignores_eos, found.stopped) == ("tokens", True, None)
    assert sorted((r.session, r.number, r.input_tokens, r.output_tokens, r.cached_tokens) for r in found.records) == [
        (name, i, 32 * i + 35, 4, 32 * i) for name in ("a#0", "b#0") for i in range(3)]
    assert all(r.answered and r.arrival_s <= r.first_token_s <= r.end_s and r.admitted_s is None for r in found.records)


def test_a_prompt_that_the_server_refuses_fails_alone():
    long = Session("a", 16, (TraceRequest(0.0, 35, 2, (0, 1), 16), TraceRequest(1.0, 5000, 2, tuple(range(312)), 16, None, 0.0),
                             TraceRequest(2.0, 35, 2, (0, 1), 16, None, 0.0)))
    with server(**random_model()) as ours:
        _, found = records(ours.base_url, [long])
    assert [r.error is None for r in found.records] == [True, False, True] and "the server answers 400: prompt" in found.records[1].error


# --- peers ---------------------------------------------------------------------------------------------------

class Peer(BaseHTTPRequestHandler):
    """A server that answers each request with what `answer` makes of its body: a status and events, or bytes that are none."""

    def do_GET(self):
        self._send(200, "application/json", json.dumps({"data": [{"id": "peer"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((body, self.headers.get("X-Session-Id")))
        status, events = self.server.answer(body)
        if status is None:
            self.connection.shutdown(socket.SHUT_RDWR)
        elif status != 200:
            self._send(status, "application/json", json.dumps({"error": {"message": events}}).encode())
        else:
            self._send(200, "text/event-stream", b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events))

    def _send(self, status, kind, data):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def peer(answer):
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    serving.answer, serving.bodies = answer, []
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_address[1]}", serving.bodies
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()


def token(text="x"):
    return {"choices": [{"index": 0, "text": text}]}


def test_a_peer_without_token_ids_and_ignore_eos_gets_text_and_its_own_count_holds():
    def answer(body):
        if isinstance(body["prompt"], list):
            return 422, "prompt must be a text"
        if "ignore_eos" in body:
            return 400, "ignore_eos is unknown"
        n = len(body["prompt"].split()) + 1
        return 200, [*[token()] * 3, {"choices": [], "usage": {"prompt_tokens": n, "completion_tokens": 3, "prompt_tokens_details": None}}, b"[DONE]"]

    with peer(answer) as (url, bodies):
        target, found = records(url + "/v1", [session("a")])
    assert (target.asks, target.ignores_eos, target.model) == ("text", False, "peer")
    assert [(r.input_tokens, r.output_tokens, r.error) for r in found.records] == [(32 * i + 36, 3, None) for i in range(3)]
    prompts = [body["prompt"] for body, name in bodies if name == "a#0"]
    assert len(prompts) == 3 and all(later.startswith(" ".join(earlier.split()[:32])) for earlier, later in zip(prompts, prompts[1:]))
    assert all(set(prompt.split()) <= set(WORDS) for prompt in prompts)


def test_a_peer_that_counts_nothing_gets_a_token_for_each_event():
    with peer(lambda body: (200, [*[token()] * body["max_tokens"], b"[DONE]"])) as (url, _):
        _, found = records(url, [session("a")])
    assert [(r.input_tokens, r.output_tokens, r.cached_tokens) for r in found.records] == [(32 * i + 35, 4, 0) for i in range(3)]


@pytest.mark.parametrize("events, complaint", [
    ([token(), {"error": {"message": "out of memory"}}], "out of memory"), ([b"{broken"], "JSONDecodeError"), ([b"[1, 2]"], "ValueError: an event of the stream is no JSON object: [1, 2]"), ([b"[DONE]"], "no token"),
    ([{"choices": [], "usage": {"prompt_tokens": 5}}], "completion_tokens"),
])
def test_an_answer_that_goes_wrong_is_recorded_and_the_session_goes_on(events, complaint):
    wrong = iter([False, True, False])

    def answer(body):
        if body["max_tokens"] == 1 or not next(wrong):  # how it may be asked is tried with one token
            return 200, [token(), b"[DONE]"]
        return 200, events

    with peer(answer) as (url, _):
        _, found = records(url, [session("a")])
    assert [r.error is None for r in found.records] == [True, False, True] and complaint in found.records[1].error


def test_a_server_that_goes_away_is_told_of_each_time():
    with peer(lambda body: (200, [token(), b"[DONE]"])) as (url, _):
        target = UrlTarget(url)
    found = replay(ClosedLoop([session("a")], concurrency=1), target, 600.0)
    assert "requests in a row have failed" in found.stopped and all("the connection failed" in r.error for r in found.records if r.end_s is not None)


@pytest.mark.parametrize("answer, complaint", [
    (lambda body: (404, "there is no such path"), "does not answer /completions as a stream .*404: there is no such path"),
    (lambda body: (200, [{"error": "no"}]), "does not answer /completions"),
    (lambda body: (200, [b"[1, 2]"]), r"an event of the stream is no JSON object: \[1, 2\]"), (lambda body: (200, [b"5"]), "no JSON object: 5"),
    (lambda body: (None, None), "the connection failed .RemoteDisconnected"),
])
def test_a_server_that_answers_no_completions_is_refused(answer, complaint):
    with peer(answer) as (url, _), pytest.raises(ConfigError, match=complaint):
        UrlTarget(url)


def test_an_address_where_nobody_is_is_refused():
    with peer(lambda body: (200, [])) as (url, _):
        pass
    with pytest.raises(ConfigError, match="the connection failed"):
        UrlTarget(url)
    with pytest.raises(ConfigError, match="is no address"):
        UrlTarget("ftp://x")


def test_a_word_is_a_token_of_our_own_model():
    tokenizer = load_tokenizer("smollm2")
    assert len(set(WORDS)) == len(WORDS) and all(len(tokenizer.encode(" " + word)) == 1 for word in WORDS)
