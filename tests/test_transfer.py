"""Real transfers between two processes, by both agents: what arrives is compared byte by byte, and every way to fail is tried on a live peer."""
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from test_pieces import GROUPED, LATENT, expected, pool

from minengine.config import KV_CACHE_LAYOUTS
from minengine.disagg.agents import PeerGone, TransferError, unpack, wait
from minengine.disagg.pieces import Pieces, pieces
from minengine.disagg.transfer import open_agent
from minengine.load_nixl import NixlMissing, load_nixl
from transfer_peer import LONG_S, ROOT, SIZE, Pair, PeerProcess, until

try:
    load_nixl()
except NixlMissing:
    KINDS = ["shm"]
else:
    KINDS = ["nixl", "shm"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    made = Pair(request.param, "pair")
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def doomed(request):
    """A pair whose other process the test may end."""
    made = Pair(request.param, "doomed")
    yield made
    made.close()


def random_bytes(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("kind", [LATENT, GROUPED], ids=["latent", "grouped"])
def test_rows_arrive_in_every_pair_of_layouts(pair, kind, sizes):
    blocks = [3, 7, 8, 9, 1, 10, 2, 5], [6, 0, 1, 2, 9, 8, 4, 3]
    there = random_bytes(1, SIZE)
    pair.other.ask("fill", there.tobytes())
    for (order, other_order), start in product(product(KV_CACHE_LAYOUTS, repeat=2), (0, 8)):
        src, dst = pool(order, sizes[0], kind), pool(other_order, sizes[1], kind)
        parts = pieces(src, blocks[0], dst, blocks[1], start=start, stop=24)
        here = random_bytes(2, dst.nbytes)
        pair.storage[: dst.nbytes] = torch.from_numpy(here)
        pair.storage[dst.nbytes:] = 0
        pair.done(transfer := pair.read(parts))
        wanted = expected(src, blocks[0], there[: src.nbytes], dst, blocks[1], here, start, 24)
        assert np.array_equal(pair.storage[: dst.nbytes].numpy(), wanted), (order, other_order, start)
        assert not pair.storage[dst.nbytes:].any(), "nothing beyond the pool may change"
        report = pair.agent.telemetry(transfer)
        assert (report.asked, report.merged, report.nbytes) == (parts.asked, parts.merged, parts.total_bytes)
        assert report.descriptors == parts.merged and report.seconds > 0


@pytest.mark.parametrize("orders", [("LBHNC", "BLHNC"), ("BHLNC", "LBNHC"), ("BLNHC", "BLNHC")], ids="-".join)
def test_rows_are_written_layer_by_layer(pair, orders):
    """What `push_layers` does: each layer's rows of a chunk as soon as they are there, indexer keys with their layer."""
    src, dst = pool(orders[0], 4, LATENT), pool(orders[1], 8, LATENT)
    blocks = [2, 9, 4, 1, 7], [3, 8, 5]
    here, there = random_bytes(3, src.nbytes), random_bytes(4, dst.nbytes)
    pair.storage[: src.nbytes] = torch.from_numpy(here)
    pair.other.ask("fill", there.tobytes())
    sent = [pair.write(pieces(src, blocks[0], dst, blocks[1], start=start, stop=stop, layers=[layer], indexer_layers=[layer] if layer < 2 else []),
                       notify=f"{layer} {stop}".encode())
            for start, stop in ((0, 7), (7, 18)) for layer in range(src.num_layers)]
    assert wait(pair.agent, sent, LONG_S) == "DONE"
    assert all(pair.agent.release(transfer) for transfer in sent)
    told = []
    until(lambda: told.extend(pair.other.ask("notifications")) or len(told) >= len(sent))
    assert sorted(told) == sorted((pair.agent.name, f"{layer} {stop}".encode()) for layer in range(3) for stop in (7, 18))
    wanted = expected(src, blocks[0], here, dst, blocks[1], there, 0, 18)
    assert pair.other.ask("content")[: dst.nbytes] == wanted.tobytes()


def test_messages_come_in_order_and_from_workers_never_connected_to(pair):
    assert pair.other.ask("notifications") == []
    for number in range(200):
        pair.agent.notify(pair.peer, str(number).encode())
    told = []
    until(lambda: told.extend(pair.other.ask("notifications")) or len(told) >= 200)
    assert told == [("pair-here", str(number).encode()) for number in range(200)]
    pair.done(pair.read(Pieces(*(np.zeros(0, np.int64),) * 3, asked=0), notify=b"nothing to read"))
    assert until(lambda: pair.other.ask("notifications")) == [("pair-here", b"nothing to read")]
    assert pair.other.ask("connect", pair.agent.metadata()) == "pair-here"
    pair.other.ask("notify", "pair-here", bytes(range(256)))
    assert until(pair.agent.notifications) == [("pair-there", bytes(range(256)))], "messages may hold any byte"


def test_memory_that_is_not_registered_is_refused_and_newer_memory_needs_newer_metadata(pair):
    agent = pair.agent
    with pytest.raises(TransferError, match="not registered here"):
        pair.read(Pieces.one(4), local=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(TransferError, match="pieces reach byte .* that are registered here"):
        pair.read(Pieces.one(8, dst=SIZE - 4))
    with pytest.raises(TransferError, match="has registered no memory that holds"):
        pair.read(Pieces.one(8, src=SIZE - 4))
    with pytest.raises(TransferError, match="begins before"):
        pair.read(Pieces.one(8, src=-4))
    with pytest.raises(TransferError, match="worker 'nobody' is not connected"):
        agent.read("nobody", pair.address, Pieces.one(4))
    metadata, address = pair.other.ask("allocate", 4096)
    with pytest.raises(TransferError, match="metadata is older than"):
        agent.read(pair.peer, address, Pieces.one(4096))
    assert agent.connect(metadata) == pair.peer
    pair.other.ask("fill", b"\x07" * 4096, 1)
    pair.storage.zero_()
    pair.done(agent.read(pair.peer, address, Pieces.one(4096)))
    assert int(pair.storage.sum()) == 7 * 4096
    word = agent.allocate(8)
    pair.done(agent.read(pair.peer, address, Pieces.one(8), local=word))
    assert word.tolist() == [7] * 8


def test_metadata_is_checked(pair):
    for junk in (b"", b"junk", b"{}\njunk", b'{"name": 1}\n'):
        with pytest.raises(TransferError, match="no agent's metadata"):
            pair.agent.connect(junk)
    other = "shm" if pair.agent.kind == "nixl" else "nixl"
    with pytest.raises(TransferError, match=f"moves its cache by {other} and this one by {pair.agent.kind}"):
        pair.agent.connect(b'{"name": "x", "kind": "%s", "born": "1", "regions": []}\n' % other.encode())
    assert unpack(pair.agent.metadata(), pair.agent.kind).name == pair.agent.name


def test_a_killed_peer_is_found_gone_and_its_name_can_be_used_again(doomed):
    doomed.done(doomed.read(Pieces.one(SIZE)))
    doomed.other.kill()
    def attempt(start):
        transfer = start()
        if wait(doomed.agent, transfer, LONG_S) == "ERR":
            assert doomed.agent.release(transfer)
            raise transfer.error
        return doomed.agent.release(transfer) and None
    for start in (lambda: doomed.read(Pieces.one(SIZE)), lambda: doomed.write(Pieces.one(64))):
        with pytest.raises(PeerGone, match="worker 'doomed-there' is gone"):
            attempt(start)
    with pytest.raises(PeerGone, match="is gone"):
        until(lambda: doomed.agent.notify(doomed.peer, b"x"))
    again = PeerProcess("doomed-there", doomed.agent.kind)
    try:
        metadata, doomed.address = again.ask("allocate", SIZE)
        assert doomed.agent.connect(metadata) == doomed.peer
        again.ask("fill", b"\x05" * SIZE)
        doomed.done(doomed.read(Pieces.one(SIZE)))
        assert torch.all(doomed.storage == 5)
    finally:
        again.close()
    doomed.agent.disconnect(doomed.peer, dead=True)
    doomed.agent.disconnect(doomed.peer)
    with pytest.raises(TransferError, match="is not connected"):
        doomed.read(Pieces.one(8))


@pytest.mark.skipif("nixl" not in KINDS, reason="needs NIXL (pip install 'minengine[nixl]')")
def test_memory_is_not_let_go_while_a_peer_stands_still():
    """NIXL's own release "succeeds" here, and the bytes arrive when the peer goes on: so ours says no until then."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}  # over sockets a peer has to do its part
    subprocess.run([sys.executable, "-c", "import transfer_peer; transfer_peer.stand_still()"], env=environment, check=True, timeout=5 * LONG_S)


def test_opening_an_agent(monkeypatch):
    with pytest.raises(TransferError, match="use auto, nixl or shm"):
        open_agent("x", "rdma")
    import minengine.disagg.transfer as transfer

    def missing():
        raise NixlMissing("NIXL is not installed (pip install 'minengine[nixl]')")
    monkeypatch.setattr(transfer, "load_nixl", missing)
    agent = open_agent("x")
    assert agent.kind == "shm"
    assert agent.describe() == "x: memory shared by the processes of this machine, not NIXL (NIXL is not installed (pip install 'minengine[nixl]'))"
    agent.close()
    with pytest.raises(TransferError, match="NIXL is not installed"):
        open_agent("x", "nixl")


def test_shared_memory_without_nixl_has_its_limits_and_leaves_nothing_behind(tmp_path, monkeypatch):
    import minengine.disagg.shm as shm

    agent = shm.ShmAgent("limits")
    folder = agent._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(TransferError, match="take it from allocate"):
        agent.register(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(TransferError, match="with NIXL only"):
        agent.allocate(8, "cuda")
    with pytest.raises(TransferError, match="cannot be had"):
        agent.allocate(1 << 60)
    with pytest.raises(TransferError, match="too long"):
        agent.connect(agent.metadata())
        agent.notify("limits", bytes(shm.LARGEST_MESSAGE + 1))
    killed = PeerProcess("killed", "shm")
    left = shm.Path(killed.ask("allocate", 4096)[0].split(b'"')[-2].decode()).parent
    killed.kill()
    assert left.exists()
    shm.ShmAgent("sweeper").close()
    assert not left.exists() and folder.exists(), "what a killed process left goes, what is in use stays"
    agent.close()
    agent.close()
    assert not folder.exists()


@pytest.mark.skipif("nixl" not in KINDS, reason="needs NIXL (pip install 'minengine[nixl]')")
def test_nixl_leaves_the_logging_of_others_alone():
    script = """if 1:
        import logging, sys
        log = open(sys.argv[1], "w")
        logging.basicConfig(stream=log, level=logging.INFO, format="%(name)s %(message)s")
        handler = logging.FileHandler(sys.argv[2], "w"); logging.getLogger("mine").addHandler(handler)
        logging.getLogger("mine").info("before")
        from minengine.disagg.transfer import open_agent
        from minengine.disagg.agents import TransferError
        agent = open_agent("quiet", "nixl"); agent.allocate(64)
        try: agent.connect(b'{"name": "a", "kind": "nixl", "born": "", "regions": []}\\njunk')
        except TransferError as error: assert "could not connect to worker 'a'" in str(error), error
        logging.getLogger("mine").info("after")
        assert logging.raiseExceptions
        import os; assert "NIXL_LOG_LEVEL" not in os.environ
        assert logging.getLogger("nixl").level >= logging.WARNING
        log.flush(); handler.flush()
    """
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("root", "mine")]
        environment = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
        done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True, timeout=LONG_S,
                              env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])})
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        root, mine = (open(file).read() for file in files)
        assert "before" in mine and "after" in mine and "mine after" in root and "Initialized" not in root
