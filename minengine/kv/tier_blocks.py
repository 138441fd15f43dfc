"""What a block is outside its pool: which model and geometry it belongs to, and its bytes in one order, whatever the pool's.

Canonical bytes of a block: rows [L, H, N, C], then indexer keys [Lf, N, Ci]. That is one block's region in the order BLHNC, so such a pool on a
CPU is read and written in place. All workers of a machine can share what one of them has stored, whichever order each has chosen.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha256
from math import gcd

import numpy as np
import torch
from torch import Tensor

from minengine.kv.layout import KVLayout

__all__ = ["BlockBytes", "Geometry"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What must be equal for one process to use another's blocks."""

    num_layers: int
    num_heads: int
    block_size: int
    row_bytes: int
    num_indexer_layers: int
    indexer_bytes: int
    kv_cache_dtype: str
    fingerprint: str  # of the model: `model_fingerprint`

    @classmethod
    def of(cls, layout: KVLayout, kv_cache_dtype: str, fingerprint: str) -> Geometry:
        shared = {f.name: getattr(layout, f.name) for f in fields(cls) if hasattr(layout, f.name)}
        return cls(**shared, kv_cache_dtype=kv_cache_dtype, fingerprint=fingerprint)

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        rows = self.num_layers * self.num_heads * self.row_bytes + self.num_indexer_layers * self.indexer_bytes
        return rows * self.block_size

    @property
    def tag(self) -> bytes:
        """32 bytes that stand for all of it."""
        return sha256(repr(self).encode()).digest()


class BlockBytes:
    """One pool's blocks as canonical bytes. Only blocks that nobody else writes to may be read, and those that nobody reads be written."""

    def __init__(self, storage: Tensor, layout: KVLayout) -> None:
        """`storage`: the pool's bytes, (layout.nbytes,) uint8, on any device."""
        self.storage, self.layout = storage, layout
        self.nbytes = layout.block_bytes
        in_order = layout.order == "BLHNC" or (layout.block_major and layout.num_heads == 1)
        self.direct = in_order and storage.device.type == "cpu"
        latent, keys = layout.latent_plane_bytes, layout.indexer_plane_bytes
        steps = (self.nbytes, latent, layout.row_bytes, *layout.strides[:4], layout.indexer_bytes, *layout.indexer_strides[:4])
        unit = gcd(8, *steps, 0 if storage.device.type != "cpu" else storage.data_ptr())  # copied in the widest words that fit
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[unit]

        def view(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
            return storage.view(dtype).as_strided((*shape[:4], shape[4] // unit), (*(step // unit for step in strides[:4]), 1), offset // unit)

        self._parts = [(0, latent, view(layout.shape, layout.strides, layout.offset))]
        if keys:
            self._parts.append((latent, keys, view(layout.indexer_shape, layout.indexer_strides, layout.indexer_offset)))
        self._unit, self._dtype = unit, dtype
        if storage.device.type == "cpu":
            # numpy and not torch: its copies take the calling thread only and leave the step loop's threads alone.
            self._flat = storage.numpy()
            self._host_parts = [(start, length, part.numpy()) for start, length, part in self._parts]

    def buffer(self, num_blocks: int) -> np.ndarray:
        """Room for the bytes of some blocks beside the pool: (num_blocks, nbytes) uint8."""
        pinned = self.storage.device.type == "cuda"
        return torch.empty((num_blocks, self.nbytes), dtype=torch.uint8, pin_memory=pinned).numpy()

    def place(self, block_id: int) -> np.ndarray:
        """The block in the pool itself, where `direct`: (nbytes,) uint8."""
        return self._flat[block_id * self.nbytes : (block_id + 1) * self.nbytes]

    def read(self, block_id: int, out: np.ndarray) -> None:
        """Pool -> `out` (nbytes,) uint8."""
        self._copy(block_id, out, into_pool=False)

    def write(self, block_id: int, data: np.ndarray) -> None:
        """`data` (nbytes,) uint8 -> pool, there when this returns."""
        self._copy(block_id, data, into_pool=True)

    def _copy(self, block_id: int, data: np.ndarray, into_pool: bool) -> None:
        if not 0 <= block_id < self.layout.num_blocks:
            raise IndexError(f"block id {block_id} is outside the pool of {self.layout.num_blocks} blocks")
        if self.storage.device.type == "cpu":
            for start, length, part in self._host_parts:
                here = part[:, block_id]
                there = data[start : start + length].view(part.dtype).reshape(here.shape)
                if into_pool:
                    here[...] = there
                else:
                    there[...] = here
            return
        with torch.inference_mode(), torch.cuda.device(self.storage.device):
            for start, length, part in self._parts:
                here = part[:, block_id]
                there = torch.from_numpy(data[start : start + length]).view(self._dtype).view(here.shape)
                (here if into_pool else there).copy_(there if into_pool else here)
            torch.cuda.current_stream().synchronize()
