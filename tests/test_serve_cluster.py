"""`minengine serve --prefill P --decode D` as a process: what it prints and measures, and that nothing of it is left when it has ended."""
import os
import re
import signal
import sys

import httpx
import pytest
from clusters import alive, shared_pools, until_gone
from test_serve_process import MEDIUM, SHORT, running_stream, serving

from minengine.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
APART = ("--prefill", "1", "--decode", "1", "--num-threads", "2", "--worker-timeout-s", "60")


def pids(server):
    return {name: int(pid) for name, pid in re.findall(r"worker (\w+): process (\d+)", "".join(server.lines))}


def metric(text, name, **labels):
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.split()[-1])
    raise AssertionError(f"{name} {labels} is not in {text}")


def test_prefill_and_decode_apart_answer_over_http_survive_a_kill_and_leave_nothing():
    with serving(*APART) as server:
        workers = pids(server)
        assert set(workers) == {"prefill0", "decode0"} and all(map(alive, workers.values()))
        assert "NIXL" in "".join(server.lines) or "shared memory" in "".join(server.lines)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "workers": {"prefill0": "up", "decode0": "up"}}
        whole = httpx.post(f"{server.url}/v1/completions", json=MEDIUM, timeout=120).json()["choices"][0]["text"]
        with running_stream(server.url, MEDIUM) as events:
            os.kill(workers["decode0"], signal.SIGKILL)
            assert httpx.get(f"{server.url}/health").status_code == 200
            *deltas, end = events
        assert end is None and deltas[-1]["choices"][0]["finish_reason"] == "length"
        assert whole.endswith("".join(event["choices"][0]["text"] for event in deltas))  # the first one was read by running_stream
        text = httpx.get(f"{server.url}/metrics").text
        assert metric(text, "minengine:worker_restarts_total", worker="decode0", role="decode") == 1
        assert metric(text, "minengine:worker_restarts_total", worker="prefill0") == 0 and metric(text, "minengine:worker_up", worker="decode0") == 1
        assert metric(text, "minengine:kv_asked_total", worker="decode0") >= metric(text, "minengine:kv_merged_total", worker="decode0") >= 0
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=120).status_code == 200
        server.signal(signal.SIGTERM)
        code, out, errors = server.end()
        assert code == 0 and "draining" in out, (code, out, errors)
        assert "worker decode0" in errors and "was ended by SIGKILL; another is started" in errors and "decode0 is up again" in errors and "Traceback" not in errors, errors
        until_gone(workers.values())


def test_a_second_signal_leaves_no_worker_and_no_shared_memory():
    with serving(*APART, "--transfer", "shm") as server:
        workers = pids(server)
        pools = shared_pools(workers.values())
        assert pools
        with pytest.raises(httpx.RemoteProtocolError), running_stream(server.url) as events:
            server.signal(signal.SIGTERM)
            server.wait_for("draining: 1 requests")
            server.signal(signal.SIGTERM)
            list(events)
        assert server.end()[0] == -signal.SIGTERM
        until_gone(workers.values())
        assert not [pool for pool in pools if os.path.exists(pool)]


@pytest.mark.parametrize("flags, words", [
    (("--prefill", "1"), "prefill=1: needs decode=1 or more"),
    (("--router-policy", "random"), "router_policy='random': is for workers, and there are none"),
    (("--kv-transfer", "push_layers"), "kv_transfer='push_layers': is for workers, and there are none"),
    (("--decode", "-1"), "decode=-1: use 0"),
    (("--decode", "1", "--decode-args", "{"), "decode_args='{': is no JSON"),
    (("--decode", "1", "--decode-args", "[1]"), "use an object of engine options"),
    (("--decode", "1", "--decode-args", '{"blocks": 1}'), "unknown option 'blocks'"),
    (("--decode", "1", "--router-policy", "best"), "router_policy='best': use one of random, round_robin, kv_aware"),
    (("--decode", "1", "--model", "no-such-model"), "no-such-model"),
])
def test_workers_that_cannot_be_are_refused_in_one_sentence(capfd, flags, words):
    assert main(["serve", "--model", "glm-mini", "--port", "0", *flags]) == 2
    out, errors = capfd.readouterr()
    assert words in errors and errors.count("\n") == 1 and not out
