"""What a simulation came to: a record a request, metrics, and counts that balance."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..workload.report import Record, Slo, report
from .flights import Flight
from .gaps import Gaps

if TYPE_CHECKING:
    from .cluster import Cluster
    from .deployment import Deployment

__all__ = ["Result"]


@dataclass
class Result:
    """
    Attributes:
        metrics: `workload.report.report` of the records, over the time after warming up, and the percentiles of all gaps between tokens
            (`gap_s_p50`, `_p90`, `_p99`).
        records: of all requests, those that ended after `duration_s` too.
        flights: the same requests with all stamps of their timelines, in picoseconds.
        counts: of the whole run: `requests_in` and `_out`; `tokens_in`, of answers that were to be given, and `tokens_out`, that steps gave;
            `prompt_tokens_in` is `prompt_tokens_found` + `_loaded` + `_computed`; `blocks_in` and `blocks_out` of all pools; `events` that the simulator went
            through; `steps`, of which ranks spent `dummies` on nothing; `preemptions`; `moved_bytes`, `moved_pieces`, `moves`; `retrieved_blocks`.
        engines: the counts of each engine.
        digest: of every event: equal runs have equal digests.
    """

    deployment: Deployment
    duration_s: float
    warm_s: float
    metrics: dict[str, float | None]
    records: list[Record]
    flights: list[Flight]
    counts: dict[str, int]
    engines: dict[str, dict[str, int]]
    gaps: Gaps
    digest: str

    @classmethod
    def of(cls, cluster: Cluster, duration_s: float, warm_s: float, slo: Slo | None, digest: str) -> Result:
        """
        Raises:
            AssertionError: tokens or blocks that came in have not gone out.
        """
        engines = {name: asdict(engine.counts) for name, engine in cluster.engines.items()}
        flights, d = cluster.flights, cluster.deployment
        pools = [scheduler.pool for engine in cluster.engines.values() for scheduler in engine.schedulers]
        wires = [scheduler.connector for engine in cluster.engines.values() for scheduler in engine.schedulers if scheduler.connector is not None]

        def total(name: str) -> int:
            return sum(counts[name] for counts in engines.values())

        answered = [flight for flight in flights if flight.error is None]
        begun = [flight for flight in flights if flight.timeline.token_s.count]
        counts = {
            "requests_in": len(flights), "requests_out": sum(flight.ended is not None for flight in flights),
            "tokens_in": sum(flight.output_tokens for flight in answered) + sum(flight.timeline.token_s.count for flight in begun if flight.error is not None),
            "tokens_out": total("tokens"),
            "prompt_tokens_in": sum(flight.turn.request.input_tokens for flight in begun),
            "prompt_tokens_found": sum(flight.given - flight.loaded for flight in begun),
            "prompt_tokens_loaded": sum(flight.loaded for flight in begun),
            "prompt_tokens_computed": sum(flight.computed for flight in begun),
            "blocks_in": sum(pool.num_taken for pool in pools), "blocks_out": sum(pool.num_given_back for pool in pools),
            "events": cluster.agenda.num_events, "steps": total("steps"), "dummies": total("dummies"), "preemptions": total("preemptions"),
            "evictions": sum(pool.num_evictions for pool in pools),
            "moves": sum(wire.moves for wire in wires), "moved_pieces": sum(wire.moved_pieces for wire in wires),
            "moved_bytes": sum(wire.moved_bytes for wire in wires), "retrieved_blocks": cluster.tier.loaded if cluster.tier is not None else 0,
        }
        for name in ("requests", "tokens", "blocks"):
            assert counts[f"{name}_in"] == counts[f"{name}_out"], f"{counts[f'{name}_in']} {name} came in and {counts[f'{name}_out']} went out"
        parts = [counts[f"prompt_tokens_{part}"] for part in ("found", "loaded", "computed")]
        assert counts["prompt_tokens_in"] == sum(parts), f"{counts['prompt_tokens_in']} tokens of prompts came in and {parts} went where they belong"
        records = [flight.record(d.first_token) for flight in flights]
        metrics = report(records, duration_s - warm_s, d.gpus, start_s=warm_s, slo=slo)
        metrics.update({f"gap_s_p{q}": cluster.seen.percentile_s(q) for q in (50, 90, 99)})
        return cls(d, duration_s, warm_s, metrics, records, flights, counts, engines, cluster.seen, digest)
