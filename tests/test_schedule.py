"""The scheduler alone, with made-up tokens: every decision is checked against what a scheduler must never do."""
import pytest
from hypothesis import given, settings, strategies as st

from minengine.kv.blocks import BlockPool
from minengine.request import Request, RequestError, SamplingParams, Status
from minengine.schedule import Scheduler

SIZE = 16
FORCED = 99  # a token that was not sampled


def request(name, prompt, max_tokens=4, *, max_model_len=10_000, salt=None, eos=()):
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), max_model_len=max_model_len, cache_salt=salt, eos_token_ids=eos)


def scheduler(blocks=64, budget=64, seqs=8, **options):
    return Scheduler(BlockPool(blocks, SIZE, options.pop("caching", True)), max_num_batched_tokens=budget, max_num_seqs=seqs, **options)


def run_step(s, token=7, forced=lambda r: 0):
    """One iteration under the rules that hold for every iteration; returns the step and who ended. `forced(request)` tokens, as far as there
    is room for them, follow each sampled one."""
    before = {r.request_id: r for r in s.running}
    could_decode = [r for r in s.running if r.num_tokens - r.num_computed_tokens == 1]
    answering = [r for r in s.running if r.num_computed_tokens >= r.num_prompt_tokens]
    step = s.schedule()
    assert step.num_tokens <= s.max_num_batched_tokens
    for r in could_decode:
        assert r in step.decodes or r in step.preempted or r in step.failed, f"{r} could decode and was left out"
    for r in answering:
        assert r in step.decodes + [c.request for c in step.prefills] + step.preempted + step.failed, f"{r} is in the middle of its answer and was left out"
    for r, n in [(r, 1) for r in step.decodes] + list(step.prefills):
        assert n >= 1 and r.status is Status.RUNNING
        assert r.num_computed_tokens + n <= r.num_tokens <= r.capacity
        for i in range(r.num_computed_tokens // SIZE, (r.num_computed_tokens + n - 1) // SIZE + 1):
            block = r.block_ids[i]
            assert s.pool.ref_counts[block] == 1, "a block is written while it is shared"
            assert s.pool._hash_of[block] is None, "a block can be found while it is in flight"
    names = [r.request_id for r in step.decodes] + [c.request.request_id for c in step.prefills]
    assert len(set(names)) == len(names), "a request stands twice in one step"
    if step.preempted:
        lost = {r.request_id for r in step.preempted}
        assert set(names) <= before.keys() - lost, "a request was admitted in the step that preempted another"
    sampled = step.sampled()
    ended = s.update(step, [token] * len(sampled))
    s.check()
    for r in sampled:
        s.append(r, [FORCED] * min(forced(r), s.room(r)))
        s.check()
    return step, ended


def drain(s, limit=5000):
    for _ in range(limit):
        if not s.has_unfinished:
            return
        step, _ = run_step(s)
        assert step.num_tokens or step.failed, "a step did nothing and requests wait"
    raise AssertionError("requests never end")


def test_decodes_come_before_prefills_and_share_one_budget():
    s = scheduler(budget=20, seqs=4)
    a, b = request("a", 10, 50), request("b", 100, 50)
    s.add(a)
    s.add(b)
    step, _ = run_step(s)
    assert [(r.request_id, n) for r, n in step.prefills] == [("a", 10), ("b", 10)]
    for done in (29, 48, 67, 86, 100):
        step, _ = run_step(s)
        assert step.decodes[0] is a and b.num_computed_tokens == done
        assert step.num_tokens <= 20


def test_a_long_prefill_leaves_room_for_a_short_one():
    s = scheduler(budget=64, long_prefill_token_threshold=16)
    for r in (request("long", 200), request("short", 20)):
        s.add(r)
    step, _ = run_step(s)
    assert [(r.request_id, n) for r, n in step.prefills] == [("long", 16), ("short", 16)]


def test_a_fully_cached_prompt_still_computes_its_last_block():
    s = scheduler()
    s.add(request("first", 4 * SIZE))
    drain(s)
    again = request("again", 4 * SIZE)
    s.add(again)
    step, _ = run_step(s)
    assert again.num_cached_tokens == 3 * SIZE and step.prefills[0].num_tokens == SIZE
    one_more = request("one more", 4 * SIZE + 1)
    s.add(one_more)
    step, _ = run_step(s)
    assert one_more.num_cached_tokens == 4 * SIZE and one_more in step.decodes


def test_a_block_in_flight_is_not_handed_out_as_cached():
    s = scheduler(budget=200)
    a, b = request("a", 3 * SIZE + 5), request("b", 3 * SIZE + 5)
    s.add(a)
    s.add(b)
    run_step(s)  # both in one step: b must not lean on rows that a has not written yet
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0) and not set(a.block_ids) & set(b.block_ids)
    c = request("c", 3 * SIZE + 5)
    s.add(c)
    run_step(s)
    assert c.num_cached_tokens == 3 * SIZE and c.block_ids[:3] == a.block_ids[:3]


