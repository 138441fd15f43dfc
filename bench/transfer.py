"""Many small copies against fewer larger ones: the same bytes of one request, from one process to another.

`python -m bench transfer` prints the rows; `python -m bench.transfer` also keeps the result in `book/results/`. The request has 200,000
tokens in GLM-5.3's 78 layers: 196 blocks of 1,024 tokens layer-major, or 3,125 of 64 block-major. Bytes change by the width of a row,
so that the numbers of pieces do not. Cases take turns, there and back, in one process; sizes that would not fit into memory are left out.
"""
from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, at_most, figure, ratio

TOKENS, LAYERS, INDEXER_PLANES = 200_000, 78, 21
ROW_BYTES = (4, 8, 16, 26, 34, 66, 132, 218)  # 64 MB, 125, 250, 406, 530 MB, 1.0, 2.1, 3.4 GB
SOME_ROW_BYTES = (4, 34, 218)  # for the layouts of more regions
CUTS = {  # regions a block: KVLayout's fields beside its row
    78: dict(order="LBHNC", num_heads=1, indexer=0, what="78 regions a block, the latent alone"),
    99: dict(order="LBHNC", num_heads=1, indexer=INDEXER_PLANES, what="99 regions a block, with the 21 indexer planes"),
    156: dict(order="LHBNC", num_heads=2, indexer=0, what="156 regions a block, two a layer"),
}
GRID_MB, GRID_DESCRIPTORS = (64, 256, 1024), (1, 100, 1_000, 3_125, 5_000, 10_000, 20_000)
CONTIGUOUS_FROM, REPORTED_SAVING = 384e6, 0.47
ROUNDS, MOST_BYTES = 5, 3.5e9
COMMAND = "python -m bench.transfer"


def rows(bench: Bench, rounds: int = ROUNDS, most_bytes: float = MOST_BYTES) -> list[Row]:
    return _table(_measure(bench, rounds, most_bytes))


def _measure(bench: Bench, rounds: int, most_bytes: float) -> dict[str, Any]:
    options = {"rounds": rounds, "most_bytes": min(most_bytes, 4e9, 0.35 * _available_bytes())}  # both processes hold as much
    return {name: bench.run(Variant(f"transfers, {name}", f"bench.transfer:{name}", options)).result for name in ("by_size", "by_regions", "by_descriptors")}


# --- in the child ------------------------------------------------------------------------------------------

def by_size(threads: int, rounds: int, most_bytes: float) -> dict[str, Any]:
    """The latent alone, at every size: {"bytes": {case: [seconds]}}."""
    return _turns([(row, 78) for row in ROW_BYTES], rounds, most_bytes, contiguous=True)


def by_regions(threads: int, rounds: int, most_bytes: float) -> dict[str, Any]:
    """The layouts of more regions, shuffled."""
    return _turns([(row, regions) for regions in (99, 156) for row in SOME_ROW_BYTES], rounds, most_bytes, contiguous=False)


def by_descriptors(threads: int, rounds: int, most_bytes: float) -> dict[str, Any]:
    """A grid of bytes and descriptors, shuffled pieces of one size; and the fit of each round."""
    from minengine.disagg.measure import Pair, even_pieces, fit

    sizes = [mb * 1_000_000 for mb in GRID_MB if mb * 1e6 <= most_bytes]
    with Pair(max(sizes)) as pair:
        points = {(nbytes, count): even_pieces(nbytes, count) for nbytes in sizes for count in GRID_DESCRIPTORS}
        taken: list[list[Any]] = []
        for turn in range(rounds):
            taken.append([pair.read(points[point]) for point in (list(points), list(reversed(points)))[turn % 2]])
        agent = pair.agent.describe()
    fits = [fit(timed) for timed in taken]
    off = [abs(costs.seconds(one.nbytes, one.descriptors) / one.seconds - 1) for costs, timed in zip(fits, taken) for one in timed]
    return {"agent": agent, "fits": [vars(costs) for costs in fits], "off": off,
            "samples": [[one.nbytes, one.descriptors, one.seconds] for timed in taken for one in timed]}


