"""Two workers with real threads under a random load: aborts, failing and hanging transfers, leases that run out, pools that are too small. No
token is wrong and no block is lost."""
import random

import pytest

from minengine.disagg.leases import OutOfLeases
from minengine.disagg.source import Reserve
from gated import Gated
from test_engine import alone, assert_same, prompt
from workers import so_far, workers

LENGTHS = (15, 33, 48, 70)


class Front:
    """The smallest one that keeps its promises: every request ends right, or was aborted."""

    def __init__(self, p, d, way, draw):
        self.p, self.d, self.way, self.draw = p, d, way, draw
        self.where = {}  # by name: "reserved", "prefill", "decode", "done", "aborted"
        self.asked = {}
        self.doomed = {}  # by name: the turns after which its caller gives up. Drawn once, so that slow transfers don't make everybody give up

    def begin(self, name):
        length, family = self.draw.choice(LENGTHS), self.draw.randrange(3)
        self.asked[name] = (length, family)
        if self.draw.random() < 0.25:
            self.doomed[name] = self.draw.randrange(40)
        ids = prompt(199, length, family)
        if self.way == "push":
            self.d.add(name, ids, source=Reserve(self.p.connector.facts))
            self.where[name] = "reserved"
        else:
            self.p.add(name, ids, hold=True)
            self.where[name] = "prefill"

    def turn(self):
        p, d = self.p, self.d
        while d.reserved:
            name, target = d.reserved.pop(0)
            if self.where[name] == "reserved" and p.connector.push_to(name, target):
                p.add(name, prompt(199, *self.asked[name]), hold=True)
                self.where[name] = "prefill"
        p.turn()
        for name in [name for name, at in self.where.items() if at == "prefill" and name in p.scheduler.held]:
            try:
                source = p.connector.hold(name)
            except OutOfLeases:
                p.engine.release_request(name)
                source = None
            ids = prompt(199, *self.asked[name])
            if self.way == "push":
                d.connector.resume(name, so_far(p, name))
            else:
                d.add(name, ids, resume=so_far(p, name), source=source)
            self.where[name] = "decode"
        d.turn()
        for name in [name for name, at in self.where.items() if at == "decode" and d.finished(name)]:
            self.where[name] = "done"

    def give_up(self):
        """Of the doomed, whose turns are over."""
        for name in self.busy:
            if name in self.doomed:
                self.doomed[name] -= 1
                if self.doomed[name] < 0:
                    self.where[name] = "aborted"
                    self.p.connector.release(name)
                    self.p.engine.abort_request(name)
                    self.d.engine.abort_request(name)

    @property
    def busy(self):
        return [name for name, at in self.where.items() if at not in ("done", "aborted")]


@pytest.mark.parametrize("way, admission", [("pull", "event"), ("pull", "poll"), ("push", "event"), ("push", "poll")])
@pytest.mark.parametrize("seed", range(2))
def test_random_faults_lose_no_block_and_no_token(way, admission, seed):
    draw = random.Random(f"{way} {admission} {seed}")
    with workers("llama", dict(num_gpu_blocks_override=14, kv_lease_s=0.3), dict(num_gpu_blocks_override=12, kv_cache_layout="BLHNC"), agent="shm", wrap=Gated,
                 load_admission=admission, kv_transfer="push_layers" if way == "push" else "pull", timeout_s=0.2) as (p, d):
        front, count = Front(p, d, way, draw), 0
        while count < 24 or front.busy:
            if count < 24 and len(front.busy) < 6:
                front.begin(f"{count}")
                count += 1
            front.turn()
            for worker in (p, d):
                gate = worker.agent
                gate.shut = gate.shut if draw.random() < 0.8 else {"READ", "WRITE"} if draw.random() < 0.3 else set()
                gate.fail = gate.fail if draw.random() < 0.8 else {"READ", "WRITE"} if draw.random() < 0.15 else set()
                gate.lost = way == "pull" and draw.random() < 0.1
            front.give_up()
        for worker in (p, d):
            worker.agent.shut, worker.agent.fail, worker.agent.lost = set(), set(), False
        p.clean(), d.clean()
        done = [name for name, at in front.where.items() if at == "done"]
        for name in done:
            assert_same(p.tokens(name) + d.tokens(name), *alone("llama", "float32", *front.asked[name], 8))
        outcomes = (d if way == "pull" else p).connector.totals.outcomes
        assert len(done) >= 8 and outcomes.get("landed"), outcomes
