"""A prompt computed on one engine and answered on another: the same tokens as on one engine, whatever differs between their pools."""
import pytest

from minengine.config import ConfigError
from minengine.disagg.source import Notice, Reserve, check_pools
from minengine.kv.blocks import BlockPool
from minengine.request import SamplingParams, Status
from test_engine import alone, assert_same, prompt
from workers import Worker, prefilled, pulled, pushed, so_far, workers

ROWS = {"llama": ["float32", "bfloat16", "fp8", "nvfp4", "q8_0", "q4_0"], "glm": ["float32", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_fp8_ds_mla"]}
# Both ways of moving, both ways of noticing, every layout and block size on some side, NIXL and the agent that needs none.
PAIRS = [("pull", "poll", dict(agent="nixl"), dict(kv_cache_layout="LBNHC"), dict(kv_cache_layout="LBNHC")),
         ("pull", "event", dict(agent="shm"), dict(kv_cache_layout="BLHNC"), dict(kv_cache_layout="BLHNC", block_size=32)),
         ("pull", "poll", dict(agent="shm"), dict(kv_cache_layout="LBHNC", block_size=64), dict(kv_cache_layout="BHLNC")),
         ("push", "poll", dict(agent="nixl"), dict(kv_cache_layout="BLHNC"), dict(kv_cache_layout="BLHNC")),
         ("push", "event", dict(agent="shm"), dict(kv_cache_layout="LBNHC", block_size=32), dict(kv_cache_layout="BLNHC")),
         ("push", "poll", dict(agent="shm"), dict(kv_cache_layout="LHBNC"), dict(kv_cache_layout="LBHNC"))]


@pytest.mark.parametrize("kind, dtype", [(kind, dtype) for kind, dtypes in ROWS.items() for dtype in dtypes])
def test_every_row_format_gives_the_tokens_of_one_engine(kind, dtype):
    """Each format by one pull and one push; which pair of pools, the format's place in the list decides."""
    at = ROWS[kind].index(dtype)
    for way, admission, both, prefill, decode in (PAIRS[at % 3], PAIRS[3 + at % 3]):
        transfer = "push_layers" if way == "push" else "pull"
        with workers(kind, prefill, decode, kv_cache_dtype=dtype, load_admission=admission, kv_transfer=transfer, **both) as (p, d):
            for length in (33, 70):
                tokens = (pushed if way == "push" else pulled)(p, d, f"{length}", prompt(p.engine.config.vocab_size, length, 1), max_tokens=6)
                assert_same(tokens, *alone(kind, dtype, length, 1, 6))
            p.clean(), d.clean()
            assert (d if way == "pull" else p).connector.totals.landed == 2


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[2]['agent']}-{pair[3]['kv_cache_layout']}-{pair[4]['kv_cache_layout']}")
def test_every_pair_of_pools_moves_every_length_both_ways(way, pair):
    _, admission, both, prefill, decode = pair
    with workers("glm", prefill, decode, load_admission=admission, kv_transfer="push_layers" if way == "push" else "pull", **both) as (p, d):
        for length in (1, 15, 16, 17, 95):
            tokens = (pushed if way == "push" else pulled)(p, d, f"{length}", prompt(p.engine.config.vocab_size, length, 2), max_tokens=3)
            assert_same(tokens, *alone("glm", "float32", length, 2, 3))
        p.clean(), d.clean()


def test_what_the_decoder_has_already_is_not_moved_again():
    with workers(agent="shm") as (p, d):
        for turn, (name, moved) in enumerate((("first", 70), ("again", 70 - 64))):
            assert_same(pulled(p, d, name, prompt(199, 70, 1)), *alone("llama", "float32", 70, 1, 8))
            assert d.connector.take_facts()[0].num_tokens == moved
        # 65 tokens whose 64 are there: the row of the last is all that is missing; 64 tokens more are there than can be used
        assert_same(pulled(p, d, "block", prompt(199, 65, 1)), *alone("llama", "float32", 65, 1, 8))
        assert d.connector.take_facts()[0].num_tokens == 1
        p.clean(), d.clean()


def test_facts_and_stamps_tell_what_happened():
    with workers(decode=dict(kv_cache_layout="BLHNC", load_admission="event"), prefill=dict(kv_cache_layout="BLHNC"), agent="nixl") as (p, d):
        pulled(p, d, "r", prompt(199, 70, 1))
        facts, = d.connector.take_facts()
        assert (facts.request_id, facts.kind, facts.peer, facts.outcome) == ("r", "pull", p.agent.name, "landed")
        assert (facts.num_tokens, facts.num_blocks, facts.asked, facts.merged, facts.nixl_descriptors) == (70, 5, 5, 1, 1)  # contiguous on both sides
        assert facts.nbytes == 5 * d.engine.kv.kv_layout.block_bytes and facts.seconds > 0
        assert d.connector.totals.nixl_descriptors == 1 and p.connector.totals.holds == 1
        t = d.outputs["r"][-1].metrics
        order = [t.arrival_s, t.admitted_s, t.prefill_start_s, t.token_s[0], t.transfer_start_s, t.transfer_end_s, t.landed_s, t.decode_admitted_s, t.token_s[1]]
        assert None not in order and order[0] < order[1] <= order[2] and order[2:] == sorted(order[2:])
        assert p.agent.name in p.connector.describe()


def test_many_requests_at_once_sampled_and_greedy():
    """Both workers are busy with several, and the decoder computes some of its own as well."""
    with workers("llama", agent="shm", num_gpu_blocks_override=40, load_admission="event") as (p, d):
        params = {f"{i}": SamplingParams(max_tokens=10, temperature=0.8 * (i % 2), seed=i) for i in range(6)}
        ids = {name: prompt(199, 20 + 11 * i, i) for i, name in enumerate(params)}
        for name in params:
            p.add(name, ids[name], params=params[name], hold=True)
        d.add("own", prompt(199, 50, 7), 20)
        waiting = set(params)
        while waiting:
            p.turn(), d.turn()
            for name in [name for name in waiting if name in p.scheduler.held]:
                waiting.remove(name)
                d.add(name, ids[name], params=params[name], resume=so_far(p, name), source=p.connector.hold(name))
        d.until(lambda: all(map(d.finished, [*params, "own"])))
        one = Worker("llama", "one", agent="shm", num_gpu_blocks_override=40)
        for name in params:
            one.add(name, ids[name], params=params[name])
        one.until(lambda: all(map(one.finished, params)))
        for name in params:
            assert p.tokens(name) + d.tokens(name) == one.tokens(name), name
        assert_same(d.tokens("own"), *alone("llama", "float32", 50, 7, 20))
        p.clean(), d.clean()
        one.close()


def test_a_full_decoder_takes_the_rows_when_it_has_room():
    for admission in ("poll", "event"):
        with workers(agent="shm", decode=dict(num_gpu_blocks_override=8, load_admission=admission)) as (p, d):
            d.add("large", prompt(199, 100, 3), 20)
            d.until(lambda: "large" in d.outputs)
            source, resume = prefilled(p, "r", prompt(199, 60, 1))
            d.add("r", prompt(199, 60, 1), resume=resume, source=source)
            assert d.engine.requests["r"].status is Status.WAITING
            d.until(lambda: d.finished("r"))
            assert d.finished("large") and d.connector.totals.landed == 1
            assert_same(p.tokens("r") + d.tokens("r"), *alone("llama", "float32", 60, 1, 8))
            p.clean(), d.clean()


def test_pools_that_cannot_be_paired_are_refused_in_one_sentence():
    with workers("llama", agent="shm", prefill=dict(block_size=32)) as (p, d):
        p.connector.check(d.connector.facts)
        for other, why in ((Worker("glm", "x", agent="shm"), "runs another model than"), (Worker("llama", "x", agent="shm", kv_cache_dtype="fp8"), "kv_cache_dtype")):
            with pytest.raises(ConfigError, match=why):
                check_pools(d.connector.facts, other.connector.facts)
            other.close()


def test_rows_of_another_model_are_not_read_and_the_request_is_computed():
    other = Worker("llama", "p", agent="shm", kv_cache_dtype="bfloat16")
    with workers(agent="shm") as (p, d):
        source, resume = prefilled(other, "r", prompt(199, 40, 1))
        d.add("r", prompt(199, 40, 1), resume=resume, source=source)
        d.until(lambda: d.finished("r"))
        facts, = d.connector.take_facts()
        assert facts.outcome == "failed" and "'bfloat16' and" in facts.error and facts.nbytes == 0
        assert len(other.tokens("r") + d.tokens("r")) == 8
        d.clean()
    other.connector.release("r")
    other.clean()
    other.close()


def test_a_worker_without_tier_keeps_no_copies():
    with workers(agent="shm") as (p, d):
        pulled(p, d, "r", prompt(199, 70, 1))
        assert p.connector.totals.tier_stored_blocks == 0 and p.connector.find([b"x"]) == 0
        p.clean(), d.clean()


def test_notices_survive_the_wire_and_strangers_are_no_notices():
    for notice in (Notice("fetch", 1), Notice("push", 2**64 - 1, b"12345678"), Notice("fail", 0, b"why"), Notice("stop", 7, bytes(range(256)))):
        assert Notice.decode(notice.encode()) == notice
    for message in (b"", b"fetch", b"\0" * 16, b"nothing\0" + bytes(8), b"\xff" * 40):
        assert Notice.decode(message) is None


def test_a_push_and_a_pull_find_their_place_by_their_own_kind_of_source():
    with workers(agent="shm", kv_transfer="push_layers") as (p, d):
        ids = prompt(199, 40, 1)
        assert_same(pushed(p, d, "push", ids), *alone("llama", "float32", 40, 1, 8))
        assert_same(pulled(p, d, "pull", prompt(199, 50, 2)), *alone("llama", "float32", 50, 2, 8))  # the same workers can still be asked
        assert Reserve(p.connector.facts).pool.layout == p.engine.kv.kv_layout
        p.clean(), d.clean()


def test_the_pool_counts_what_is_borrowed():
    pool = BlockPool(4, 16)
    from minengine.schedule import Scheduler

    scheduler = Scheduler(pool, max_num_batched_tokens=16, max_num_seqs=2)
    blocks = pool.allocate(2)
    scheduler.borrow(blocks)
    pool.release(blocks)
    assert pool.num_free_blocks == 2
    scheduler.check()
    scheduler.stored(blocks)
    assert pool.num_free_blocks == 4
    with pytest.raises(ValueError, match="nobody stores them"):
        scheduler.stored(blocks)
