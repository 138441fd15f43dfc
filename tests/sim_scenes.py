"""Small deployments and sessions for the tests of the cluster's simulator."""
from random import Random

from minengine.simulate.deployment import Deployment
from minengine.simulate.work import Work
from minengine.workload.traces import Session, Subagent, TraceRequest

SIZE = 16  # tokens of a block, in the traces too


class StandIn:
    """Whole numbers, none of them round: a step's time grows with every part of the work, decodes' with lengths and with rows up to `index_topk`."""

    def __init__(self, topology, role, index_topk=100, hand_over_ps=0):
        self.index_topk, self.hand_over_ps = index_topk, hand_over_ps

    def rank_ps(self, works):
        most = max(work.decodes + work.prefill_tokens for work in works)
        return [4_000_000_007 + 1_000_003 * most + 10_007 * work.context + 2_003 * work.attended + 90_000_001 * work.prefill_tokens
                + 1_009 * work.prefill_pairs + 50_021 * work.prefill_attended + 30_011 * work.sampled if work != Work() else 3_000_000_019 for work in works]

    def transfer_ps(self, descriptors, nbytes):
        return 500_000_003 * descriptors + nbytes

    def retrieve_ps(self, nbytes):
        return 7 * nbytes


def deployment(**changes):
    settings = {"block_size": SIZE, "max_num_batched_tokens": 64, "max_num_seqs": 4, "cached_tokens": 60 * SIZE, "prefill_cached_tokens": 60 * SIZE}
    return Deployment(**{**settings, **changes})


def session(rng: Random, name: str, requests: int = 5, subagents: int = 1, most_tokens: int = 400) -> Session:
    """Turns that grow, sometimes compacted, with helpers that begin as they do."""
    def turns(n, start_s):
        ids, at, found = list(common), start_s, []
        for _ in range(n):
            if rng.random() < 0.15:
                ids = ids[: rng.randint(0, len(ids))]
            ids = (ids + [rng.randrange(10 ** 6) for _ in range(rng.randint(0, 6))])[: most_tokens // SIZE]
            tokens = len(ids) * SIZE + rng.choice([0, 0, 3, 15])
            took = rng.random() * 3
            found.append(TraceRequest(at, max(1, tokens), rng.choice([1, 1, 5, 40, 90]), tuple(ids), SIZE, api_time_s=took, think_time_s=rng.random() * 2))
            at += took + rng.random() * 2
        return found, at

    common = [rng.randrange(10 ** 6) for _ in range(rng.randint(0, 4))]
    own, end_s = turns(requests, 0.0)
    helpers = []
    for _ in range(subagents):
        start_s = rng.random() * end_s
        items, last_s = turns(rng.randint(1, 3), start_s)
        helpers.append(Subagent("helper", start_s, last_s - start_s, tuple(items)))
    return Session(name, SIZE, (*own, *helpers))


def sessions(seed: int, number: int = 3, **how) -> list[Session]:
    rng = Random(seed)
    return [session(rng, f"s{i}", **how) for i in range(number)]
