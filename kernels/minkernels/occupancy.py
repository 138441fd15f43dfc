"""How many blocks of a kernel one streaming multiprocessor holds at a time, and which of its resources ends first."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits", "Occupancy", "occupancy"]

WARP = 32  # threads


@dataclass(frozen=True)
class Limits:
    """What one SM has. Bytes, 32-bit registers, columns of tensor memory."""
    blocks: int
    warps: int
    registers: int
    registers_unit: int  # registers of a warp are given out in multiples of this
    shared: int
    shared_reserved: int  # the system keeps this much for itself in every block
    shared_unit: int
    tensor_columns: int  # 0: no tensor memory
    source: str


_SM = dict(blocks=32, warps=64, registers=65536, registers_unit=256, shared=228 * 1024, shared_reserved=1024, shared_unit=128)
LIMITS = {
    "sm_90a": Limits(**_SM, tensor_columns=0, source="NVIDIA, Hopper Tuning Guide, Occupancy; units of allocation: CUDA Occupancy Calculator"),
    "sm_100a": Limits(**_SM, tensor_columns=512, source="NVIDIA, Blackwell Tuning Guide, Occupancy (compute capability 10.0); "
                                                         "tensor memory: PTX ISA, tcgen05.alloc"),
}


@dataclass(frozen=True)
class Occupancy:
    blocks: int  # an SM
    warps: int  # an SM
    limiter: str  # the resource that ends first: "registers", "shared", "tensor memory", "warps" or "blocks"


def occupancy(arch: str, registers: int, shared: int, num_warps: int, tensor_columns: int = 0) -> Occupancy:
    """
    Args:
        registers: of a thread.
        shared: bytes of a block, the system's part not counted.
        num_warps: of a block.
        tensor_columns: of a block, 0 where it uses no tensor memory.
    """
    sm = LIMITS[arch]
    held = {
        "registers": sm.registers // (num_warps * _up(max(registers, 1) * WARP, sm.registers_unit)),
        "shared": sm.shared // _up(shared + sm.shared_reserved, sm.shared_unit),
        "warps": sm.warps // num_warps,
        "blocks": sm.blocks,
    }
    if tensor_columns:
        held["tensor memory"] = sm.tensor_columns // tensor_columns
    limiter = min(held, key=held.get)
    return Occupancy(held[limiter], held[limiter] * num_warps, limiter)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
