"""The router: what it costs, who gets what, and what never happens, whatever comes in whatever order."""
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minengine.disagg.breaker import Breaker
from minengine.disagg.costs import RouterOptions, prefill_cost
from minengine.disagg.kv_index import Overlap
from minengine.disagg.router import POLICIES, NoPlace, NoWorker, Router, RouteRequest, WorkerSpec
from minengine.kv.events import KVEvent
from minengine.simulate.clock import VirtualClock

BLOCK = 64


def chain(text, n=100):
    return [f"{text}{i}".encode().ljust(32) for i in range(n)]


def engines(n=4, policy="kv_aware", seed=0, places=1 << 30, **options):
    clock = VirtualClock()
    workers = [WorkerSpec(f"w{i}", places=places) for i in range(n)]
    return Router(policy, workers, block_size=BLOCK, clock=clock, seed=seed, options=RouterOptions(**options)), clock


def apart(prefill=2, decode=2, places=1 << 30, **options):
    clock = VirtualClock()
    workers = [WorkerSpec(f"p{i}", "prefill") for i in range(prefill)] + [WorkerSpec(f"d{i}", "decode", places) for i in range(decode)]
    return Router("kv_aware", workers, block_size=BLOCK, clock=clock, options=RouterOptions(**options)), clock


def ask(name, hashes=(), blocks=None, session=None, exclude=()):
    return RouteRequest(request_id=name, num_tokens=BLOCK * (len(hashes) if blocks is None else blocks), hashes=hashes, session_id=session,
                        exclude=frozenset(exclude))


def serve(router, request):
    """Route a request and let it end at once, its blocks cached where it was; returns its engine."""
    route = router.route(request)
    name = route.prefill
    router.prefilled(request.request_id)
    seq = router.index._next[name]
    router.apply(name, [KVEvent(seq, "stored", tuple(request.hashes))])
    assert router.finished(request.request_id)
    return name


# --- cost -------------------------------------------------------------------------------------------------

def test_the_cost_of_three_workers_by_hand():
    # A request of 10 blocks; each worker has some of them and is busy with others. The one with the most cached blocks does not win.
    workers = [(2, 10), (5, 5), (8, 9)]  # cached, decode blocks: 8 + 10, 5 + 5, 2 + 9
    assert [prefill_cost(RouterOptions(), 10, Overlap(device), 0, 0, busy, 0, 0.0) for device, busy in workers] == [18, 10, 11]


def test_what_lies_farther_away_is_worth_less_and_queued_work_counts():
    options = RouterOptions(request_weight=2)
    # 7 queued and 10 new, less 4 on the device, .75 * 2 in host memory, .25 * 4 on disk; 3 blocks decoded; 2 for each of 5 requests; 1.5 lately
    assert prefill_cost(options, 10, Overlap(4, 2, 4), 7, 0, 3, 5, 1.5) == 17 - 4 - 1.5 - 1 + 3 + 10 + 1.5
    assert prefill_cost(RouterOptions(overlap_score_credit_decay=1), 10, Overlap(8), 10, 10, 0, 0, 0) == 20 - 8 / 2, "one such request more than the idlest"
    assert prefill_cost(RouterOptions(overlap_score_credit=3), 10, Overlap(8), 0, 0, 0, 0, 0) == 0, "never below nothing"


def test_a_request_goes_where_its_prompt_is_and_not_where_it_would_wait_longer():
    router, _ = engines(recent_weight=0.0)
    prompt = chain("p", 10)
    assert serve(router, ask("first", prompt)) == (home := serve(router, ask("again", prompt)))
    assert router.route(ask("here", prompt)).cached_blocks == 10
    # 10 blocks decoded there now and 1 for the request make it as dear as an idle one, and 20 dearer
    router.route(ask("there", prompt + chain("q", 10)))
    assert router.route(ask("elsewhere", prompt)).decode != home


def test_a_temperature_draws_by_cost():
    router, _ = engines(2, temperature=0.5, recent_weight=0.0)
    prompt = chain("p", 50)
    home, other = serve(router, ask("first", prompt)), 0
    for i in range(400):
        other += router.route(ask(f"{i}", prompt)).decode != home
        router.cancelled(f"{i}")
    assert 400 * 0.07 < other < 400 * 0.17  # e^-2 / (1 + e^-2) = 11.9%


