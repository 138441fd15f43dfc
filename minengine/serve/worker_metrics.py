"""What /metrics says of worker processes: one label each, `worker` and `role`."""
from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from ..disagg.front import WorkerInfo

__all__ = ["worker_families"]

LABELS = ["worker", "role"]


def worker_families(workers: Sequence[WorkerInfo]) -> Iterator[Metric]:
    """Nothing, where the engine is in the server's own process."""
    if not workers:
        return
    for name, about, value in (
        ("minengine:worker_up", "1 while the worker answers.", lambda worker: float(worker.state == "up")),
        ("minengine:worker_requests_running", "Requests that hold blocks there and take part in steps.", lambda worker: worker.num_running),
        ("minengine:worker_requests_waiting", "Requests in its queue.", lambda worker: worker.num_waiting),
        ("minengine:worker_kv_cache_usage_perc", "Share of its blocks that requests hold.", lambda worker: 1 - worker.num_free_blocks / worker.num_blocks
         if worker.state == "up" else 0.0),
    ):
        gauge = GaugeMetricFamily(name, about, labels=LABELS)
        for worker in workers:
            gauge.add_metric([worker.name, worker.role], value(worker))
        yield gauge
    restarts = CounterMetricFamily("minengine:worker_restarts", "Processes started after the worker's first.", labels=LABELS)
    for worker in workers:
        restarts.add_metric([worker.name, worker.role], max(0, worker.restarts))
    yield restarts
    for name in sorted({name for worker in workers for name in worker.transfers}):
        moved = CounterMetricFamily(f"minengine:kv_{name}", TRANSFERS.get(name, "Of KV moved by the worker."), labels=LABELS)
        for worker in workers:
            moved.add_metric([worker.name, worker.role], worker.transfers.get(name, 0))
        yield moved


TRANSFERS = {  # of disagg.moved.TransferTotals
    "transfers": "Pulls and pushes that ended, well or not.",
    "landed": "Pulls and pushes whose rows arrived.",
    "failed": "Errors and timeouts of pulls and pushes.",
    "expired": "Pulls thrown away because the lease had ended.",
    "holds": "Leases made: rows kept for a decoder.",
    "renewals": "Leases made longer, for a decoder that had no room yet.",
    "leases_expired": "Leases that ran out before a decoder had fetched the rows.",
    "asked": "Pieces of regions and blocks that requests asked for.",
    "merged": "Pieces after neighbours were joined.",
    "nixl_descriptors": "Pieces as NIXL counts them.",
    "nbytes": "Bytes of rows that arrived.",
    "seconds": "Time of transfers, from the beginning until the last row was there.",
}
