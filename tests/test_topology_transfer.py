"""Prefill on ranks of one topology, decode on ranks of another: one rank's tokens, exactly the pieces that the formula says, and what goes wrong on one
rank goes wrong for all of them and for nobody else."""
import itertools
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from minengine.arithmetic import kv_copies, taken
from minengine.config import ConfigError
from minengine.engine_args import EngineArgs
from minengine.disagg.kv_io import PART_BYTES
from minengine.disagg.opening import weights_fingerprint
from minengine.disagg.plan import ClusterArgs, plan
from minengine.disagg.source import check_pools
from minengine.kv.fingerprint import joint_fingerprint, source_sums
from minengine.model.weights import open_model
from rank_workers import RankWorker, answered, begun, gate, put_off, small_parts
from test_connector_faults import Hand
from test_parallel_engine import TIE, alone, prompt
from tiny_directories import write_tiny
from workers import PATIENCE_S, so_far

torch.set_num_threads(1)
PREFILL = ["TP1", "TP2", "DEP2", "TP2+DCP2"]
DECODE = ["TP1", "TP2", "DEP2", "TP2+DCP2"]
families = itertools.count()  # of prompts: those of one are cached where they were


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny", "glm", n_routed_experts=7))


@pytest.fixture(scope="module")
def worker(directory):
    """Workers by topology and role, started when they are first asked for."""
    known = {}

    def ask(topology, role, **options):
        key = topology, role, *options.items()
        if key not in known:
            known[key] = RankWorker(directory, topology, role, load_admission="event" if topology in ("TP2", "TP1") else "poll", **options)
        return known[key]

    yield ask
    for one in known.values():
        one.close()


def assert_same(directory, tokens, length, family, max_tokens=8):
    """One rank's tokens, or as good as that: ranks add up in another order."""
    want, margins = alone(directory, length, family, max_tokens)
    assert len(tokens) == len(want)
    at = next((i for i, (a, b) in enumerate(zip(tokens, want)) if a != b), None)
    assert at is None or margins[at] < TIE, (at, tokens, want)


def moved(d, tokens, start=0, *, held, size=16):
    """What the formula says that each rank of `d` reads: (rank, ranks that it reads from, pieces, bytes)."""
    layout = d.engine.kv.kv_layout
    found = []
    ranks = d.shape.tensor
    for rank in range(ranks):
        parts = [part for part in taken(held, d.pool_name, rank, layout.order, tokens, size, layout.num_layers, layout.row_bytes, start=start,
                                        indexer_planes=layout.num_indexer_layers, indexer=layout.indexer_bytes) if part.pieces]
        found.append((rank, tuple(part.source for part in parts), sum(part.pieces for part in parts), sum(part.nbytes for part in parts)))
    return found


def pair(worker, held, kept):
    agent = "nixl" if (held, kept) == ("DEP2", "TP2") else "shm"
    if agent == "nixl":
        pytest.importorskip("nixl")
    return worker(held, "p", agent=agent), worker(kept, "d", agent=agent)


@pytest.mark.parametrize("held, kept", [pair for pair in product(PREFILL, DECODE) if pair != ("TP1", "TP1")])
def test_every_pair_gives_one_ranks_tokens_and_moves_what_the_formula_says(worker, directory, held, kept):
    p, d = pair(worker, held, kept)
    for length in (1, 17, 70):
        for rank, decoder_rank in {(0, 0), (p.shape.data - 1, d.shape.data - 1)}:  # of ranks with requests of their own, the first and the last
            family = next(families)
            tokens = answered(p, d, f"pair {family}", prompt(length, family), rank, decoder_rank)
            assert_same(directory, tokens, length, family)
            facts, = d.take_facts(decoder_rank)
            assert (facts.outcome, facts.num_tokens, facts.kind) == ("landed", length, "pull"), facts
            assert [(one.rank, one.sources, one.asked, one.nbytes) for one in facts.ranks] == moved(d, length, held=p.pool_name)
            assert (facts.asked, facts.nbytes) == tuple(sum(getattr(one, name) for one in facts.ranks) for name in ("asked", "nbytes"))
            assert facts.nixl_descriptors == facts.merged  # the agent's own count
    p.clean(), d.clean()


