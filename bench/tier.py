"""What a session's history costs when it comes back: computed again, from host memory, from disk.

`python -m bench tier` prints the rows; `python -m bench.tier` also keeps the result in `book/results/`. smollm2 in float32, 2,048 tokens in 32 blocks of
64, which are 94 MB of rows. The ways take turns in one process, so that a disturbance meets all of them. "From disk" is measured
twice: as it is after a restart of the engine, when the kernel still has the files in its page cache, and after each file has been
written back and dropped from there (fsync, posix_fadvise DONTNEED), which is looked at before reading (RWF_NOWAIT).
"""
from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from minengine.workload.stats import median

from .harness import OUT, Bench, Variant
from .keep import keep, measurement
from .table import Row, at_least, figure, ratio
from .workload import prompt

TOKENS, NEW_TOKENS, BLOCK_SIZE, ROUNDS = 2048, 64, 64, 9
LIMIT_S = 120.0


def rows(bench: Bench) -> list[Row]:
    result = _measure(bench)
    note = f"{result['nbytes'] / 1e6:.0f} MB; recomputing takes a median of {median(result['recompute_ms']):.0f} ms"
    speed = [result["nbytes"] / 1e9 / (ms / 1e3) for ms in result["host_ms"]]
    return [
        ratio("2,048 tokens recomputed, against loading them from host memory", result["recompute_ms"], result["host_ms"], at_least(20), "ms", note),
        ratio("2,048 tokens recomputed, against loading them from disk, files in the page cache", result["recompute_ms"], result["disk_cached_ms"],
              at_least(10), "ms", f"read by {result['disk_io']}; {_share(result['resident_before_cached'])} of the pages were in the page cache before"),
        ratio("2,048 tokens recomputed, against loading them from disk, page cache dropped", result["recompute_ms"], result["disk_dropped_ms"],
              at_least(10), "ms", f"read by {result['disk_io']}; {_share(result['resident_before_dropped'])} of the pages were in the page cache before"),
        ratio("the same with plain reads instead of NIXL", result["recompute_ms"], result["disk_dropped_plain_ms"], None, "ms"),
        ratio("loading into a pool whose blocks lie whole (BLHNC), against one whose do not (LBNHC)", result["host_in_place_ms"], result["host_ms"], None, "ms"),
        figure("reading and checking, host memory to pool", speed, None, "GB/s"),
        figure("storing to host memory, out of the pool", [result["nbytes"] / 1e9 / (ms / 1e3) for ms in result["store_ms"]], None, "GB/s"),
        ratio(f"first token of a turn: {TOKENS:,} tokens of history computed, against loaded from host memory, {NEW_TOKENS} new ones computed in both",
              result["cold_ttft_ms"], result["tier_ttft_ms"], None, "ms"),
    ]


def _measure(bench: Bench, rounds: int = ROUNDS) -> dict[str, Any]:
    return bench.run(Variant("tiers", "bench.tier:histories", {"rounds": rounds})).result


def _share(samples: list[float]) -> str:
    return f"{100 * min(samples):.0f} to {100 * max(samples):.0f}%"


