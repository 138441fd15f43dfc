"""`minengine serve` as a process: how it starts, what it prints, and how it ends."""
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from serving import loaded

from minengine.async_llm import AsyncLLM
from minengine.cli import main
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.serve.args import ServeArgs
from minengine.serve.limits import ServeLimits
from minengine.serve.server import longest

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("--model", "glm-mini", "--max-model-len", "2048", "--block-size", "16", "--num-threads", "1")
LONG = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "temperature": 0}  # seconds, in which the tests have milliseconds to do
MEDIUM = {**LONG, "max_tokens": 600}
SHORT = {**LONG, "max_tokens": 2}
MARK = "a-private-word"


class Process:
    def __init__(self, process):
        self.process, self.lines = process, []
        ready = self.wait_for("http://")
        self.url = re.search(r"http://\S+", ready)[0]

    def wait_for(self, word):
        """The next line of its output that holds `word`."""
        while line := self.process.stdout.readline():
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"ended without '{word}': {self.lines} {self.process.stderr.read()}")

    def end(self):
        """(exit code, all of its output and errors), once it has ended by itself."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, "".join(self.lines) + out, err

    def signal(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)


def start(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    return subprocess.Popen([sys.executable, "-m", "minengine.cli", "serve", *ENGINE, "--port", "0", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment, **options)


@contextmanager
def serving(*arguments):
    process = start(*arguments)
    try:
        yield Process(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_stream(url, body=LONG):
    """An answer on its way: events as they come, after the first."""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        events = (json.loads(line[6:]) if line != "data: [DONE]" else None for line in answer.iter_lines() if line)
        next(events)
        yield events


def test_it_says_where_it_is_and_ends_with_0_and_no_word_of_a_prompt_is_printed():
    with serving("--served-model-name", "mini") as server:
        assert re.fullmatch(r"minengine: mini on http://127\.0\.0\.1:\d+ \(2048 tokens, 32 requests at once, 1024 waiting\)\n", server.lines[-1])
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "mini"
        assert httpx.post(f"{server.url}/v1/completions", json={**SHORT, "prompt": MARK}).status_code == 200
        for body in ({"prompt": MARK, MARK: 1}, {"prompt": MARK, "top_p": MARK}, {"prompt": MARK, "model": MARK}):
            assert httpx.post(f"{server.url}/v1/completions", json=body).is_client_error
        httpx.get(f"{server.url}/{MARK}")
        for nonsense in (f"{MARK}\r\n\r\n", f"GET /{MARK} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
                raw.sendall(nonsense.encode())
                assert raw.recv(4096).startswith(b"HTTP/1.1 4")
        with httpx.Client(base_url=server.url) as kept:
            for path in ("/", "/health", "/page/page.js", "/metrics"):
                assert kept.head(path).status_code == kept.get(path).status_code == 200
        server.signal()
        code, out, err = server.end()
    assert code == 0
    assert err == ""
    assert MARK not in out
    assert out.count("\n") == 2 and "draining: 0 requests" in out


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_what_runs_is_finished_and_nothing_new_is_begun(sig):
    with serving() as server, httpx.Client(base_url=server.url) as kept, running_stream(server.url, MEDIUM) as events:
        assert kept.get("/health").status_code == 200
        server.signal(sig)
        server.wait_for("draining: 1 requests")
        for client in (kept, httpx):  # a connection that was open, and a new one
            health = client.get("/health" if client is kept else f"{server.url}/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "draining")
            refused = client.post("/v1/completions" if client is kept else f"{server.url}/v1/completions", json=SHORT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        *_, last, done = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert done is None
        code, out, err = server.end()
    assert (code, err) == (0, "")


def test_when_its_time_is_over_what_runs_is_aborted_and_told_so():
    with serving("--drain-timeout-s", "0.1") as server, running_stream(server.url) as events:
        server.signal()
        *_, last, done = events
        assert last["error"]["type"] == "server_error"
        assert done is None
        code, out, err = server.end()
    assert (code, err) == (0, "")
    assert "has been aborted" in out


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(sig):
    with serving() as server:
        with pytest.raises(httpx.RemoteProtocolError), running_stream(server.url) as events:
            server.signal(sig)
            server.wait_for("draining: 1 requests")
            server.signal(sig)
            list(events)
        assert server.end()[0] == -sig


def refused(capsys, *arguments):
    """What the command says before it has loaded anything."""
    assert main(["serve", "--model", "no-such-model", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minengine: ") and err.count("\n") == 1, err
    return err


def test_every_flag_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = dict(re.match(r"(\S+?)(?:, --no-\S+)?\s(.*)", entry, re.DOTALL).groups() for entry in capsys.readouterr().out.split("\n  --")[1:])
    names = {f.name for kind in (EngineArgs, ServeArgs, ServeLimits) for f in fields(kind)} - {"engine", "limits"}
    assert set(told) == {name.replace("_", "-") for name in names}
    for flag, text in told.items():
        assert re.search(r"\w \S.*\(default: (?!None)", " ".join(text.split())), flag


def test_a_cache_that_cuts_the_length_is_named_with_its_flag():
    model, tokenizer = loaded("glm-mini")
    for options, told in (({"num_gpu_blocks_override": 8}, r"128 tokens, the whole cache, of the model's \d+: --num-gpu-blocks-override raises it"),
                          ({"kv_cache_memory_bytes": 1 << 20}, r"\d+ tokens, the whole cache, of the model's \d+: --kv-cache-memory-bytes raises it"),
                          ({"num_gpu_blocks_override": 8, "max_model_len": 100}, "100 tokens"), ({}, r"\d+ tokens")):
        engine = AsyncLLM(LLMEngine(EngineArgs(model="glm-mini", block_size=16, **options), model=model, tokenizer=tokenizer))
        assert re.fullmatch(told, longest(engine))
        asyncio.run(engine.shutdown())


def test_a_taken_port_is_found_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refused(capsys, "--port", str(port))
    assert f"port={port}: cannot be listened on at 127.0.0.1" in err and "--port" in err


@pytest.mark.parametrize("arguments, words", [
    (("--host", "no.such.host.invalid"), "host='no.such.host.invalid'"),
    (("--host", "192.0.2.1"), "cannot be listened on at 192.0.2.1"),
    (("--port", "70000"), "port=70000"),
    (("--max-n", "0"), "max_n=0"),
    (("--drain-timeout-s", "-1"), "drain_timeout_s=-1.0"),
    (("--drain-timeout-s", "nan"), "drain_timeout_s=nan"),
    (("--max-num-waiting", "0"), "max_num_waiting=0"),
    (("--served-model-name", ""), "served_model_name=''"),
    (("--tool-call-parser", "xml"), "use glm or llama"),
    (("--api-key-file", "/no/such/file"), "api_key_file='/no/such/file'"),
    (("--chat-template", "/no/such/file"), "chat_template='/no/such/file'"),
    (("--block-size", "17"), "block_size=17"),
    (("--port", "0"), "no-such-model"),
])
def test_a_bad_flag_is_one_sentence(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_an_open_address_without_keys_is_warned_of(tmp_path):
    (tmp_path / "keys").write_text("sk-one\n")
    for keys, warned in (((), True), (("--api-key-file", str(tmp_path / "keys")), False)):
        with serving("--host", "0.0.0.0", *keys) as server:
            server.signal()
            code, _, err = server.end()
        assert code == 0
        assert ("--api-key-file" in err) == warned
        assert err.count("\n") == warned


def test_without_its_packages_it_names_the_extra():
    code = "import sys; sys.modules['fastapi'] = None; from minengine.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "minengine: serve: the package fastapi is not installed; install it with: pip install 'minengine[serve]'\n"