@pytest.mark.parametrize("kept", DECODE)
def test_as_many_copies_come_as_the_topology_keeps(worker, kept):
    """Of 32 tokens, which fill blocks on every rank."""
    p, d = worker("TP1", "p", agent="shm"), worker(kept, "d", agent="shm")
    answered(p, d, f"copies {kept}", prompt(32, next(families)))
    facts, = d.take_facts()
    one = 2 * p.engine.kv.kv_layout.block_bytes
    assert facts.nbytes == one * kv_copies(kept)
    p.clean(), d.clean()


def test_what_the_ranks_have_already_is_not_moved_again(worker, directory):
    p, d = worker("TP2", "p", agent="shm"), worker("TP2+DCP2", "d", agent="shm")
    family = next(families)
    for turn in range(2):
        assert_same(directory, answered(p, d, f"turn {turn}", prompt(70, family)), 70, family)
        facts, = d.take_facts()
        assert facts.num_tokens == (6 if turn else 70)
        assert [(one.rank, one.sources, one.asked, one.nbytes) for one in facts.ranks] == moved(d, 70, 64 if turn else 0, held="TP2")
    p.clean(), d.clean()


def test_pools_of_different_blocks_and_layouts(worker, directory):
    p = worker("TP2+DCP2", "p", agent="shm", block_size=32, kv_cache_layout="BLHNC")
    d = worker("TP2", "d", agent="shm")
    family = next(families)
    assert_same(directory, answered(p, d, "other blocks", prompt(70, family)), 70, family)
    facts, = d.take_facts()
    assert facts.outcome == "landed"
    p.clean(), d.clean()


def test_heads_go_to_the_ranks_that_have_them(tmp_path):
    """Of grouped heads a rank keeps its own, and reads them from whoever has them."""
    model = str(write_tiny(tmp_path / "llama", "llama"))
    workers = p2, d1, p1, d2 = [RankWorker(model, topology, role) for topology, role in (("TP2", "p"), ("TP1", "d"), ("TP1", "p"), ("TP2", "d"))]
    ids = prompt(50, 1)
    try:
        one = p1.engine.kv.kv_layout
        found = [answered(p2, d1, "r", [i % 190 + 1 for i in ids]), answered(p1, d2, "r", [i % 190 + 1 for i in ids])]
        p1.outputs.clear()
        p1.add("alone", [i % 190 + 1 for i in ids], 8)
        p1.until(lambda: p1.finished("alone"))
        assert found == [p1.tokens("alone")] * 2
        for d, held, kept in ((d1, "TP2", "TP1"), (d2, "TP1", "TP2")):
            facts, = d.take_facts()
            for rank in facts.ranks:
                parts = taken(held, kept, rank.rank, one.order, 50, 16, one.num_layers, one.row_bytes, kv_heads=2)
                assert (rank.sources, rank.asked, rank.nbytes) == (tuple(part.source for part in parts), sum(part.pieces for part in parts), sum(part.nbytes for part in parts))
        for each in workers:
            each.clean()
    finally:
        for each in workers:
            each.close()


def test_many_requests_at_once_on_ranks_of_their_own(worker, directory):
    """Both sides are data-parallel; requests go to whoever has the fewest, and no step waits for rows."""
    p, d = worker("DEP2", "p", agent="shm"), worker("DEP2", "d", agent="shm")
    asked = {f"many {i}": (20 + 9 * i, next(families)) for i in range(6)}
    for name, what in asked.items():
        p.add(name, prompt(*what), hold=True)
    waiting = set(asked)
    while waiting:
        p.turn(), d.turn()
        for name in waiting & p.held.keys():
            waiting.remove(name)
            d.add(name, prompt(*asked[name]), resume=so_far(p, name), source=p.held.pop(name))
    d.until(lambda: all(map(d.finished, asked)))
    for name, what in asked.items():
        assert_same(directory, p.tokens(name) + d.tokens(name), *what)
    p.clean(), d.clean()
    assert {fact.outcome for rank in (0, 1) for fact in d.take_facts(rank)} == {"landed"}


def as_a_worker_does(d, done):
    """Step only while there is something to compute, and sleep until somebody wakes."""
    d.until(lambda: d.engine.idle or done(), turn=True)
    while not done():
        assert d.woken.wait(PATIENCE_S)
        d.woken.clear()
        d.connector.poll()
        while not d.engine.idle:
            d.turn()


