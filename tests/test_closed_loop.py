"""The closed loop counts what falls into its window, and asks for what its load says. The engine here answers at once, with stamps of its own making."""
import asyncio
import time
from types import SimpleNamespace

import pytest

from bench.apart import CASES, SYSTEMS, VALUES, _kept, _table
from minengine.disagg.closed_loop import Load, record_scene, run, tokens, work
from minengine.request import CompletionOutput, RequestOutput, Timeline


class Answering:
    """An engine whose requests get a token a turn of the event loop; some fail."""

    def __init__(self, error=None):
        self.asked, self.under_way, self.most, self.error = [], 0, 0, error

    async def generate(self, prompt, params, request_id, *, session_id=None):
        ids = prompt["prompt_token_ids"]
        self.asked.append((ids, params.max_tokens, session_id))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        timeline = Timeline(arrival_s=time.perf_counter())
        try:
            for i in range(params.max_tokens):
                await asyncio.sleep(0)
                timeline.token_s.append(time.perf_counter())
                last = i == params.max_tokens - 1
                yield RequestOutput(request_id, None, ids, [CompletionOutput(0, "", [7 + i], "length" if last else None, None, None)], last, 0, timeline,
                                    self.error)
        finally:
            self.under_way -= 1


def cluster(engine, **transfers):
    worker = SimpleNamespace(num_running=0, num_waiting=0, num_free_blocks=4, num_blocks=4, transfers=transfers)
    return SimpleNamespace(engine=engine, workers=[worker])


def test_streams_are_under_way_all_the_time_and_their_prompts_are_all_different():
    engine = Answering()
    seen = run(cluster(engine), Load(streams=3, prompt_tokens=20, output_tokens=8), warm_s=0, window_s=0)
    assert engine.most == 3 and engine.under_way == 0
    assert {len(ids) for ids, _, _ in engine.asked} == {20} and len({tuple(ids) for ids, _, _ in engine.asked}) == len(engine.asked)
    assert {length for _, length, _ in engine.asked} <= set(range(2, 13)) and {session for _, _, session in engine.asked} == {None}
    assert len(seen.ttft_s) >= 3 and seen.gaps_s and min(seen.gaps_s) > 0 and seen.tokens_per_s > 0


def test_a_longer_prompt_is_as_cold_as_a_shorter_one_was():
    texts = [tokens(n, "0 3 1") for n in (16, 64, 65, 128)]
    assert len({tuple(text[:8]) for text in texts}) == 4 and tokens(64, "0 3 1") == texts[1]


def test_a_session_comes_back_with_all_that_was_said():
    engine = Answering()
    run(cluster(engine), Load(streams=2, prompt_tokens=4, output_tokens=6, history_tokens=32), warm_s=0, window_s=0, seed=3)
    for number in range(2):
        turns = [(ids, length) for ids, length, session in engine.asked if session == f"stream-{number}"]
        assert turns[0][0][:32] == tokens(32, f"history {number}") and len(turns[0][0]) == 36
        for (before, length), (now, _) in zip(turns, turns[1:]):
            assert now[:len(before) + length] == before + [7 + i for i in range(length)] and len(now) == len(before) + length + 4


def test_a_request_that_fails_ends_the_loop_with_its_error():
    engine = Answering(error="no room")
    with pytest.raises(RuntimeError, match="no room"):
        run(cluster(engine), Load(streams=2), warm_s=0, window_s=0)
    assert engine.under_way == 0


def test_what_was_moved_is_what_the_workers_count_meanwhile():
    c = cluster(Answering(), landed=5, outcomes={"landed": 5})
    engine, generate = c.engine, c.engine.generate

    def counting(*args, **kwargs):
        c.workers[0].transfers["landed"] += 1
        return generate(*args, **kwargs)

    engine.generate = counting
    seen = run(c, Load(streams=2, output_tokens=4), warm_s=0, window_s=0)
    assert seen.moved == {"landed": len(engine.asked)}


def test_a_scene_begins_when_the_streams_run_and_ends_with_the_prompt():
    scene = record_scene(cluster(Answering()), streams=2, prompt_tokens=50, lead=3, tail=4)
    assert len(scene.prompt.token_s) == 4 and len(scene.streams) == 2
    assert all(stream.token_s[2] <= scene.prompt.arrival_s for stream in scene.streams) and len(scene.quiet_s) >= 4
    assert scene.since(scene.prompt.token_s[0]) == pytest.approx(scene.prompt.ttft_s) and scene.gaps_s


def test_the_work_of_a_load_is_read_off_an_engines_own_clock():
    class Counted:  # one second a step; a prompt takes one, and so does a token for all
        def __init__(self):
            self.now_s, self.left, self.sizes = 0.0, [], []

        def add_request(self, name, prompt, params):
            request = SimpleNamespace(timeline=Timeline(arrival_s=self.now_s), left=params.max_tokens)
            self.left.append(request)
            self.sizes.append(len(prompt["prompt_token_ids"]))
            return request

        def has_unfinished_requests(self):
            return bool(self.left)

        def step(self):
            self.now_s += 1
            for request in self.left:
                request.timeline.token_s.append(self.now_s)
                request.left -= 1
            self.left = [request for request in self.left if request.left]

    engine = Counted()
    assert work(engine, Load(streams=4, prompt_tokens=10, output_tokens=9, history_tokens=100), repeats=2) == ([1.0, 1.0], [2.0, 2.0])
    assert engine.sizes[:6] == [100, 110, 111, 111, 111, 111]


def test_what_is_kept_has_a_name_each_and_the_cut_is_of_the_same_round():
    seen = {case: {name: {value: [10.0, 20.0] for value in VALUES} for name in SYSTEMS} for case in CASES}
    seen["64"]["apart"]["p90-ms"] = [5.0, 15.0]
    moved = {case: {what: [] for what in ("mb", "pieces", "descriptors", "ms")} for case in CASES}
    result = {"work": {case: ([0.1], [0.3]) for case in CASES}, "seen": seen, "moved": moved}
    kept = {one["name"]: one for one in _kept(result, [0.0])}
    assert len(kept) == len(_kept(result, [0.0])) and all(name.startswith("apart-") for name in kept)
    assert kept["apart-share-64"]["median"] == pytest.approx(25) and kept["apart-cut-two-64"]["median"] == pytest.approx((50 + 25) / 2)
    assert any(row.what.startswith("p90 gap apart against two engines") and row.value == pytest.approx(10 / 15) for row in _table(result))