# --- sharing ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sequential", [True, False])
def test_equal_workers_share_equal_requests(policy, sequential):
    router, _ = engines(4, policy)
    took = Counter()
    for i in range(200):
        took[router.route(ask(f"{i}", blocks=10)).decode] += 1
        if sequential:
            router.finished(f"{i}")
    low, high = {"random": (30, 70), "round_robin": (50, 50), "kv_aware": (48, 52)}[policy]
    assert len(took) == 4 and low <= min(took.values()) and max(took.values()) <= high


@given(st.integers(2, 6), st.integers(0, 1000), st.lists(st.integers(1, 40), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_equal_workers_share_the_load(n, seed, sizes):
    """Sessions of mixed sizes, one request at a time, so that no worker ever has anything to do when the next one comes."""
    router, _ = engines(n, seed=seed)
    blocks = Counter()
    for i in range(60 * n):
        size = sizes[i % len(sizes)]
        blocks[router.route(ask(f"{i}", blocks=size, session=f"s{i}")).decode] += size
        router.finished(f"{i}")
    mean = sum(blocks.values()) / n
    assert len(blocks) == n and max(blocks.values()) <= 1.5 * mean


def test_a_common_system_prompt_does_not_draw_every_sequential_request_to_one_worker():
    router, _ = engines(4)
    system = chain("system", 20)
    took = Counter(serve(router, ask(f"{i}", system + chain(f"{i}-", 20), session=f"s{i}")) for i in range(100))
    assert len(took) == 4 and max(took.values()) <= 1.5 * 25


def test_equal_seeds_route_equally_and_ties_are_not_the_first_workers():
    def routes(seed):
        router, _ = engines(4, seed=seed)
        return [router.route(ask(f"{i}", blocks=1)).decode for i in range(12)]

    assert routes(1) == routes(1)
    assert len({routes(seed)[0] for seed in range(20)}) == 4


def test_prefill_and_decode_workers_are_chosen_apart():
    router, _ = apart()
    prompt = chain("p", 10)
    first = router.route(ask("a", prompt))
    assert first.prefill[0] == "p" and first.decode[0] == "d"
    router.apply(first.prefill, [KVEvent(1, "stored", tuple(prompt))])
    second = router.route(ask("b", prompt))
    assert second.prefill != first.prefill and second.decode != first.decode, "10 blocks are queued at the one and held at the other"
    router.prefilled("a"), router.prefilled("b")
    assert router.route(ask("c", prompt + chain("q", 10))).prefill == first.prefill, "the work is done and the blocks are there"
    router.check()


# --- sticky -----------------------------------------------------------------------------------------------

def test_a_session_stays_on_its_decoder_while_that_is_up():
    router, clock = engines(3, places=2)
    home = router.route(ask("0", blocks=100, session="s")).decode
    assert router.route(ask("1", blocks=100, session="s")).decode == home, "whatever it costs"
    assert router.route(ask("2", blocks=100, session="s")).decode != home, "it is full: elsewhere, this once"
    router.finished("0")
    assert router.route(ask("3", blocks=100, session="s")).decode == home
    gone = router.worker_down(home)
    assert sorted(gone) == ["1", "3"]
    new = router.route(ask("1", blocks=100, session="s")).decode
    router.worker_up(home)
    assert new != home and router.route(ask("4", session="s")).decode == new, "its cache is on the new one now"
    assert router.counters["diverted"] == 1 and router.counters["moved"] == 1
    router.check()


def test_an_engine_that_has_no_more_of_a_sessions_prompt_does_not_keep_it():
    router, _ = engines(2)
    prompt = chain("p", 20)
    home = serve(router, ask("0", prompt, session="s"))
    other = {"w0": "w1", "w1": "w0"}[home]
    router.route(ask("long", blocks=500, exclude=[other]))  # home has much to do
    assert serve(router, ask("1", prompt + chain("q", 20), session="s")) == home, "half of it is there"
    assert serve(router, ask("2", chain("subagent", 20), session="s")) == other, "nothing of it is there"
    assert serve(router, ask("3", chain("subagent", 20) + chain("more", 5), session="s")) == other, "it goes on where it is"
    assert serve(router, ask("4", prompt + chain("q", 20), session="s")) == home
    router.apply(home, [KVEvent(router.index._next[home], "cleared", ())])
    assert serve(router, ask("5", prompt + chain("q", 20), session="s")) == other
    assert router.route(ask("6", blocks=50, session="s")).decode == home, "without hashes a session stays where it is bound"


def test_a_decoder_keeps_its_session_whatever_it_has():
    router, _ = apart(1, 2)
    home = router.route(ask("0", chain("p", 20), session="s")).decode
    assert router.route(ask("1", chain("q", 20), session="s")).decode == home, "it computes no prompts"


def test_a_session_that_is_idle_for_long_is_forgotten():
    router, clock = engines(2, session_idle_s=10.0)
    router.route(ask("0", session="s")), clock.advance(11), router.route(ask("1", session="t"))
    assert router.stats()["sessions"] == 1


def test_only_kv_aware_is_sticky_unless_told_otherwise():
    assert [engines(policy=policy)[0].sticky for policy in POLICIES] == [False, False, True]
    router, _ = engines(4, "random", sticky=True)
    assert len({router.route(ask(f"{i}", session="s")).decode for i in range(20)}) == 1
    assert not engines(sticky=False)[0].sticky


# --- places -----------------------------------------------------------------------------------------------

def test_a_place_is_held_until_the_end_and_then_free():
    router, _ = engines(2, places=1)
    for end, name in ((router.finished, "a"), (router.cancelled, "b"), (router.failed, "c")):
        router.route(ask(name)), router.route(ask("other"))
        with pytest.raises(NoPlace, match="all 2 decoders that are up are full"):
            router.route(ask("third"))
        assert end(name) and not end(name) and router.finished("other")
    router.check()
    assert router.stats()["places"] == 0


def test_a_place_of_which_nothing_is_heard_is_given_back():
    router, clock = engines(1, places=1, lease_s=10.0)
    router.route(ask("a"))
    for hear in (router.prefilled, router.progressed, router.progressed):
        clock.advance(9)
        assert hear("a")
        with pytest.raises(NoPlace):
            router.route(ask("b"))
    clock.advance(10)
    assert router.route(ask("b")).decode == "w0"
    assert not router.progressed("a") and not router.finished("a")
    assert router.expired() == ["a"] and router.expired() == []
    router.check()


def test_a_request_has_one_place():
    router, _ = engines()
    router.route(ask("a"))
    with pytest.raises(ValueError, match="'a' holds a place already"):
        router.route(ask("a"))
    router.failed("a")
    router.route(ask("a"))


def test_a_refusal_changes_nothing():
    router, _ = apart(1, 1, places=1)
    router.route(ask("a", blocks=5, session="s"))
    before = router.stats()
    for _ in range(3):
        with pytest.raises(NoPlace):
            router.route(ask("b", blocks=5, session="s"))
    assert router.stats() == before
    router.worker_down("p0"), router.cancelled("a")
    before = router.stats()
    with pytest.raises(NoWorker, match="no prefill worker is up"):
        router.route(ask("b", blocks=5, session="t"))
    assert router.stats() == before


def test_a_long_request_counts_with_its_length_now():
    router, _ = engines(1)
    router.route(ask("a", blocks=5))
    router.progressed("a", num_tokens=7 * BLOCK + 1)
    assert router.stats()["workers"]["w0"]["decode_blocks"] == 8
    router.finished("a")
    router.check()


# --- workers that fail ------------------------------------------------------------------------------------

def test_a_breaker_opens_and_closes_by_one_trial():
    clock = VirtualClock()
    breaker = Breaker(clock, failure_threshold=3, failure_window_s=30, cool_off_s=5, max_cool_off_s=15)
    breaker.failed(), clock.advance(31), breaker.failed(), breaker.failed()
    assert breaker.state == "closed", "the first is too long ago"
    breaker.failed()
    for cool_off in (5, 10, 15, 15):
        assert breaker.state == "open" and not breaker.lets_through and breaker.retry_after_s == cool_off
        clock.advance(cool_off)
        assert breaker.state == "half_open" and breaker.sent("trial") and not breaker.lets_through and breaker.retry_after_s is None
        assert not breaker.sent("another")
        breaker.succeeded("sent before it opened"), breaker.failed("sent before it opened")
        assert breaker.state == "half_open" and breaker.trial == "trial"
        breaker.failed("trial")
    clock.advance(15)
    breaker.sent("trial"), breaker.dropped("trial")
    assert breaker.needs_trial, "its client left: the next one is the trial"
    breaker.sent("next"), breaker.succeeded("next")
    assert breaker.state == "closed" and breaker.retry_after_s == 0
    breaker.failed(), breaker.failed(), breaker.failed()
    assert breaker.retry_after_s == 5, "a worker that proved itself starts anew"


def test_a_sick_worker_gets_nothing_until_it_is_well_and_then_one_request():
    router, clock = engines(2, sticky=False)
    router.route(ask("a")), router.route(ask("b"))
    gone = router.worker_sick("w0")
    assert len(gone) == 1 and router.state("w0") == "open"
    clock.advance(1e6)
    assert {router.route(ask(f"{i}")).decode for i in range(10)} == {"w1"}
    router.worker_well("w0")
    trial = router.route(ask("trial"))
    assert trial.decode == "w0" and trial.trial and router.state("w0") == "half_open"
    assert {router.route(ask(f"x{i}")).decode for i in range(10)} == {"w1"}, "one, until it is known how that went"
    router.prefilled("trial")
    assert router.state("w0") == "closed"
    assert "w0" in {router.route(ask(f"y{i}")).decode for i in range(10)}


def test_a_decoder_proves_itself_by_a_token_of_its_own():
    router, clock = apart(1, 1)
    router.worker_sick("d0"), router.worker_well("d0")
    router.route(ask("a")), router.prefilled("a")
    assert router.state("d0") == "half_open", "the first token came from the prefill worker"
    router.progressed("a")
    assert router.state("d0") == "closed"


def test_a_trial_of_which_nothing_is_heard_has_failed():
    router, clock = engines(1, lease_s=10, cool_off_s=5)
    router.worker_sick("w0"), router.worker_well("w0"), router.route(ask("a"))
    clock.advance(10)
    assert router.expired() == ["a"] and router.state("w0") == "open"
    with pytest.raises(NoWorker, match="the next is tried in 5.0 s") as refusal:
        router.route(ask("b"))
    assert refusal.value.retry_after_s == 5


def test_three_failures_open_it_and_the_blame_goes_to_the_worker_named():
    router, clock = apart(2, 1)
    for i in range(3):
        router.route(ask(f"{i}"))
        assert router.failed(f"{i}", worker="p0")
    assert router.state("p0") == "open" and router.state("d0") == "closed"
    assert router.route(ask("a")).prefill == "p1"
    with pytest.raises(KeyError):
        router.failed("a", worker="p7")
    router.check()


def test_a_worker_that_died_takes_along_only_what_still_needed_it():
    router, _ = apart(1, 2)
    router.route(ask("done", blocks=3)), router.route(ask("queued", blocks=3))
    router.prefilled("done")
    assert router.worker_down("p0") == ["queued"], "the other's decoder can compute what it could not read"
    assert router.worker_down("p0") == [] and router.state("p0") == "down"
    with pytest.raises(NoWorker) as refusal:
        router.route(ask("queued"))
    assert refusal.value.retry_after_s is None
    router.worker_up("p0")
    assert router.route(ask("queued")).prefill == "p0"
    router.check()


def test_a_worker_that_dies_again_and_again_waits_for_its_trial():
    router, clock = engines(2, sticky=False)
    for _ in range(3):
        router.worker_down("w0"), router.worker_up("w0")
    assert router.state("w0") == "open" and router.route(ask("a")).decode == "w1"
    clock.advance(5)
    assert router.route(ask("b")).decode == "w0"


def test_excluded_workers_are_a_last_resort():
    router, _ = engines(2)
    assert {router.route(ask(f"{i}", exclude=["w0"])).decode for i in range(8)} == {"w1"}
    router.worker_down("w1")
    assert router.route(ask("a", exclude=["w0"])).decode == "w0"


@pytest.mark.parametrize("policy, workers, message", [
    ("fastest", [WorkerSpec("a")], "router_policy='fastest': use one of random, round_robin, kv_aware"),
    ("random", [], "roles of nobody"),
    ("random", [WorkerSpec("a"), WorkerSpec("a")], "'a' is there twice"),
    ("random", [WorkerSpec("a", "prefill")], "roles prefill; give engines that do both, or prefill and decode workers"),
    ("random", [WorkerSpec("a", "prefill"), WorkerSpec("b")], "roles both, prefill"),
])
def test_what_cannot_be_routed_is_refused(policy, workers, message):
    with pytest.raises(ValueError, match=message):
        Router(policy, workers, block_size=64, clock=VirtualClock())


# --- anything, in any order -------------------------------------------------------------------------------

class Anything(RuleBasedStateMachine):
    """Requests and workers come and go. A model holds what must be true: who is up, who may get what, whose places are taken."""

    together = True

    def __init__(self):
        super().__init__()
        names = ["w0", "w1", "w2"] if self.together else ["p0", "p1", "d0", "d1"]
        role = {"w": "both", "p": "prefill", "d": "decode"}
        self.clock = VirtualClock()
        self.router = Router("kv_aware", [WorkerSpec(name, role[name[0]], places=3) for name in names], block_size=BLOCK, clock=self.clock,
                             options=RouterOptions(lease_s=20.0, cool_off_s=5.0, failure_threshold=2, session_idle_s=1e9))
        self.names, self.count = names, 0
        self.live = {}  # request -> [route, end of its lease, prefilled]
        self.down, self.sick, self.bound = set(), set(), {}

    decoders = property(lambda self: [name for name in self.names if name[0] in "wd"])

    def lapse(self):
        for name in [name for name, (_, until_s, _) in self.live.items() if until_s <= self.clock()]:
            del self.live[name]

    @rule(blocks=st.integers(0, 30), session=st.sampled_from([None, "a", "b", "c"]), avoid=st.sampled_from([0, 0, 1]))
    def routed(self, blocks, session, avoid):
        self.count += 1
        name = f"r{self.count}"
        exclude = [self.names[-1]] if avoid else []
        up = {worker for worker in self.names if self.router.available(worker)}
        trials = {worker for worker in self.names if self.router.state(worker) == "half_open"}
        full = {worker for worker in self.decoders if sum(route.decode == worker for route, *_ in self.live.values()) >= 3}
        try:
            route = self.router.route(ask(name, blocks=blocks, session=session, exclude=exclude))
        except NoWorker:
            assert not up & set(self.decoders) or not up - set(self.decoders) and not self.together
            return
        except NoPlace:
            assert up & set(self.decoders) <= full
            return
        assert {route.prefill, route.decode} <= up - self.down - self.sick, "a worker that is down or sick got a request"
        assert route.decode not in full
        assert route.trial is bool({route.prefill, route.decode} & trials)
        free = up & set(self.decoders) - full
        if session and self.bound.get(session) in free - set(exclude):
            assert route.decode == self.bound[session], "a session left a decoder that could have taken it"
        if exclude and free - set(exclude):
            assert route.decode not in exclude
        if session and not (self.bound.get(session) in up - set(exclude)):
            self.bound[session] = route.decode
        self.live[name] = [route, self.clock() + 20, False]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["prefilled", "progressed", "finished", "cancelled", "failed", "failed"]))
    def heard(self, data, how):
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert getattr(self.router, how)(name)
        if how in ("prefilled", "progressed"):
            self.live[name][1] = self.clock() + 20
            self.live[name][2] |= how == "prefilled"
        else:
            del self.live[name]

    @rule(how=st.sampled_from(["prefilled", "progressed", "finished", "cancelled", "failed"]))
    def heard_of_a_stranger(self, how):
        assert getattr(self.router, how)("nobody") is False

    @rule(data=st.data(), how=st.sampled_from(["worker_down", "worker_sick"]))
    def lost(self, data, how):
        worker = data.draw(st.sampled_from(self.names))
        (self.down if how == "worker_down" else self.sick).add(worker)
        gone = getattr(self.router, how)(worker)
        expected = {name for name, (route, _, prefilled) in self.live.items() if route.decode == worker or route.prefill == worker and not prefilled}
        assert set(gone) == expected and len(gone) == len(expected)
        for name in gone:
            del self.live[name]

    @rule(data=st.data())
    def back(self, data):
        worker = data.draw(st.sampled_from(self.names))
        if worker in self.down:
            self.router.worker_up(worker)
            self.down.discard(worker), self.sick.discard(worker)
        else:
            self.router.worker_well(worker)
            self.sick.discard(worker)

    @rule(seconds=st.sampled_from([0.5, 5.0, 12.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.router.expired()
        self.lapse()

    @invariant()
    def nothing_leaks(self):
        self.router.check()
        stats = self.router.stats()
        assert stats["places"] == len(self.live)
        for name, worker in stats["workers"].items():
            assert worker["places"] == sum(route.decode == name for route, *_ in self.live.values())
            assert (worker["state"] == "down") is (name in self.down)
            half_open = [n for n, (route, *_) in self.live.items() if self.router._workers[name].breaker.trial == n]
            assert worker["state"] != "half_open" or len(half_open) <= 1

    def teardown(self):
        for name in list(self.live):
            self.router.finished(name)
        assert all(not (w["places"] or w["prefill_blocks"] or w["decode_blocks"]) for w in self.router.stats()["workers"].values())
        for worker in self.names:  # whatever has happened: a cluster whose workers are all well again serves again
            self.router.worker_up(worker), self.router.worker_well(worker)
        self.clock.advance(1000)
        assert self.router.route(ask("last"))


class AnythingApart(Anything):
    together = False


TestAnything, TestAnythingApart = Anything.TestCase, AnythingApart.TestCase
TestAnything.settings = TestAnythingApart.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
