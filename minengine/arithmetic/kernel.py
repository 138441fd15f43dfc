"""Kernels: what attention over chosen rows must move and compute, and the time that no kernel can beat."""
from __future__ import annotations

import math
from dataclasses import dataclass

from minengine.config import ConfigError

from .rows import row_bytes

__all__ = ["CARDS", "Card", "DECODE_ROWS", "Launch", "PathFloor", "Roofline", "decode_floor", "decode_launches", "roofline", "staged_bytes"]

SLOT_BYTES = 4  # an int32 of the list that says which rows a query attends to
ACTIVATION_BYTES = 2  # queries and outputs are bfloat16
DECODE_ROWS = {"native": "nvfp4_fp8_ds_mla", "staged": "nvfp4_fp8_ds_mla", "fp8": "fp8", "bfloat16": "bfloat16"}  # a path's row in the cache


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


def roofline(flops: float, nbytes: float, peak_flops_s: float,
             bandwidth_bytes_s: float) -> Roofline:
    """The time that arithmetic and memory traffic each need on a machine of those
    peaks (Williams et al., 2009)."""
    return Roofline(flops / peak_flops_s, nbytes / bandwidth_bytes_s)


@dataclass(frozen=True)
class Card:
    """Two peaks of one GPU: its memory, and its matrix units on dense 16-bit values added up in FP32; and how much memory it has."""

    name: str
    memory_bytes_s: float
    matrix_flops_s: float
    source: str  # of vendor figures: these are reported, nobody here measured them
    hbm_bytes: int | None = None  # as its driver lists it: the GB of a data sheet are nearer to GiB; None: not known

    @property
    def flops_per_byte(self) -> float:
        """Operations that the matrix units can do while one byte comes from memory; a kernel with fewer waits for memory."""
        return self.matrix_flops_s / self.memory_bytes_s


MIB = 1 << 20
CARDS = {
    "GB200": Card("GB200 (one GPU)", 8.0e12, 2500e12,
                  "NVIDIA's GB200 NVL72 data sheet: 576 TB/s and, with sparsity, 360 PFLOP/s for 72 GPUs; half of that dense", 189_471 * MIB),
    "B200": Card("B200", 8.0e12, 2250e12,
                 "NVIDIA's DGX B200 data sheet: 64 TB/s for 8 GPUs; HGX B200: 36 PFLOP/s with sparsity for 8; half of that dense", 183_359 * MIB),
    "H200": Card("H200", 4.8e12, 989e12, "NVIDIA's H200 data sheet: 4.8 TB/s; 1,979 TFLOP/s with sparsity, half of that dense", 143_771 * MIB),
    "H100": Card("H100 SXM", 3.35e12, 989e12, "NVIDIA's H100 data sheet: 3.35 TB/s; 1,979 TFLOP/s with sparsity, half of that dense", 81_559 * MIB),
    "RTX4090": Card("RTX 4090", 1.008e12, 165.2e12,
                    "NVIDIA's Ada architecture paper: 1,008 GB/s; 165.2 TFLOP/s dense, FP16 with FP32 accumulation", 24_564 * MIB),
}


@dataclass(frozen=True)
class Launch:
    """What one launch of a kernel moves through memory, part by part in bytes, and what it computes."""

    name: str
    parts: dict[str, int]
    flops: int

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.nbytes


@dataclass(frozen=True)
class PathFloor:
    """A path's launches, one after the other, and the bounds of each on one card."""

    launches: tuple[Launch, ...]
    rooflines: tuple[Roofline, ...]

    @property
    def nbytes(self) -> int:
        return sum(launch.nbytes for launch in self.launches)

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self.launches)

    @property
    def time_s(self) -> float:
        """No kernel that makes these launches and finds nothing in the L2 cache can be faster; what a launch itself costs is not in it."""
        return sum(bound.time_s for bound in self.rooflines)

    @property
    def bounds(self) -> tuple[str, ...]:
        """What decides each launch, `memory` or `compute`."""
        return tuple(bound.bound for bound in self.rooflines)


def decode_launches(path: str, query_tokens: int, heads: int, top_k: int, fill: float = 1.0, rank: int = 512, rope: int = 64) -> tuple[Launch, ...]:
    """The launches of sparse MLA decode attention over one layer, on one rank of a tensor-parallel group.

    `query_tokens` queries of `heads` heads each attend to the rows in a list of `top_k` slots, of which the share `fill` holds a
    row and the rest is -1. Each chosen row is counted for each query that chose it: what the L2 cache gives back moves less.
    An empty slot costs its place in the list and nothing else. A row and a head take `rank` + `rope` multiplications
    and additions for the score, and `rank` for the sum of values (absorbed MLA: the latent is key and value).

    Paths: `native` reads 4-bit rows, `staged` first unpacks them into a buffer of 8-bit rows (a launch of its own) and
    reads that, `fp8` and `bfloat16` have such rows in the cache.

    Raises:
        ConfigError: unknown path, a count below 1, a share outside 0..1, or widths that the row cannot have.
    """
    if path not in DECODE_ROWS:
        raise ConfigError(f"path='{path}': use one of {', '.join(DECODE_ROWS)}")
    for name, count in (("query_tokens", query_tokens), ("heads", heads), ("top_k", top_k)):
        if count < 1:
            raise ConfigError(f"{name}={count}: use at least 1")
    if not 0 <= fill <= 1:
        raise ConfigError(f"fill={fill}: use a share from 0 to 1")
    rows = math.floor(query_tokens * top_k * fill + 0.5)
    slots = SLOT_BYTES * query_tokens * top_k
    read = {"rows": rows * row_bytes(DECODE_ROWS[path], rank, rope).total}
    given = {"queries": ACTIVATION_BYTES * query_tokens * heads * (rank + rope), "outputs": ACTIVATION_BYTES * query_tokens * heads * rank, "slots": slots}
    flops = 2 * rows * heads * (rank + rope + rank)
    if path != "staged":
        return (Launch("attention", {**read, **given}, flops),)
    copy = rows * row_bytes("fp8", rank, rope).total
    return (Launch("unpack", {**read, "copy_written": copy, "slots": slots}, 0), Launch("attention", {"copy_read": copy, **given}, flops))


def decode_floor(path: str, card: Card, query_tokens: int, heads: int, top_k: int, fill: float = 1.0, rank: int = 512, rope: int = 64) -> PathFloor:
    """The least time of a path on a card: of each launch bytes at the memory's peak or operations at the matrix units', the longer.

    Raises:
        ConfigError: see `decode_launches`.
    """
    launches = decode_launches(path, query_tokens, heads, top_k, fill, rank, rope)
    return PathFloor(launches, tuple(roofline(one.flops, one.nbytes, card.matrix_flops_s, card.memory_bytes_s) for one in launches))