def test_generated_tokens_are_found_by_the_next_turn():
    s = scheduler()
    turn = request("turn 1", 20, 30)
    s.add(turn)
    drain(s)
    nxt = request("turn 2", turn.token_ids + [1, 2, 3])
    s.add(nxt)
    run_step(s)
    # The last output token was emitted before its KV existed: 49 of 50 tokens have rows, three full blocks.
    assert nxt.num_cached_tokens == 49 // SIZE * SIZE == 48


def test_tenants_do_not_share():
    s = scheduler()
    s.add(request("a", 40, salt="a"))
    drain(s)
    for salt, cached in (("b", 0), (None, 0), ("", 0), ("a", 32)):
        r = request(f"again {salt}", 40, salt=salt)
        s.add(r)
        run_step(s)
        assert r.num_cached_tokens == cached, salt
        drain(s)


def test_what_can_never_fit_is_refused_with_the_numbers():
    s = scheduler(blocks=4)
    with pytest.raises(RequestError, match="65 tokens need 5 blocks of 16 and the pool has 4"):
        s.add(request("huge", 65))
    s.add(request("fits", 64, 1))
    drain(s)
    with pytest.raises(RequestError, match="prompt: is empty"):
        request("empty", [])
    with pytest.raises(RequestError, match="max_model_len is 10"):
        request("long", 10, max_model_len=10)


def test_one_that_outgrows_the_pool_alone_fails_and_the_rest_go_on():
    s = scheduler(blocks=4)
    greedy, small = request("greedy", 20, 500), request("small", 5, 10)
    s.add(greedy)
    s.add(small)
    drain(s)
    assert greedy.finish_reason == "error" and "grew to 65 tokens" in greedy.error and "4 blocks of 16" in greedy.error
    assert small.finish_reason == "length" and small.num_tokens == 15
    assert s.pool.num_free_blocks == 4


def test_the_youngest_is_preempted_and_comes_back_first():
    s = scheduler(blocks=4, budget=64, caching=False)
    old, young, later = request("old", 30, 20), request("young", 30, 20), request("later", 5, 2)
    for r in (old, young, later):
        s.add(r)
    while not young.timeline.num_preemptions:
        run_step(s)
    assert old.status is Status.RUNNING and old.timeline.num_preemptions == 0
    assert list(s.waiting) == [young, later]
    drain(s)
    assert old.num_tokens == young.num_tokens == 50


def test_stop_tokens_and_lengths():
    s = scheduler()
    by_eos, by_length, ignores = request("eos", 5, 9, eos=(7,)), request("length", 5, 9), request("short", 5, 9, max_model_len=8)
    for r in (by_eos, by_length, ignores):
        s.add(r)
    drain(s)
    assert (by_eos.finish_reason, by_eos.stop_reason, by_eos.output_token_ids) == ("stop", 7, [7])
    assert (by_length.finish_reason, len(by_length.output_token_ids)) == ("length", 9)
    assert (ignores.finish_reason, ignores.num_tokens) == ("length", 8)


def test_appended_tokens_are_computed_together_and_found_again():
    s = scheduler(budget=40, seqs=2)
    r = request("r", 20, 100)
    s.add(r)
    run_step(s, forced=lambda r: 30)
    assert (r.num_tokens, r.num_computed_tokens, r.capacity) == (51, 20, 64)
    step, _ = run_step(s)
    assert step.prefills == [(r, 31)] and r.num_tokens == 52
    again = request("again", r.token_ids[:51] + [1])
    s.add(again)
    run_step(s)
    assert again.num_cached_tokens == 48 and r.output_token_ids == [7] + [FORCED] * 30 + [7, 7]