class _Pools:
    """smollm2's engine with tiers, and a second pool in another order to load into."""

    def __init__(self, threads: int, folder: Path) -> None:
        from minengine.disagg.connector import WorkerConnector
        from minengine.engine import LLMEngine
        from minengine.engine_args import EngineArgs
        from minengine.kv.fingerprint import model_fingerprint
        from minengine.kv.layout import KVLayout
        from minengine.kv.tier import Tier
        from minengine.kv.tier_blocks import BlockBytes, Geometry
        from minengine.kv.tier_open import tier_folders
        from minengine.kv.tier_stack import TierStack

        import torch
        torch.set_num_threads(threads)
        blocks = 3 * (TOKENS + NEW_TOKENS) // BLOCK_SIZE + 8
        self.engine = LLMEngine(EngineArgs(model="smollm2", device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_gpu_blocks_override=blocks,
                                           max_num_batched_tokens=512, load_admission="event", num_threads=threads))
        kv = self.engine.kv
        geometry = Geometry.of(kv.kv_layout, kv.kv_cache_dtype, model_fingerprint(self.engine.model))
        room = 8 * TOKENS // BLOCK_SIZE * (geometry.nbytes + 4096)
        self.host = Tier(tier_folders(str(folder))["host"], geometry, room, "host")
        self.disk = Tier(folder, geometry, room, "disk")
        self.plain = Tier(folder, geometry, room, "disk", io="plain")
        bytes_of = BlockBytes(kv.storage, kv.kv_layout)
        other = KVLayout("BLHNC", kv.kv_layout.num_layers, TOKENS // BLOCK_SIZE, kv.kv_layout.num_heads, BLOCK_SIZE, kv.kv_layout.row_bytes)
        whole = BlockBytes(torch.zeros(other.nbytes, dtype=torch.uint8), other)
        self.stacks = {"host": TierStack([self.host], bytes_of), "disk": TierStack([self.disk], bytes_of), "plain": TierStack([self.plain], bytes_of),
                       "in place": TierStack([self.host], whole)}
        self.nbytes = geometry.nbytes * TOKENS // BLOCK_SIZE
        self.bytes_of, self.whole = bytes_of, whole
        self.woken = threading.Event()
        self.connector = WorkerConnector(self.engine, tier=self.stacks["host"], wake=self.woken.set)

    def move(self, kind: str, way: str, hashes: list[bytes], block_ids: list[int]) -> float:
        """Milliseconds from the call to the last block."""
        done = threading.Event()
        job = getattr(self.stacks[way], kind)(hashes, block_ids, lambda job: done.set())
        if not done.wait(LIMIT_S) or job.num_blocks != len(hashes):
            why = [tier.last_refusal for tier in self.stacks[way].tiers if tier.last_refusal]
            raise RuntimeError(f"{kind} by '{way}' moved {job.num_blocks} of {len(hashes)} blocks (ended: {job.ended}) {why}")
        return (job.end_s - job.queued_s) * 1e3

    def first_token_ms(self, ids: list[int], cached: int, use_tier: bool) -> float:
        from minengine import SamplingParams

        scheduler = self.engine.scheduler
        connector = self.connector if use_tier else None
        scheduler.connector = scheduler.loads.connector = connector
        name = f"r{time.perf_counter_ns()}"
        request = self.engine.add_request(name, ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        outputs = []
        while not outputs:
            if self.engine.idle and not self.woken.wait(LIMIT_S):  # as a server does: a loop that looks all the time takes the interpreter from those that load
                raise RuntimeError(f"{request} still waits after {LIMIT_S:.0f} s")
            self.woken.clear()
            self.connector.poll()
            outputs = self.engine.step()
        out = outputs[0]
        if request.error or out.num_cached_tokens != cached:
            raise RuntimeError(f"{out.num_cached_tokens} tokens were cached, {cached} were expected; error: {request.error}")
        return out.metrics.ttft_s * 1e3

    def close(self) -> None:
        for stack in self.stacks.values():
            stack.close()
        for tier in (self.host, self.disk):
            shutil.rmtree(tier.path, ignore_errors=True)


def histories(threads: int, rounds: int = ROUNDS) -> dict[str, Any]:
    import numpy as np

    from minengine.kv.blocks import block_hashes

    OUT.mkdir(parents=True, exist_ok=True)
    samples: dict[str, Any] = {name: [] for name in (
        "recompute_ms", "host_ms", "host_in_place_ms", "disk_cached_ms", "disk_dropped_ms", "disk_dropped_plain_ms", "store_ms", "resident_before_cached",
        "resident_before_dropped", "cold_ttft_ms", "tier_ttft_ms")}
    with tempfile.TemporaryDirectory(dir=OUT) as temporary:
        pools = _Pools(threads, Path(temporary) / "tier")
        engine, blocks = pools.engine, TOKENS // BLOCK_SIZE
        try:
            for turn in range(rounds + 1):  # the first one warms up
                ids = prompt(TOKENS, seed=turn)
                hashes = block_hashes(ids, BLOCK_SIZE)
                engine.reset_prefix_cache()
                recompute = pools.first_token_ms(ids, 0, use_tier=False)
                there = engine.pool.find(hashes)
                before = [_bytes(pools.bytes_of, block) for block in there]
                assert len(there) == blocks, "the engine has not kept the history"
                store = pools.move("store", "host", hashes, there)
                pools.move("store", "disk", hashes, there)
                free = engine.pool.allocate(blocks)
                found: dict[str, float] = {"recompute_ms": recompute, "store_ms": store}

                def load(name: str, way: str, into: list[int], source: Any) -> None:
                    found[name] = pools.move("load", way, hashes, into)
                    if any(not np.array_equal(old, _bytes(source, block)) for old, block in zip(before, into)):
                        raise RuntimeError(f"{name}: other bytes came back")

                load("host_ms", "host", free, pools.bytes_of)
                load("host_in_place_ms", "in place", list(range(blocks)), pools.whole)
                found["resident_before_cached"] = _resident(pools.disk, hashes)
                load("disk_cached_ms", "disk", free, pools.bytes_of)
                _drop(pools.disk, hashes)
                found["resident_before_dropped"] = _resident(pools.disk, hashes)
                load("disk_dropped_ms", "disk", free, pools.bytes_of)
                _drop(pools.disk, hashes)
                load("disk_dropped_plain_ms", "plain", free, pools.bytes_of)
                engine.pool.release(free)
                turn_ids = ids + prompt(NEW_TOKENS, seed=1000 + turn)
                engine.reset_prefix_cache()
                found["cold_ttft_ms"] = pools.first_token_ms(turn_ids, 0, use_tier=False)
                engine.reset_prefix_cache()
                found["tier_ttft_ms"] = pools.first_token_ms(turn_ids, TOKENS, use_tier=True)
                for stack in pools.stacks.values():
                    stack.wait_idle(LIMIT_S)
                if turn:
                    for name, value in found.items():
                        samples[name].append(value)
            return {**samples, "nbytes": pools.nbytes, "disk_io": pools.disk.io.name}
        finally:
            pools.close()


def _bytes(source: Any, block: int) -> Any:
    out = source.buffer(1)[0]
    source.read(block, out)
    return out


def _drop(tier: Any, hashes: list[bytes]) -> None:
    """Out of the page cache; what is not yet on the disk cannot be dropped."""
    for h in hashes:
        found = tier.open(h)
        os.fsync(found.fd)
        os.posix_fadvise(found.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        found.close()


def _resident(tier: Any, hashes: list[bytes]) -> float:
    """The part of some pages that a read finds without waiting for the disk. Looks at every sixteenth page, backwards: a read that
    misses may start a read ahead."""
    hits = looks = 0
    for h in hashes:
        found = tier.open(h)
        os.posix_fadvise(found.fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(os.fstat(found.fd).st_size // 4096 * 4096 - 4096, -1, -16 * 4096):
            looks += 1
            try:
                hits += os.preadv(found.fd, [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                pass
        found.close()
    return hits / looks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tier", description="What a session's history costs when it comes back; kept in book/results/.")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples of each (default: {ROUNDS})")
    args = parser.parse_args()
    bench = Bench(args.threads)
    result, foreign = _measure(bench, args.rounds), bench.runs[-1].foreign_cores
    against = [("host", "host_ms", "from host memory"), ("disk-page-cache", "disk_cached_ms", "from disk, the files in the page cache"),
               ("disk-dropped", "disk_dropped_ms", "from disk, the page cache dropped for these files"),
               ("disk-dropped-plain", "disk_dropped_plain_ms", "from disk by plain reads, the page cache dropped")]
    history = f"a history of {TOKENS:,} tokens (smollm2, float32, {result['nbytes'] / 1e6:.0f} MB)"
    kept = [measurement("tier-recompute-ms", f"{history} computed again, up to its first token", "ms", result["recompute_ms"]),
            measurement("tier-store-ms", f"{history} stored from the pool to host memory", "ms", result["store_ms"])]
    for name, key, how in against:
        kept.append(measurement(f"tier-{name}-ms", f"{history} back in the pool {how}", "ms", result[key]))
        faster = [cold / warm for cold, warm in zip(result["recompute_ms"], result[key])]
        kept.append(measurement(f"tier-{name}-speedup", f"how many times faster {history} comes back {how} than computed again", "x", faster))
    for name, key in (("before-page-cache", "resident_before_cached"), ("before-dropped", "resident_before_dropped")):
        kept.append(measurement(f"tier-resident-{name}", "share of the files' pages in the page cache before that read from disk", "", result[key]))
    kept.append(measurement("tier-cold-ttft-ms", f"first token of a turn of {NEW_TOKENS} new tokens, {history} computed", "ms", result["cold_ttft_ms"]))
    kept.append(measurement("tier-ttft-ms", f"first token of a turn of {NEW_TOKENS} new tokens, {history} loaded from host memory", "ms", result["tier_ttft_ms"]))
    if foreign is not None:
        kept.append(measurement("tier-foreign-cores", "cores that other programs kept busy meanwhile: a quiet machine has none", "cores", [foreign]))
    for one in kept:
        one["unit"] = one["unit"] or "of 1"
        print(f"{one['name']:32} {one['median']:9.2f} {one['unit']:5} ({one['spread'][0]:.2f} to {one['spread'][1]:.2f}), n={one['n']}: {one['what']}")
    print(f"disk read by {result['disk_io']}")
    print(keep("tier", f"python -m bench.tier --threads {args.threads} --rounds {args.rounds}", kept).name)


if __name__ == "__main__":
    main()
