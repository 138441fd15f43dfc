"""Time of one kernel launch on a CUDA card, without the cost of launching it: many launches recorded in one CUDA graph, replayed.

Warm: every launch of the graph reads the same rows, so they come from the L2 cache where they fit. Cold: the launches read different
rows, several times as many as L2 holds, so that each finds none of its own there.
"""
from __future__ import annotations

from typing import Any, Callable, Sequence

__all__ = ["copy_bandwidth", "graph_samples", "l2_bytes", "matrix_rate"]

REPLAYS, WARM_UP = 25, 3


def graph_samples(launches: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> list[float]:
    """Seconds a launch, one sample a replay of all launches in a row. Each callable enqueues one launch and does not wait."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets libraries take their workspaces before the recording
        for launch in (launches[0], launches[-1]):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    samples = []
    for replay in range(WARM_UP + replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM_UP:
            samples.append(start.elapsed_time(end) / 1e3 / len(launches))
    return samples


def copy_bandwidth(nbytes: int = 1 << 30, copies: int = 8) -> list[float]:
    """Bytes a second that a copy in the card's memory moves, read and written: the bandwidth a kernel can hope for."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return [2 * nbytes / s for s in graph_samples([lambda: target.copy_(source)] * copies)]


def matrix_rate(size: int = 8192, products: int = 4) -> list[float]:
    """FLOP a second of a large float16 product with float32 accumulation."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    return [2 * size**3 / s for s in graph_samples([lambda: torch.mm(a, b, out=out)] * products)]


def l2_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size