def test_ranks_that_only_wait_for_rows_compute_nothing_until_they_are_there(worker, directory):
    """The request is another rank's than the scheduler's that can be seen here; it is long enough for several steps."""
    p, d = worker("TP1", "p", agent="shm"), worker("DEP2", "d", agent="shm")
    family = next(families)
    source, resume = p.prefilled("slow", prompt(40, family))
    d.engine.group.call(gate, 1, {"READ"}, ())
    before = [rank.forwards for rank in d.engine.counts().ranks]
    d.add("slow", prompt(40, family), resume=resume, source=source, data_parallel_rank=1)
    d.until(lambda: d.engine.idle)
    assert [rank.forwards - old for rank, old in zip(d.engine.counts().ranks, before)] == [1, 1]  # the step in which they found that out
    d.woken.clear()
    d.engine.group.call(gate, 1, (), ())
    as_a_worker_does(d, lambda: d.finished("slow"))
    assert_same(directory, p.tokens("slow") + d.tokens("slow"), 40, family)
    assert [facts.outcome for facts in d.take_facts(1)] == ["landed"]
    p.clean(), d.clean()


def test_ranks_that_only_keep_rows_compute_nothing(worker):
    p = worker("DEP2", "p", agent="shm")
    p.prefilled("kept", prompt(150, next(families)), rank=1)  # 64 tokens a step, on a rank whose steps nobody else has a reason for
    assert p.engine.idle and p.engine.step() == []
    p.connector.release("kept")
    p.clean()


# --- what goes wrong on one rank -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(directory):
    """A prefill worker of one rank and a decoder of two, each with a clock that stands still until it is set."""
    p = RankWorker(directory, "TP1", "p", clock=Hand(), num_gpu_blocks_override=14)
    d = RankWorker(directory, "TP2", "d", clock=Hand(), load_admission="event", num_gpu_blocks_override=14)
    yield p, d
    d.close(), p.close()


def hand_over(p, d, name, family):
    source, resume = p.prefilled(name, prompt(60, family))
    d.add(name, prompt(60, family), resume=resume, source=source)


def rank_1(d, **how):
    d.engine.group.call(gate, 1, *(how.get(name, ()) for name in ("shut", "fail")))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_on_one_rank_is_computed_by_all(apart, directory, rank):
    p, d = apart
    if rank:
        rank_1(d, fail={"READ"})
    else:
        d.agent.fail = {"READ"}
    hand_over(p, d, f"fails {rank}", 10 + rank)
    d.until(lambda: d.finished(f"fails {rank}"))
    d.agent.fail = set()
    rank_1(d)
    facts, = d.take_facts()
    assert facts.outcome == "failed" and facts.error == ("rank 1: " if rank else "") + "the READ was made to fail"
    assert_same(directory, p.tokens(f"fails {rank}") + d.tokens(f"fails {rank}"), 60, 10 + rank)
    p.clean(), d.clean()


def test_a_read_of_one_rank_that_does_not_end_is_given_up_and_its_blocks_wait_for_it(apart, directory):
    p, d = apart
    rank_1(d, shut={"READ"})
    hand_over(p, d, "hangs", 20)
    d.until(lambda: sum(d.engine.group.call(put_off)), turn=False)
    d.engine.clock.now += 61
    d.until(lambda: d.finished("hangs"))
    assert_same(directory, d_tokens(p, d, "hangs"), 60, 20)
    assert [facts.outcome for facts in d.take_facts()] == ["timeout"]
    assert len(d.scheduler.loads.quarantine) == 1 and d.engine.num_free_blocks < 14
    hand_over(p, d, "other", 21)
    d.until(lambda: not any(d.engine.group.call(gate, 1)) and d.finished("other"))  # the gate is open again: what was put off is read into nobody's blocks
    assert_same(directory, d_tokens(p, d, "other"), 60, 21)
    assert [facts.outcome for facts in d.take_facts()] == ["landed"]
    p.clean(), d.clean()


def d_tokens(p, d, name):
    return p.tokens(name) + d.tokens(name)


def test_what_is_given_up_is_read_no_further(apart):
    """A read in many parts: the one under way ends, and no other begins."""
    p, d = apart
    d.engine.group.call(small_parts, 1, 512)
    rank_1(d, shut={"READ"})
    hand_over(p, d, "parts", 25)
    d.until(lambda: sum(d.engine.group.call(put_off)))
    d.engine.abort_request("parts")
    before = sum(d.engine.group.call(begun))
    d.until(lambda: d.take_facts())  # the others have been told
    rank_1(d)
    p.clean(), d.clean()
    assert sum(d.engine.group.call(begun)) == before
    d.engine.group.call(small_parts, 1, PART_BYTES)


