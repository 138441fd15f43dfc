"""The pool itself: one storage of bytes, one strided view a layer, rows quantised on the way in and out.

Slots number the pool's tokens: slot = block * block_size + offset in the block.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError, ModelConfig
from minengine.kv.layout import KVLayout
from minengine.kv.rows import IndexerFormat, RowFormat, head_format, indexer_format, row_format
from minkernels.indexer import append_indexer_keys
from minkernels.rows import ROW_FORMATS, quantize_rows

__all__ = ["KVCache", "cache_format", "cache_layout"]


def cache_format(config: ModelConfig, kv_cache_dtype: str) -> RowFormat:
    """The row format by that name, for that model's heads.

    Raises:
        ConfigError: an unknown name, or one that does not fit the model.
    """
    fitting = LATENT_DTYPES if config.is_latent else HEAD_DTYPES
    if kv_cache_dtype not in fitting and (config.is_latent or ":" not in kv_cache_dtype):
        kind = "latent rows" if config.is_latent else "grouped heads"
        raise ConfigError(f"kv_cache_dtype='{kv_cache_dtype}' does not fit {config.architecture}, whose cache holds {kind}; "
                          f"use one of {', '.join(fitting)}")
    return row_format(kv_cache_dtype, *config.kv_widths) if config.is_latent else head_format(kv_cache_dtype, config.kv_widths[0])


def cache_layout(config: ModelConfig, kv_cache_dtype: str, layout: str, num_blocks: int, block_size: int) -> KVLayout:
    """Where everything lies in a pool of `num_blocks` blocks; `.nbytes` is what the pool will take."""
    indexer = indexer_format(kv_cache_dtype, config.indexer_width).nbytes if config.num_indexer_layers else 0
    return KVLayout(layout, config.num_hidden_layers, num_blocks, config.kv_heads, block_size,
                    cache_format(config, kv_cache_dtype).nbytes, config.num_indexer_layers, indexer)


class KVCache:
    """Rows of all layers, blocks and heads, in one zero-initialised storage.

    Shapes: T tokens, H heads, wa and wb the widths of a row's two parts, N = block_size. Reads return `dtype`;
    a plain cache of that dtype is read with one gather, and the parts are views of what it returned.
    """

    def __init__(self, config: ModelConfig, kv_cache_dtype: str, layout: str, num_blocks: int, block_size: int,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, backend: str = "torch",
                 storage: Tensor | Callable[[int], Tensor] | None = None) -> None:
        """
        Args:
            storage: the pool's bytes, zeros, (nbytes,) uint8 on `device`, or what makes them of their number; None: they are allocated.
            backend: "torch" or "triton", how rows are written and attention reads them (see `attention_backend`).

        Raises:
            ConfigError: a kv_cache_dtype or layout that is unknown or does not fit the model.
        """
        self.fmt = cache_format(config, kv_cache_dtype)
        self.indexer_fmt = indexer_format(kv_cache_dtype, config.indexer_width) if config.num_indexer_layers else None
        self.kv_layout = cache_layout(config, kv_cache_dtype, layout, num_blocks, block_size)
        self.kv_cache_dtype = kv_cache_dtype
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.backend = backend
        self._kernel_writes = backend == "triton" and config.is_latent and kv_cache_dtype in ROW_FORMATS
        self.device = torch.device(device)
        if storage is None:
            storage = torch.zeros(self.kv_layout.nbytes, dtype=torch.uint8, device=device)
        self.storage: Tensor = storage(self.kv_layout.nbytes) if callable(storage) else storage
        if self.storage.shape != (self.kv_layout.nbytes,) or self.storage.dtype is not torch.uint8 or self.storage.device.type != self.device.type:
            raise ValueError(f"the pool takes {self.kv_layout.nbytes} uint8 on {self.device}; its storage is {tuple(self.storage.shape)} "
                             f"{self.storage.dtype} on {self.storage.device}")
        rows = self._typed(self.fmt, self.kv_layout.shape, self.kv_layout.strides, self.kv_layout.offset)  # (L, B, H, N, W)
        self._pages = [_Pages(layer) for layer in rows.transpose(2, 3)]
        self._indexer_pages: list[_Pages] = []
        if self.indexer_fmt:
            keys = self._typed(self.indexer_fmt, self.kv_layout.indexer_shape, self.kv_layout.indexer_strides, self.kv_layout.indexer_offset)
            self._indexer_pages = [_Pages(layer) for layer in keys[:, :, 0]]

    @property
    def nbytes(self) -> int:
        return self.kv_layout.nbytes

    def zero_(self) -> None:
        """Overwrite every row and indexer key with zero bytes."""
        self.storage.zero_()

    def row(self, layer: int, slot: int, head: int = 0) -> Tensor:
        """The stored bytes of one token in one layer and head, as a view: (row_bytes,) uint8."""
        block, offset = divmod(slot, self.block_size)
        strides = self.kv_layout.strides
        start = self.kv_layout.offset + layer * strides[0] + block * strides[1] + head * strides[2] + offset * strides[3]
        return self.storage[start : start + self.fmt.nbytes]

    def pages(self, layer: int) -> Tensor:
        """One layer as kernels take it, a view: (B, N, H, storage_width) of the format's storage dtype."""
        return self._pages[layer].pages

    def indexer_pages(self, full_index: int) -> Tensor:
        """The same of the `full_index`-th layer that has an indexer: (B, N, storage_width)."""
        return self._indexer_pages[full_index].pages

    def write(self, layer: int, slots: Tensor, a: Tensor, b: Tensor) -> None:
        """slots (T,) int64, a (T, H, wa), b (T, H, wb): quantise and store."""
        if self._kernel_writes:
            quantize_rows(a[:, 0], b[:, 0], self.pages(layer)[:, :, 0], slots, self.kv_cache_dtype, self.backend)
        else:
            self._pages[layer].write(slots, self.fmt.quantize(a, b))

    def read_blocks(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """block_ids (..., n) int64 -> (..., n*N, H, wa), (..., n*N, H, wb), in the order of the ids."""
        return self.fmt.dequantize(self._pages[layer].read_blocks(block_ids), self.dtype)

    def read_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots (...) int64, all valid -> (..., H, wa), (..., H, wb)."""
        return self.fmt.dequantize(self._pages[layer].read_slots(slots), self.dtype)

    def write_indexer(self, full_index: int, slots: Tensor, keys: Tensor) -> None:
        """slots (T,), keys (T, d), for the `full_index`-th layer that has an indexer."""
        if self.backend == "triton":
            append_indexer_keys(keys, self.indexer_pages(full_index), slots, self.backend)
        else:
            self._indexer_pages[full_index].write(slots, self.indexer_fmt.quantize(keys))

    def _typed(self, fmt: RowFormat | IndexerFormat, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
        """The byte view's twin in the format's storage dtype; its channels are `storage_width` elements."""
        size = fmt.storage_dtype.itemsize
        steps = (*(stride // size for stride in strides[:-1]), 1)
        return self.storage.view(fmt.storage_dtype).as_strided((*shape[:-1], fmt.storage_width), steps, offset // size)


class _Pages:
    """One layer of the pool as (B, N, *row): rows by slot and by block.

    Where neighbouring slots lie one stride apart the layer is also a flat (B*N, *row), and a slot needs no division.
    """

    def __init__(self, pages: Tensor) -> None:
        self.pages = pages  # (B, N, *row)
        blocks, self.block_size = pages.shape[:2]
        flat = pages.stride(0) == self.block_size * pages.stride(1)
        self.flat = pages.as_strided((blocks * self.block_size, *pages.shape[2:]), pages.stride()[1:]) if flat else None

    def write(self, slots: Tensor, rows: Tensor) -> None:
        if self.flat is not None:
            self.flat.index_copy_(0, slots, rows)
        else:
            self.pages[slots // self.block_size, slots % self.block_size] = rows

    def read_blocks(self, block_ids: Tensor) -> Tensor:
        """(..., n) -> (..., n*N, *row)."""
        rows = self.pages.index_select(0, block_ids.reshape(-1))
        return rows.view(*block_ids.shape[:-1], block_ids.shape[-1] * self.block_size, *rows.shape[2:])

    def read_slots(self, slots: Tensor) -> Tensor:
        """(...) -> (..., *row)."""
        if self.flat is not None:
            rows = self.flat.index_select(0, slots.reshape(-1))
            return rows.view(*slots.shape, *rows.shape[1:])
        return self.pages[slots // self.block_size, slots % self.block_size]
