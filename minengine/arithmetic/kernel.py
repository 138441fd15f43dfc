"""Kernels: what attention over chosen rows must move and compute, and the time that no kernel can beat."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Roofline", "roofline", "staged_bytes"]


def staged_bytes(row: int = 352, unpacked: int = 576) -> int:
    """Bytes moved a selected row when it is unpacked to memory first: read it, write the copy, read the copy."""
    return row + 2 * unpacked


@dataclass(frozen=True)
class Roofline:
    """Two lower bounds on a kernel's time."""

    compute_s: float
    memory_s: float

    @property
    def time_s(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """`memory` or `compute`: which of the two decides."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def roofline(flops: float, nbytes: float, peak_flops_s: float, bandwidth_bytes_s: float) -> Roofline:
    """The time that arithmetic and memory traffic each need on a machine of those peaks (Williams et al., 2009)."""
    return Roofline(flops / peak_flops_s, nbytes / bandwidth_bytes_s)
