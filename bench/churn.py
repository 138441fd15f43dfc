"""How long the runs of neighbouring blocks are after an hour of use: what a transfer's piece count hangs on.

`python -m bench churn` prints the rows; `python -m bench.churn` also keeps the result in `book/results/`. The engine's own scheduler replays
Mooncake's conversation trace (an hour, 12,031 requests) in virtual time against a pool of 32,768 blocks of 64 tokens, a thirtieth of what
the trace asks for, so nearly every block that is handed out had another content before. When a prompt's last token has been computed its
blocks are looked at: that is when they would move. Which step takes how long is made up (a machine that computes 100,000 prompt tokens a
second); what is measured is a count, the same on every machine.

Two orders stand against the pool's own: the queue that the engine had before (free blocks in the order in which they came back, and strict
LRU) and first-fit (of the free blocks those with the smallest numbers, in ascending order; strict LRU).
"""
from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any, Iterable

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, at_least, figure, ratio

NUM_BLOCKS, BLOCK_SIZE = 32_768, 64
STEP_S, PREFILL_S, DECODE_S = 0.05, 1e-5, 5e-5  # a step, a prompt token, a decode token
MINUTE_S, LOOKED_AT = 60.0, 20  # the last minutes of the trace, a sample each
POOLS = {"own": "in runs", "first_fit": "first-fit", "queue": "as they came back"}


def rows(bench: Bench) -> list[Row]:
    found = _measure(bench)
    own = found["own"]
    return [
        ratio("mean run length of a prompt's blocks, against first-fit", own["run_length"], found["first_fit"]["run_length"], at_least(1.5), "blocks",
              f"an hour of {own['trace']}; {own['blocks_a_prompt']:.0f} blocks a prompt, the last {LOOKED_AT} minutes are looked at"),
        ratio("the same, against blocks as they came back", own["run_length"], found["queue"]["run_length"], None, "blocks"),
        *(figure(f"prompt tokens found in the pool, blocks {how}", [100 * found[name]["hit_share"]], None, "%") for name, how in POOLS.items()),
    ]


def _measure(bench: Bench) -> dict[str, dict[str, Any]]:
    return {name: bench.run(Variant(f"blocks {how}", "bench.churn:replay", {"order": name})).result for name, how in POOLS.items()}


def replay(threads: int, order: str) -> dict[str, Any]:
    """An hour of the trace; `order` is a key of POOLS.

    Returns:
        run_length: blocks over runs of the prompts that were computed in one of the last minutes, a value a minute.
        hit_share: of all prompt tokens, those whose blocks were found. And what else the rows say.
    """
    from minengine.request import Request, SamplingParams
    from minengine.schedule import Scheduler
    from minengine.workload.traces import find_traces, read_mooncake

    source = find_traces()
    trace = list(read_mooncake(source.mooncake))
    pool = make_pool(order)
    scheduler = Scheduler(pool, max_num_batched_tokens=8192, max_num_seqs=512)
    now_s, arrived, written = 0.0, 0, 1 << 31  # what is written is never asked for again: the trace does not say what it was
    seen: list[tuple[float, int, int]] = []  # when a prompt was done, its blocks, their runs
    cached = asked = 0
    while arrived < len(trace) or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now_s = max(now_s, trace[arrived].start_s)
        while arrived < len(trace) and trace[arrived].start_s <= now_s:
            item = trace[arrived]
            params = SamplingParams(max_tokens=max(1, item.output_tokens), ignore_eos=True)
            request = Request(f"r{arrived}", [0] * item.input_tokens, params, max_model_len=item.input_tokens + params.max_tokens)
            request.block_hashes = hashes(item)
            scheduler.add(request)
            arrived += 1
        step = scheduler.schedule(now_s)
        now_s += STEP_S + PREFILL_S * sum(n for _, n in step.prefills) + DECODE_S * len(step.decodes)
        sampled = step.sampled()
        for request in sampled:
            if request.num_tokens == request.num_prompt_tokens:
                table = request.block_ids[:pool.blocks_for(request.num_tokens)]
                seen.append((now_s, len(table), num_runs(table)))
                cached, asked = cached + request.num_cached_tokens, asked + request.num_prompt_tokens
        scheduler.update(step, range(written, written + len(sampled)), now_s)
        written += len(sampled)
    end_s = trace[-1].start_s
    minutes = [[(blocks, runs) for done_s, blocks, runs in seen if end_s - (i + 1) * MINUTE_S < done_s <= end_s - i * MINUTE_S] for i in range(LOOKED_AT)]
    return {"run_length": [sum(b for b, _ in minute) / sum(r for _, r in minute) for minute in reversed(minutes) if minute],
            "hit_share": cached / asked, "num_evictions": pool.num_evictions, "blocks_a_prompt": sum(b for _, b, _ in seen) / len(seen),
            "trace": source.name, "num_requests": len(trace)}


def hashes(item: Any) -> list[bytes]:
    """A name for each full block of a prompt, the same for the same tokens: the trace has no tokens to hash, only ids of runs of them."""
    parts = item.block_size // BLOCK_SIZE
    return [(h * parts + part).to_bytes(8) for h in item.hash_ids for part in range(parts)][:item.input_tokens // BLOCK_SIZE]


def num_runs(table: list[int]) -> int:
    """In how many pieces a table is that moves block by block, each piece blocks that follow each other."""
    return 1 + sum(b != a + 1 for a, b in zip(table, table[1:]))


# --- what it is compared with -----------------------------------------------------------------------------------

class Queue:
    """`Runs` as far as a pool without a reserve needs it: free blocks in the order in which they came back, then those evicted, oldest first."""

    def __init__(self, size: int) -> None:
        self._numbers = deque(range(size))

    @property
    def count(self) -> int:
        return len(self._numbers)

    def add(self, numbers: Iterable[int]) -> None:
        self._numbers.extend(numbers)

    def take(self, n: int, after: int | None = None) -> list[int]:
        return [self._numbers.popleft() for _ in range(n)]


class LowestFirst(Queue):
    """First-fit: the smallest numbers, in ascending order."""

    def __init__(self, size: int) -> None:
        self._numbers = list(range(size))

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            heappush(self._numbers, number)

    def take(self, n: int, after: int | None = None) -> list[int]:
        return [heappop(self._numbers) for _ in range(n)]


def make_pool(order: str) -> Any:
    from minengine.kv.blocks import BlockPool

    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    if order != "own":
        pool._reserve = 0  # strict LRU
        pool._ready = {"first_fit": LowestFirst, "queue": Queue}[order](NUM_BLOCKS)
    return pool


def main() -> None:
    found = _measure(Bench())
    what = f"mean run length of a prompt's blocks after an hour of the Mooncake trace, a sample a minute, blocks handed out {{}}; {NUM_BLOCKS:,} blocks of {BLOCK_SIZE}"
    kept = []
    for name, how in POOLS.items():
        kept.append(measurement(f"churn-{name.replace('_', '-')}", what.format(how), "blocks", found[name]["run_length"]))
        kept.append(measurement(f"churn-{name.replace('_', '-')}-hits", f"prompt tokens found in the pool in that hour, blocks handed out {how}", "%",
                                [100 * found[name]["hit_share"]]))
    against = [a / b for a, b in zip(found["own"]["run_length"], found["first_fit"]["run_length"])]
    kept.append(measurement("churn-against-first-fit", "run length in runs over run length first-fit, minute by minute", "x", against))
    print(keep("churn", "python -m bench.churn", kept).name)


if __name__ == "__main__":
    main()
