"""Where a row's bytes lie: the logical cache [L, B, H, N, C] in six physical orders, and the pieces a block is in.

L layers, B blocks, H heads, N tokens of a block, C bytes of one head's row. The channel axis is always
innermost. A sparse-attention model also keeps indexer keys, [Lf, B, 1, N, Ci] over its `full` layers: in an
order that begins with B they follow the block's latent bytes, so a block is ONE region whatever it holds; in an
order that begins with L they are planes of their own behind the latent planes. Nothing here allocates.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minengine.config import KV_CACHE_LAYOUTS, ConfigError

__all__ = ["KVLayout"]

ALIGNMENT = 4  # bytes: every plane starts where a float32 may


@dataclass(frozen=True)
class KVLayout:
    """Byte geometry of one pool."""

    order: str
    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    row_bytes: int
    num_indexer_layers: int = 0
    indexer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.order not in KV_CACHE_LAYOUTS:
            raise ConfigError(f"kv_cache_layout='{self.order}': use one of {', '.join(KV_CACHE_LAYOUTS)}")
        for name in ("num_layers", "num_blocks", "num_heads", "block_size", "row_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: use at least 1")
        if (self.num_indexer_layers > 0) != (self.indexer_bytes > 0) or self.num_indexer_layers < 0 or self.indexer_bytes < 0:
            raise ConfigError(f"num_indexer_layers={self.num_indexer_layers}, indexer_bytes={self.indexer_bytes}: give both, or neither")
        for name in ("row_bytes", "indexer_bytes"):
            if self.block_size * getattr(self, name) % ALIGNMENT:
                raise ConfigError(f"block_size={self.block_size} x {name}={getattr(self, name)} is no multiple of {ALIGNMENT} bytes; "
                                  f"use a block_size that is a multiple of {ALIGNMENT}")

    # --- sizes ---

    @property
    def block_major(self) -> bool:
        """True when all layers of a block lie together."""
        return self.order[0] == "B"

    @property
    def latent_plane_bytes(self) -> int:
        """Bytes of one block's rows, all layers and heads."""
        return self.num_layers * self.num_heads * self.block_size * self.row_bytes

    @property
    def indexer_plane_bytes(self) -> int:
        """Bytes of one block's indexer keys, all full layers."""
        return self.num_indexer_layers * self.block_size * self.indexer_bytes

    @property
    def block_bytes(self) -> int:
        return self.latent_plane_bytes + self.indexer_plane_bytes

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    # --- strided views ---

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[L, B, H, N, C] in bytes."""
        return self.num_layers, self.num_blocks, self.num_heads, self.block_size, self.row_bytes

    @property
    def offset(self) -> int:
        """Byte at which the rows' view starts."""
        return 0

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Byte strides of the [L, B, H, N, C] view."""
        sizes = dict(zip("LBHNC", self.shape))
        strides, step = {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        if self.block_major:
            strides["B"] = self.block_bytes
        return tuple(strides[axis] for axis in "LBHNC")

    @property
    def indexer_shape(self) -> tuple[int, int, int, int, int]:
        """[Lf, B, 1, N, Ci] in bytes."""
        return self.num_indexer_layers, self.num_blocks, 1, self.block_size, self.indexer_bytes

    @property
    def indexer_offset(self) -> int:
        """Byte at which the indexer keys' view starts."""
        return self.latent_plane_bytes * (1 if self.block_major else self.num_blocks)

    @property
    def indexer_strides(self) -> tuple[int, int, int, int, int]:
        """Byte strides of the [Lf, B, 1, N, Ci] view."""
        page = self.block_size * self.indexer_bytes
        layer, block = (page, self.block_bytes) if self.block_major else (page * self.num_blocks, page)
        return layer, block, page, self.indexer_bytes, 1

    # --- pieces ---

    @property
    def regions_per_block(self) -> int:
        """Contiguous pieces that one block is in."""
        return len(self.region_starts())

    def regions(self, block_ids: Iterable[int]) -> list[tuple[int, int]]:
        """(byte offset, length) of every piece of these blocks, region by region, the blocks in the order given.

        That is the order in which transfer descriptors are listed: piece number = region * num_blocks + block.

        Raises:
            IndexError: a block id outside the pool.
        """
        ids = list(block_ids)
        for block in ids:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block id {block} is outside the pool of {self.num_blocks} blocks")
        return [(start + block * step, length) for start, step, length in self.region_starts() for block in ids]

    def merged(self, block_ids: Iterable[int]) -> list[tuple[int, int]]:
        """`regions`, each joined to the one before it in the list where it begins at that one's end.

        Order matters, as it does to a transfer engine that looks at neighbours only: ascending ids merge.
        """
        pieces: list[tuple[int, int]] = []
        for start, length in self.regions(block_ids):
            if pieces and sum(pieces[-1]) == start:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
            else:
                pieces.append((start, length))
        return pieces

    def region_starts(self) -> list[tuple[int, int, int]]:
        """(byte of block 0, bytes from one block to the next, length) of every region."""
        if self.block_major:
            return [(0, self.block_bytes, self.block_bytes)]
        layer, block, head, _, _ = self.strides
        # With heads outside blocks a block's rows are one piece a head, else one piece a layer.
        apart = self.order.index("H") < self.order.index("B")
        heads = self.num_heads if apart else 1
        length = self.block_size * self.row_bytes * (1 if apart else self.num_heads)
        latent = [(i * layer + h * head, block, length) for i in range(self.num_layers) for h in range(heads)]
        layer, block, _, _, _ = self.indexer_strides
        return latent + [(self.indexer_offset + i * layer, block, block) for i in range(self.num_indexer_layers)]
