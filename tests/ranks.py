"""Rank processes that stay for a whole test module, and what they run: a rank's part of a model, without engine or scheduler."""
import itertools
import os
import time
from functools import lru_cache
from pathlib import Path

import torch
from model_harness import Requests

from minengine.arithmetic import topology
from minengine.model.decoder import load_model
from minengine.parallel.comm import Parallel, PeerLost
from minengine.parallel.engine import RankRunner
from minengine.parallel.group import Group
from minengine.parallel.ranks import Ranks

RANKS = 4
numbers = itertools.count()


@lru_cache
def pool():
    """Four ranks, this process among them. Those of a smaller group are the first."""
    torch.set_num_threads(1)
    return Group(RANKS, 1, f"TP{RANKS}")


def run(function, name, *args):
    """`function(parallel, *args)` on every rank of topology `name`: the results, in the order of ranks."""
    return pool().call(_run, next(numbers), name, function, *args)[: topology(name).gpus]


def _run(member, number, name, function, *args):
    shape = topology(name)
    if member.rank >= shape.gpus:
        return None
    folder = Path(member.folder) / str(number)
    folder.mkdir(exist_ok=True)
    return function(Parallel(Ranks(shape, member.rank), folder, torch.device("cpu"), 30.0), *args)


def logits(parallel, directory, token_ids, prompts, **options):
    """Logits of every token of every request; under data parallelism, of this rank's share of the requests."""
    ranks = parallel.ranks
    mine = {name: ids for i, (name, ids) in enumerate(token_ids.items()) if i % ranks.dp_size == ranks.dp_rank}
    decoder = load_model(directory, parallel=parallel)
    requests = Requests(decoder, mine, config=ranks.local(decoder.config), context=ranks.dcp_size, **options)
    steps = requests.steps(prompts)
    if ranks.dp_size == 1:
        for _ in steps:
            pass
        return requests.result()
    runner = RankRunner(decoder, requests.kv)
    while together(parallel, busy := any(requests.computed[name] < len(ids) for name, ids in mine.items())):
        if busy:
            next(steps)
        else:
            runner.dummy_forward()
    return requests.result() if mine else {}


def logits_with(parallel, directory, token_ids, prompts, options):
    return logits(parallel, directory, token_ids, prompts, **options)


def together(parallel, busy):
    """Whether any rank is."""
    return bool(parallel.everyone.all_reduce(torch.tensor([float(busy)]), "test.busy"))


# --- how ranks end -----------------------------------------------------------------------------------------------


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within_s=10.0):
    """Whether all have ended by then."""
    until = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, pids))


def pid(member):
    return os.getpid()


def sleeps(member):
    time.sleep(600)


def follows_and_fails(member, pids):
    """Rank 1 has lost a peer, it says; then rank 2 ends of itself."""
    if member.rank == 1:
        raise PeerLost("rank 2 is said to be lost")
    while alive(pids[1]):
        time.sleep(0.01)
    return 1 // (2 - member.rank)
