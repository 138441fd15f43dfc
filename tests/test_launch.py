"""Where workers run, as far as no cluster is needed: shares of threads, addresses, who may connect, the clocks of other machines."""
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.disagg.clocks import RemoteClock, set_back, set_forward
from minengine.disagg.launch import open_launcher
from minengine.disagg.messages import Abort, AddRequest, Delta, Ping, Pong, Report, Resumed
from minengine.disagg.plan import ClusterArgs, plan
from minengine.disagg.ray_launch import accept_worker, largest_share
from minengine.disagg.ray_node import CLOCK_ASKS
from minengine.prompt import Prompt
from minengine.request import Resume, SamplingParams, Timeline
from minengine.serve.args import ServeArgs

PATIENCE_S = 30.0


# --- what is asked for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1:6379", "head.example:6379", "[fd00::1]:6379", "auto"])
def test_addresses_as_ray_has_them(address):
    assert ServeArgs(decode=2, cluster=address).cluster_args.cluster == address


@pytest.mark.parametrize("wrong, words", [
    ({"cluster": "local"}, "cluster='local': use ray://HOST:PORT, HOST:PORT or auto"), ({"cluster": ""}, "cluster=''"), ({"cluster": "http://a:1"}, "cluster='http"),
    ({"cluster": 5}, "cluster=5"), ({"cluster": "auto", "prefill": 1, "transfer": "shm"}, "transfer='shm': nodes of a cluster share no memory; use nixl"),
])
def test_a_place_that_is_none_is_refused_in_one_sentence(wrong, words):
    with pytest.raises(ConfigError, match=words):
        ClusterArgs(**wrong)


def test_a_cluster_is_for_workers():
    with pytest.raises(ConfigError, match="cluster='auto': is for workers, and there are none; use decode=1 or more"):
        ServeArgs(cluster="auto")


def test_between_nodes_kv_moves_by_nixl_or_not_at_all():
    assert [start.transfer for start in plan(EngineArgs(), ClusterArgs(prefill=1, cluster="auto"))] == ["nixl", "nixl"]
    assert [start.transfer for start in plan(EngineArgs(), ClusterArgs(decode=2, cluster="auto"))] == [None, None]


def test_one_machine_needs_no_ray_and_does_not_import_it():
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['ray'] = None; import minengine.serve.server, minengine.disagg.front; "
                           "from minengine.disagg.launch import open_launcher; open_launcher(None).close()"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_ray_a_cluster_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"cluster='auto': needs Ray, here and on every node: pip install 'minengine\[ray\]'"):
        open_launcher("auto")


def test_where_no_cluster_is_nothing_is_waited_for():
    pytest.importorskip("ray", reason="pip install 'minengine[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:%d" % taken.getsockname()[1]
    for address in (address, f"ray://{address}"):
        with pytest.raises(ConfigError, match=f"cluster='{address}': nothing answers there .*; start Ray with `ray start --head`"):
            open_launcher(address)


# --- threads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores, count, share", [([16, 16], 2, 16), ([16, 16], 4, 8), ([16, 16], 3, 8), ([16, 4], 2, 8), ([16, 4], 3, 5), ([2, 1], 3, 1), ([1], 4, 1),
                                                 ([], 1, 1)])
def test_each_worker_gets_as_many_threads_as_let_all_find_a_place(cores, count, share):
    assert largest_share(cores, count) == share


# --- who may connect ------------------------------------------------------------------------------------------------------


class Node(threading.Thread):
    """What comes from a node: `ahead_s` more on its clock than here."""

    def __init__(self, address, key, ahead_s=0.0):
        super().__init__(daemon=True)
        self.address, self.key, self.ahead_s = address, key, ahead_s
        self.start()

    def run(self):
        with Connection(socket.create_connection(self.address).detach()) as connection:
            try:
                answer_challenge(connection, self.key)
                deliver_challenge(connection, self.key)
                for _ in range(CLOCK_ASKS):
                    connection.recv_bytes()
                    connection.send_bytes(struct.pack("<d", time.perf_counter() + self.ahead_s))
            except Exception:  # sent away
                return
            connection.send(connection.recv() + 1)  # what follows is between the front and the worker


def test_only_who_has_the_key_gets_the_connection(monkeypatch):
    monkeypatch.setattr("minengine.disagg.ray_launch.STRANGER_S", 0.2)
    clock = RemoteClock()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address), socket.create_connection(address) as speaks, socket.create_connection(address) as leaves:
            speaks.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            leaves.close()
            strangers = [Node(address, b"another key" * 3) for _ in range(2)]
            node = Node(address, b"the key" * 5, ahead_s=5000.0)
            link = accept_worker(listening, b"the key" * 5, clock, PATIENCE_S)
        with link, Connection(link.fileno()) as connection:
            assert abs(clock.ahead_s - 5000.0) <= clock.error_s < PATIENCE_S
            connection.send(41)
            assert connection.recv() == 42
            link.detach()
    for thread in (node, *strangers):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_node_that_does_not_come_is_not_waited_for_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert accept_worker(listening, b"the key", RemoteClock(), 0.1) is None


# --- clocks ---------------------------------------------------------------------------------------------------------------


def test_the_answer_that_came_back_fastest_says_how_far_a_clock_is_ahead():
    clock = RemoteClock()
    clock.heard(10.0, 1010.9, 11.0)  # off by up to 0.5
    assert (clock.ahead_s, clock.error_s) == (pytest.approx(1000.4), 0.5)
    clock.heard(20.0, 1020.001, 20.002)  # theirs was read in between: 1000 +- 0.001
    assert (clock.ahead_s, clock.error_s) == (pytest.approx(1000.0), pytest.approx(0.001))
    clock.heard(21.0, 1021.4, 21.5)  # slower: nothing is learnt from it
    assert clock.ahead_s == pytest.approx(1000.0)
    clock.heard(1020.0, 2020.06, 1020.1)  # 0.05, and by now the other may be off by 0.1: they run apart
    assert clock.ahead_s == pytest.approx(1000.01)


def test_stamps_are_on_the_workers_clock_there_and_on_the_fronts_here():
    timeline = Timeline(arrival_s=1.0, routed_s=1.5, token_s=[2.0, 3.0])
    request = AddRequest(key="k", prompt=Prompt(None, [1], None), params=SamplingParams(), cache_salt=None, timeline=timeline,
                         resume=Resume(output_token_ids=(7,), timeline=timeline))
    there = set_forward(request, 100.0)
    for moved in (there.timeline, there.resume.timeline, set_forward(Resumed("a", request), 100.0).request.timeline):
        assert (moved.arrival_s, moved.routed_s, moved.token_s, moved.admitted_s, moved.num_preemptions) == (101.0, 101.5, [102.0, 103.0], None, 0)
    assert request.timeline.arrival_s == 1.0 and timeline.token_s == [2.0, 3.0]  # ours is as it was
    report = Report([Delta("k", "x", [5], [104.0], 0), Delta("k", "y", [6], [105.0], 0, timeline=there.timeline)])
    first, second = set_back(report, 100.0).deltas
    assert (first.token_s, first.timeline, second.token_s, second.timeline) == ([4.0], None, [5.0], timeline)


def test_what_has_no_stamps_stays_as_it_is():
    for message in (Abort("k"), Ping(3), Pong(3)):
        assert set_forward(message, 5.0) is message and set_back(message, 5.0) is message