def test_an_abort_while_one_rank_reads_gives_the_blocks_back_when_it_is_done(apart):
    p, d = apart
    rank_1(d, shut={"READ"})
    hand_over(p, d, "leaves", 30)
    d.until(lambda: sum(d.engine.group.call(put_off)))
    d.engine.abort_request("leaves")
    assert d.scheduler.loads.quarantine
    rank_1(d)
    p.clean(), d.clean()
    assert [facts.outcome for facts in d.take_facts()] == ["cancelled"]


def test_rows_of_a_lease_that_ended_while_the_last_rank_read_are_thrown_away(apart, directory):
    """Rank 0 has its rows in time, rank 1 reads what is somebody else's by then; the one word that is read after both tells."""
    p, d = apart
    rank_1(d, shut={"READ"})
    hand_over(p, d, "late", 40)
    d.until(lambda: sum(d.engine.group.call(put_off)))
    p.engine.clock.now += 31
    p.clean()
    p.engine.reset_prefix_cache()
    for i in range(3):
        p.add(f"refill{i}", prompt(60, 41 + i), 2)
    p.until(lambda: all(p.finished(f"refill{i}") for i in range(3)))
    rank_1(d)
    d.until(lambda: d.finished("late"))
    assert [facts.outcome for facts in d.take_facts()] == ["expired"]
    assert_same(directory, d_tokens(p, d, "late"), 60, 40)
    p.clean(), d.clean()


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, cluster, words", [
    ({"kv_transfer": "push_layers"}, {"prefill_topology": "DEP2"}, "kv_transfer='push_layers': a layer is written from one pool to one other, and topology='DEP2' of the prefill"),
    ({}, {"prefill": 0, "prefill_topology": "TP2"}, "prefill_topology='TP2': there is no prefill worker"),
    ({}, {"decode_topology": "TP2", "decode_args": {"tensor_parallel_size": 2}}, "decode_topology='TP2': decode_args names tensor_parallel_size as well"),
    ({}, {"decode_topology": "TPX"}, "decode_topology: topology='TPX': use TP<n>"),
    ({"host_tier_bytes": 1 << 20}, {"decode_topology": "TP2"}, "decode_topology: host_tier_bytes=1048576: tiers keep what one rank computes"),
])
def test_what_cannot_be_is_refused_in_one_sentence(engine, cluster, words):
    with pytest.raises(ConfigError) as refused:
        plan(EngineArgs(**engine), ClusterArgs(**{"prefill": 1, "decode": 1, **cluster}))
    assert str(refused.value).startswith(words) or words in str(refused.value)


def test_pools_of_other_weights_are_refused_whatever_their_ranks(worker, directory):
    p, d = worker("TP1", "p", agent="shm"), worker("TP2", "d", agent="shm")
    p.connector.check(d.connector.facts)
    with pytest.raises(ConfigError, match="runs another model"):
        check_pools(p.connector.facts, replace(d.connector.facts, model="another"))


def test_a_fingerprint_of_stored_weights_does_not_depend_on_the_ranks(worker, directory, tmp_path):
    prints = {weights_fingerprint(worker(topology, "p", agent="shm").engine) for topology in PREFILL}
    assert len(prints) == 1
    config, source = open_model(directory)
    sums = source_sums(source, 0, 1)
    assert prints == {joint_fingerprint(config, torch.float32, [sums])} != {joint_fingerprint(config, torch.bfloat16, [sums])}
    other = open_model(write_tiny(tmp_path / "other", "glm", n_routed_experts=7, norm_topk_prob=False))  # the same weights by another config
    assert joint_fingerprint(other[0], torch.float32, [source_sums(other[1], part, 3) for part in range(3)]) not in prints
    assert source_sums(other[1], 0, 1) == sums
    name = "model.layers.0.self_attn.o_proj.weight"
    weights = load_file(f"{directory}/model.safetensors")
    weights[name][3, 5] += 1e-3
    save_file(weights, tmp_path / "other" / "model.safetensors")
    assert {key for key, digest in source_sums(open_model(tmp_path / "other")[1], 0, 1).items() if digest != sums[key]} == {name}


def test_threads_are_split_among_ranks():
    starts = plan(EngineArgs(num_threads=8), ClusterArgs(prefill=1, decode=2, prefill_topology="DEP2", decode_topology="TP1"))
    assert [(start.name, start.args.ranks.name, start.args.num_threads, start.alone) for start in starts] == [
        ("prefill0", "DEP2", 4, False), ("decode0", "TP1", 2, False), ("decode1", "TP1", 2, False)]