def _turns(cases: list[tuple[int, int]], rounds: int, most_bytes: float, contiguous: bool) -> dict[str, Any]:
    from minengine.disagg.measure import Pair, block_ids
    from minengine.disagg.pieces import Pieces, pieces

    found: dict[str, Any] = {"sizes": []}
    cases = [case for case in cases if all(layout.nbytes <= most_bytes for layout in _layouts(*case))]
    with Pair(max(layout.nbytes for case in cases for layout in _layouts(*case))) as pair:
        found["agent"] = pair.agent.describe()
        for row, regions in cases:
            ways, counts = {}, {}
            for layout, name in zip(_layouts(row, regions), ("layer-major", "block-major")):
                for order in ("shuffled", "contiguous"):
                    seeds = (None, None) if order == "contiguous" else (1, 2)
                    ids = [block_ids(layout, -(-TOKENS // layout.block_size), seed) for seed in seeds]
                    parts = pieces(layout, ids[0], layout, ids[1], stop=TOKENS)
                    as_asked = pieces(layout, ids[0], layout, ids[1], stop=TOKENS, merge=False)
                    counted = pair.read(as_asked, merging=pair.agent.kind == "nixl").descriptors
                    counts[f"{name} {order}"] = {"asked": parts.asked, "merged": parts.merged, "nixl": counted}
                    if order == "shuffled" or contiguous:
                        ways[f"{name} {order}"] = parts
            nbytes = ways["block-major shuffled"].total_bytes
            if contiguous:
                ways["single"] = Pieces.one(nbytes)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(rounds):
                for way in (list(ways), list(reversed(ways)))[turn % 2]:
                    seconds[way].append(pair.read(ways[way]).seconds)
            found["sizes"].append({"row_bytes": row, "regions": regions, "nbytes": nbytes, "counts": counts, "seconds": seconds})
    return found


def _layouts(row: int, regions: int) -> list[Any]:
    """(layer-major, block-major), each in a pool a little larger than the request."""
    from minengine.kv.layout import KVLayout

    cut = CUTS[regions]
    indexer = dict(num_indexer_layers=cut["indexer"], indexer_bytes=max(1, row * 132 // 352)) if cut["indexer"] else {}
    return [KVLayout(order, LAYERS, -(-TOKENS // size) + 1024 // size, cut["num_heads"], size, row // cut["num_heads"], **indexer)
            for order, size in ((cut["order"], 1024), ("BLHNC", 64))]


# --- what it says ------------------------------------------------------------------------------------------

def _saving(seconds: dict[str, list[float]], order: str = "shuffled") -> list[float]:
    """Percent of the layer-major time that block-major saves, round by round."""
    return [100 * (1 - few / many) for many, few in zip(seconds[f"layer-major {order}"], seconds[f"block-major {order}"])]


def _costs(result: dict[str, Any]) -> dict[str, list[float]]:
    fits = result["by_descriptors"]["fits"]
    return {"descriptor_us": [1e6 * one["descriptor_s"] for one in fits], "gb_s": [1e-9 / one["byte_s"] for one in fits],
            "start_ms": [1e3 * one["start_s"] for one in fits]}


def _where(result: dict[str, Any]) -> list[float]:
    """MB at which the fitted costs save what the source reports, for its counts; round by round."""
    from minengine.disagg.measure import Costs

    return [Costs(**one).bytes_where_saving(REPORTED_SAVING, 15_288, 3_125) / 1e6 for one in result["by_descriptors"]["fits"]]


def _table(result: dict[str, Any]) -> list[Row]:
    costs, off = _costs(result), result["by_descriptors"]["off"]
    table = [
        figure("cost of a descriptor, fitted", costs["descriptor_us"], None, "us", f"median error of the fit {100 * median(off):.0f}%, "
               f"{result['by_descriptors']['agent']}"),
        figure("speed of the bytes, fitted", costs["gb_s"], None, "GB/s"),
        figure("cost of a transfer, fitted", costs["start_ms"], None, "ms"),
        figure("a saving of 47% between 15,288 and 3,125 descriptors lies, by the fit, at", _where(result), None, "MB"),
    ]
    for size in result["by_size"]["sizes"] + result["by_regions"]["sizes"]:
        many, few = (size["counts"][f"{name} shuffled"]["asked"] for name in ("layer-major", "block-major"))
        table.append(figure(f"saved by block-major, {size['regions']} regions a block, shuffled, {size['nbytes'] / 1e6:,.0f} MB", _saving(size["seconds"]), None, "%",
                            f"{many:,} pieces to {few:,}, {many / few:.1f}x"))
    for size in result["by_size"]["sizes"]:
        target = at_most(1.3) if size["nbytes"] >= CONTIGUOUS_FROM else None
        table.append(ratio(f"block-major contiguous against a single descriptor, {size['nbytes'] / 1e6:,.0f} MB", size["seconds"]["block-major contiguous"],
                           size["seconds"]["single"], target, "s"))
    return table


def _kept(result: dict[str, Any], noise: list[float]) -> list[dict[str, Any]]:
    costs = _costs(result)
    found = [
        measurement("transfer-descriptor-us", "Cost of one descriptor, fitted over 1 to 20,000 descriptors and 64 MB to 1 GB", "us", costs["descriptor_us"]),
        measurement("transfer-gb-s", "Speed of the bytes, fitted", "GB/s", costs["gb_s"]),
        measurement("transfer-start-ms", "Cost of a transfer whatever its size, fitted", "ms", costs["start_ms"]),
        measurement("transfer-fit-error", "How far the fit is from a measured transfer", "%", [100 * off for off in result["by_descriptors"]["off"]]),
        measurement("transfer-reported-saving-mb", "Where by the fit 3,125 descriptors take 47% less time than 15,288", "MB", _where(result)),
        measurement("transfer-foreign-cores", "Cores that other programs kept busy meanwhile", "cores", noise),
    ]
    for nbytes, count in dict.fromkeys((nbytes, count) for nbytes, count, _ in result["by_descriptors"]["samples"]):
        found.append(measurement(f"transfer-grid-{count}-of-{nbytes // 1_000_000}mb", f"{count:,} pieces of one size, shuffled, about {nbytes / 1e6:,.0f} MB together", "ms",
                                 [1e3 * seconds for n, c, seconds in result["by_descriptors"]["samples"] if (n, c) == (nbytes, count)]))
    for size in result["by_size"]["sizes"] + result["by_regions"]["sizes"]:
        regions, mb = size["regions"], f"{size['nbytes'] / 1e6:.0f}mb"
        what = f"200,000 tokens of {size['row_bytes']} bytes a layer, {size['nbytes'] / 1e6:,.0f} MB, {CUTS[regions]['what']}"
        found.append(measurement(f"transfer-{regions}-saving-{mb}", f"Saved by block-major, blocks shuffled: {what}", "%", _saving(size["seconds"])))
        for way, seconds in size["seconds"].items():
            found.append(measurement(f"transfer-{regions}-{way.replace(' ', '-')}-{mb}", f"{way}: {what}", "ms", [1e3 * one for one in seconds]))
    seen = set()
    for size in result["by_size"]["sizes"] + result["by_regions"]["sizes"]:
        for way, counts in size["counts"].items():
            for kind, says in (("asked", "as asked"), ("merged", "after merging neighbours in any order"), ("nixl", "as NIXL counts when it merges what was asked, in its order")):
                name = f"transfer-{size['regions']}-{way.replace(' ', '-')}-{kind}"
                if name not in seen and counts[kind] is not None:
                    seen.add(name)
                    found.append(measurement(name, f"Descriptors {says}: {way}, 200,000 tokens, {CUTS[size['regions']]['what']}", "descriptors", [counts[kind]]))
    return found


def _available_bytes() -> float:
    try:
        with open("/proc/meminfo") as info:
            return next(1024.0 * int(line.split()[1]) for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of every case (default: {ROUNDS})")
    parser.add_argument("--most-bytes", type=float, default=MOST_BYTES, help="largest pool a side (default: 3.5e9, and what memory allows)")
    args = parser.parse_args()
    bench = Bench(threads=1)
    result = _measure(bench, args.rounds, args.most_bytes)
    from .table import render

    print(render(_table(result)))
    command = " ".join([COMMAND, *(f"--{name.replace('_', '-')} {value:g}" for name, value in vars(args).items() if value != parser.get_default(name))])
    noise = [run.foreign_cores for run in bench.runs if run.foreign_cores is not None]
    print(keep("transfer", command, _kept(result, noise)).name)


if __name__ == "__main__":
    main()
