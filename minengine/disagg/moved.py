"""What is known of each movement of rows, and their sums: for metrics, and for the experiments of the book."""
from __future__ import annotations

from dataclasses import dataclass, field

from .agents import Report
from .pieces import Pieces

__all__ = ["RankMoved", "TransferFacts", "TransferTotals"]


@dataclass(slots=True)
class RankMoved:
    """What one rank read of a request."""

    rank: int
    sources: tuple[int, ...] = ()  # ranks of the other side that it read from
    asked: int = 0  # as in TransferFacts
    merged: int = 0
    nixl_descriptors: int | None = None
    nbytes: int = 0

    def took(self, source: int, pieces: Pieces) -> None:
        """One more transfer of these."""
        if source not in self.sources:
            self.sources += (source,)
        self.asked += pieces.asked
        self.merged += pieces.merged
        self.nbytes += pieces.total_bytes

    def ended(self, report: Report) -> None:
        """And how it was."""
        if report.descriptors is not None:
            self.nixl_descriptors = (self.nixl_descriptors or 0) + report.descriptors


@dataclass(slots=True)
class TransferFacts:
    """One request's rows, moved once."""

    request_id: str
    kind: str  # "pull", "push" or "tier"
    peer: str = ""  # the other agent; "host", "disk" for a tier
    num_tokens: int = 0  # whose rows were moved
    num_blocks: int = 0
    asked: int = 0  # pieces of regions and blocks
    merged: int = 0  # pieces after neighbours were joined
    nixl_descriptors: int | None = None  # NIXL's own count; None: it does not say
    nbytes: int = 0
    seconds: float = 0.0  # from its beginning until the last row was there
    outcome: str = ""  # "landed" (all or a part), "expired" (the lease had ended), "failed", "timeout" or "cancelled"
    error: str = ""
    ranks: tuple[RankMoved, ...] = ()  # of a pull: this rank's part, then those of the others that were told to the end

    def read(self, *ranks: RankMoved) -> None:
        """The parts of a pull."""
        self.ranks = ranks
        self.asked, self.merged, self.nbytes = (sum(getattr(one, name) for one in ranks) for name in ("asked", "merged", "nbytes"))
        counts = [one.nixl_descriptors for one in ranks if one.nixl_descriptors is not None]
        self.nixl_descriptors = sum(counts) if counts else None

    def took(self, pieces: Pieces) -> None:
        """One more transfer of these."""
        self.asked += pieces.asked
        self.merged += pieces.merged
        self.nbytes += pieces.total_bytes

    def ended(self, report: Report) -> None:
        """And how it was."""
        if report.descriptors is not None:
            self.nixl_descriptors = (self.nixl_descriptors or 0) + report.descriptors


@dataclass(slots=True)
class TransferTotals:
    """Sums since the worker's start."""

    transfers: int = 0  # pulls and pushes that ended, well or not
    landed: int = 0
    failed: int = 0  # errors and timeouts
    expired: int = 0  # read whole, and thrown away: the lease had ended
    cancelled: int = 0
    asked: int = 0
    merged: int = 0
    nixl_descriptors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    tier_loads: int = 0  # requests
    tier_loaded_blocks: int = 0
    tier_loaded_bytes: int = 0
    tier_load_seconds: float = 0.0
    tier_stored_blocks: int = 0
    tier_refused_blocks: int = 0  # given to the tiers, and kept by none
    holds: int = 0  # leases made
    renewals: int = 0
    leases_expired: int = 0
    strange_notices: int = 0  # understood by nobody here
    outcomes: dict[str, int] = field(default_factory=dict)

    def add(self, facts: TransferFacts) -> None:
        self.outcomes[facts.outcome] = self.outcomes.get(facts.outcome, 0) + 1
        if facts.kind == "tier":
            self.tier_loads += 1
            self.tier_loaded_blocks += facts.num_blocks
            self.tier_loaded_bytes += facts.nbytes
            self.tier_load_seconds += facts.seconds
            return
        self.transfers += 1
        self.landed += facts.outcome == "landed"
        self.failed += facts.outcome in ("failed", "timeout")
        self.expired += facts.outcome == "expired"
        self.cancelled += facts.outcome == "cancelled"
        if facts.outcome == "landed":
            self.asked += facts.asked
            self.merged += facts.merged
            self.nixl_descriptors += facts.nixl_descriptors or 0
            self.nbytes += facts.nbytes
            self.seconds += facts.seconds
