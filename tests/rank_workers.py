"""Workers of several ranks for tests: rank 0 in this process, as in `workers`, the others in processes of their own, and what a test does to those."""
import threading
import time
from functools import partial

from gated import Gated
from minengine.engine_args import EngineArgs
from minengine.disagg import kv_io
from minengine.disagg.connector import WorkerConnector
from minengine.disagg.opening import open_group_connector
from minengine.disagg.rank_io import close_rank, open_rank_agent
from minengine.disagg.transfer import open_agent
from minengine.parallel.opening import open_engine
from workers import OPTIONS, PATIENCE_S, Worker, names, so_far


class RankWorker(Worker):
    """A worker of any topology; `gate` is rank 0's agent, with a hand on it. Of a data-parallel one the scheduler that tests look into is rank 0's."""

    def __init__(self, model, topology, role, agent="shm", timeout_s=PATIENCE_S, clock=time.perf_counter, **options):
        args = EngineArgs(model=model, topology=topology, num_threads=1, **{**OPTIONS, "kv_lease_s": 30.0 if clock is not time.perf_counter else 300.0, **options})
        self.agent = Gated(open_agent(f"{role}{next(names)}", agent))
        several = args.ranks.gpus > 1
        self.engine = open_engine(args, before=(open_rank_agent, role, agent) if several else None, storage=partial(self.agent.allocate, device="cpu"), clock=clock)
        self.woken, self.reserved, self.outputs, self.held = threading.Event(), [], {}, {}
        if several:
            self.connector = open_group_connector(self.engine, self.agent, wake=self.woken.set, fingerprint=model)
            self.connector.timeout_s = timeout_s
        else:
            self.connector = WorkerConnector(self.engine, self.agent, wake=self.woken.set, fingerprint=model, kv_transfer_timeout_s=timeout_s)

    @property
    def shape(self):
        return self.engine.args.ranks

    @property
    def pool_name(self):
        """The topology of the ranks that have a pool together."""
        return self.shape.name if self.shape.data == 1 else "TP1"

    def turn(self):
        outputs = super().turn()
        if self.shape.data > 1:
            self.held.update(self.engine.take_held())
        for out in outputs:
            if self.engine.held(out.request_id) is not None:
                self.held[out.request_id] = self.connector.hold(out.request_id)
        return outputs

    def prefilled(self, name, ids, rank=0, **more):
        """Compute a prompt and keep its rows: (source, the request's first token as a Resume)."""
        self.add(name, ids, hold=True, **self.on(rank), **more)
        self.until(lambda: name in self.held)
        return self.held.pop(name), so_far(self, name)

    def on(self, rank):
        return {"data_parallel_rank": rank} if self.shape.data > 1 else {}

    def take_facts(self, rank=0):
        """Of a rank with requests of its own; of all ranks where they split every step."""
        return self.connector.take_facts() if rank == 0 else self.engine.group.call(facts)[rank]

    def clean(self, quarantined=0):
        self.until(lambda: self.connector.num_free_blocks == self.engine.pool.num_blocks or quarantined)
        super().clean(quarantined)

    def close(self):
        self.connector.close()
        self.agent.close()
        if self.shape.gpus > 1:
            self.engine.group.call(close_rank)
        self.engine.close()


def answered(p, d, name, ids, rank=0, decoder_rank=0, max_tokens=8):
    """All tokens of a request that is prefilled on `p` and goes on on `d`."""
    source, resume = p.prefilled(name, ids, rank, max_tokens=max_tokens)
    d.add(name, ids, max_tokens, resume=resume, source=source, **d.on(decoder_rank))
    d.until(lambda: d.finished(name))
    return p.tokens(name) + d.tokens(name)


# --- what runs on the ranks ----------------------------------------------------------------------------------------------


def facts(member):
    return member.transfers.connector.take_facts() if member.rank else []


class Counting(Gated):
    begun = 0

    def _start(self, *what):
        self.begun += 1
        return super()._start(*what)


def gate(member, rank, shut=(), fail=()):
    """Have the reads of one rank other than 0 put off, or fail."""
    if member.rank == rank:
        io = _io(member)
        if not isinstance(io.agent, Gated):
            io.agent = Counting(io.agent)
        io.agent.shut, io.agent.fail = set(shut), set(fail)


def put_off(member):
    """Reads of this rank that have not begun."""
    return len(_io(member).agent.put_off) if member.rank else 0


def begun(member):
    """Reads of this rank that were asked for."""
    return _io(member).agent.begun if member.rank else 0


def small_parts(member, rank, nbytes):
    """Have one rank read so many bytes at a time."""
    if member.rank == rank:
        kv_io.PART_BYTES = nbytes


def _io(member):
    return getattr(member.transfers, "connector", member.transfers).io