def test_an_answer_that_was_appended_to_waits_for_no_prompt_and_for_no_other_answer():
    s = scheduler(blocks=100, budget=16, seqs=4)
    short, other, late = request("short", 3, 100), request("other", 3, 100), request("late", 8, 100)
    s.add(short)
    s.add(other)
    run_step(s)
    s.add(request("long", 400))
    s.add(late)
    run_step(s, forced=lambda r: 40)
    step, _ = run_step(s)
    assert step.prefills == [(short, 15), (other, 1)]
    while not late.output_token_ids:  # run_step sees that both answers are in every step
        run_step(s, forced=lambda r: 3)


def test_there_is_room_in_free_blocks_and_below_max_tokens():
    s = scheduler(blocks=4)
    r, waits = request("r", 20, 100), request("waits", 40, 1)
    s.add(r)
    s.add(waits)
    assert s.room(r) == 0  # it does not run yet
    run_step(s)
    assert waits in s.waiting and s.room(r) == 64 - 21
    with pytest.raises(ValueError, match="44 tokens are appended .* room for 43"):
        s.append(r, [FORCED] * 44)
    assert r.num_tokens == 21 and s.pool.num_free_blocks == 2
    s.append(r, [FORCED] * 43)
    assert s.room(r) == 0 and s.pool.num_free_blocks == 0
    s.append(r, [])
    s.check()
    drain(s)
    assert r.finish_reason == "error" and "grew to 65 tokens" in r.error and waits.finish_reason == "length"
    few = request("few", 20, 10)
    s.add(few)
    run_step(s)
    assert s.room(few) == 8  # the tenth is sampled
    s.append(few, [FORCED] * 8)
    drain(s)
    assert few.finish_reason == "length" and len(few.output_token_ids) == 10 and s.room(few) == 0


def test_no_token_ends_a_request_with_an_error():
    s = scheduler()
    stuck, other = request("stuck", 5, 9), request("other", 5, 9)
    s.add(stuck)
    s.add(other)
    run_step(s)
    step = s.schedule()
    s.update(step, [None if r is stuck else 7 for r in step.sampled()])
    s.check()
    assert stuck.finish_reason == "error" and stuck.output_token_ids == [7] and "after 1 tokens no token" in stuck.error
    drain(s)
    assert other.finish_reason == "length"


def test_a_scheduler_that_would_starve_decodes_is_refused():
    with pytest.raises(ValueError, match="decodes would starve"):
        scheduler(budget=4, seqs=8)


arrivals = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(arrivals=arrivals, blocks=st.integers(6, 24), seqs=st.integers(1, 6), extra=st.integers(0, 40), threshold=st.sampled_from([0, 7, 16]),
       caching=st.booleans(), aborts=st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=4), tokens=st.integers(1, 3),
       forced=st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_any_mix_ends_whole(arrivals, blocks, seqs, extra, threshold, caching, aborts, tokens, forced):
    """Random prompts (with shared prefixes), pools, budgets, aborts and forced tokens: all rules of run_step hold, everybody ends, every
    block returns."""
    s = scheduler(blocks, seqs + extra, seqs, long_prefill_token_threshold=threshold, caching=caching)
    requests, arrive = [], {}
    for i, (prompt, output, family, at) in enumerate(arrivals):
        r = request(str(i), [family * 1000 + j for j in range(prompt)], output)
        requests.append(r)
        arrive.setdefault(at, []).append(r)
    accepted = []
    for turn in range(5000):
        for r in arrive.pop(turn, ()):
            if s.pool.blocks_for(r.num_tokens) > blocks:
                with pytest.raises(RequestError):
                    s.add(r)
            else:
                s.add(r)
                accepted.append(r)
        if turn in aborts and aborts[turn] < len(requests) and requests[aborts[turn]] in accepted:
            s.abort(requests[aborts[turn]])
            s.abort(requests[aborts[turn]])
            s.check()
        if not s.has_unfinished and not arrive:
            break
        step, _ = run_step(s, token=turn % tokens, forced=lambda r: forced[(turn + len(r.request_id)) % len(forced)] if int(r.request_id) % 3 else 0)
        assert step.num_tokens or step.failed or not s.has_unfinished, "stuck"
    assert all(r.finished for r in accepted)
    for r in accepted:
        if r.finish_reason == "length":
            assert len(r.output_token_ids) == r.params.max_tokens
        elif r.finish_reason == "error":
            assert s.pool.blocks_for(r.num_tokens) > blocks
    s.pool.check([])
    assert s.pool.num_free_blocks == blocks
