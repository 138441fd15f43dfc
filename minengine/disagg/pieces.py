"""From block ids to the pieces of a transfer: which bytes of one pool go to which bytes of another, and how few copies that takes.

Two pools of the same geometry move whole blocks, region by region. Any other pair moves runs of tokens: a run is what lies in one
piece on both sides, so pools may differ in block size and in order. Neighbours that are dense on BOTH sides become one piece, which
is the only merge a transfer engine may do: a gap on either side is somebody else's memory. numpy only.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minengine.config import ConfigError
from minengine.kv.layout import KVLayout

__all__ = ["Pieces", "check_pair", "pieces"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """What to copy: `nbytes[i]` bytes from byte `src[i]` of one pool to byte `dst[i]` of the other; three int64 arrays of one length."""

    src: Ints
    dst: Ints
    nbytes: Ints
    asked: int  # pieces before neighbours were merged

    @classmethod
    def one(cls, nbytes: int, src: int = 0, dst: int = 0) -> Pieces:
        """A single piece: a word of a lease table, or a pool as a whole."""
        return cls(*(np.array([n], np.int64) for n in (src, dst, nbytes)), asked=1)

    @property
    def merged(self) -> int:
        """Pieces there are now."""
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def split(self, nbytes: int) -> list[Pieces]:
        """The same bytes in the same order, in parts of at most `nbytes`; a piece that reaches over the end of a part is cut there. What was asked
        for is counted with the first part."""
        total = self.total_bytes
        if total <= nbytes:
            return [self]
        ends = np.cumsum(self.nbytes)
        borders = np.arange(0, total, nbytes)  # of the parts, in the stream of all bytes
        at = np.union1d(ends - self.nbytes, borders)
        piece = np.searchsorted(ends, at, side="right")
        offset = at - (ends - self.nbytes)[piece]
        src, dst, lengths = self.src[piece] + offset, self.dst[piece] + offset, np.diff(at, append=total)
        firsts = np.searchsorted(at, borders).tolist()
        return [Pieces(src[i:j], dst[i:j], lengths[i:j], asked=0 if i else self.asked) for i, j in zip(firsts, [*firsts[1:], len(at)])]


def check_pair(src: KVLayout, dst: KVLayout, src_dtype: str | None = None, dst_dtype: str | None = None) -> None:
    """Two pools between which rows can move: block size, order and number of blocks may differ, nothing else.

    Args:
        src_dtype, dst_dtype: the pools' `kv_cache_dtype`, compared where both are given: two formats may be equally wide.

    Raises:
        ConfigError: they cannot be paired; one sentence that names the field and both values.
    """
    if None not in (src_dtype, dst_dtype) and src_dtype != dst_dtype:
        raise ConfigError(f"kv_cache_dtype='{src_dtype}' here and '{dst_dtype}' there: rows move as they are stored, so give both workers the same")
    for field, remedy in (("num_layers", "both workers need the same model"), ("num_heads", "both workers need the same model and tensor parallelism"),
                          ("row_bytes", "both workers need the same model and kv_cache_dtype"), ("num_indexer_layers", "both workers need the same model"),
                          ("indexer_bytes", "both workers need the same model and kv_cache_dtype")):
        ours, theirs = getattr(src, field), getattr(dst, field)
        if ours != theirs:
            raise ConfigError(f"{field} is {ours} here and {theirs} there: {remedy}")


def pieces(src: KVLayout, src_blocks: Sequence[int], dst: KVLayout, dst_blocks: Sequence[int], *, start: int = 0, stop: int,
           layers: Sequence[int] | None = None, indexer_layers: Sequence[int] | None = None, merge: bool = True) -> Pieces:
    """The rows of tokens start ... stop-1 from one request's blocks to its blocks in another pool.

    Block i of a table holds tokens i*block_size ... of the request. Where the pools share order and block size, `start` is a multiple
    of it and all layers are asked for, whole blocks move, the unused end of the last one with them; else exactly these rows.

    Args:
        layers: row layers to move; None is all of them, and all indexer planes.
        indexer_layers: with `layers`, the indexer planes to move (the n-th `full` layer's is plane n); none by default.
        merge: join neighbours that are dense on both sides, whatever the order of the block ids; False lists what was asked for,
            region by region where whole blocks move.

    Raises:
        ConfigError: the pools cannot be paired.
        IndexError: a block outside its pool, a table that ends before token `stop`, or a layer that is not there.
    """
    check_pair(src, dst)
    if not 0 <= start <= stop:
        raise IndexError(f"tokens {start} to {stop}: give 0 <= start <= stop")
    src_ids, dst_ids = (_ids(*side, stop) for side in ((src, src_blocks, "source"), (dst, dst_blocks, "destination")))
    if layers is None and start % src.block_size == 0 and (src.order, src.block_size) == (dst.order, dst.block_size):
        found = _whole_blocks(src, src_ids, dst, dst_ids, start // src.block_size, -(-stop // src.block_size))
    else:
        rows = np.asarray(range(src.num_layers) if layers is None else layers, np.int64)
        keys = np.asarray(range(src.num_indexer_layers) if layers is None else indexer_layers or (), np.int64)
        for name, asked, there in (("layers", rows, src.num_layers), ("indexer_layers", keys, src.num_indexer_layers)):
            if asked.size and not 0 <= asked.min() <= asked.max() < there:
                raise IndexError(f"{name}={asked.tolist()}: the pools have {there}")
        found = _rows(src, src_ids, dst, dst_ids, start, stop, rows, keys)
    asked = len(found[2])
    return Pieces(*(_merge(*found) if merge else found), asked=asked)


def _ids(layout: KVLayout, blocks: Sequence[int], side: str, stop: int) -> Ints:
    """The blocks that hold tokens before `stop`, checked."""
    needed = -(-stop // layout.block_size)
    if len(blocks) < needed:
        raise IndexError(f"{len(blocks)} blocks of {layout.block_size} tokens at the {side} do not reach token {stop}")
    ids = np.asarray(blocks[:needed], np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < layout.num_blocks:
        raise IndexError(f"a block id at the {side} is outside the pool of {layout.num_blocks} blocks")
    return ids


def _whole_blocks(src: KVLayout, src_ids: Ints, dst: KVLayout, dst_ids: Ints, first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """Blocks first ... last-1 of both tables, all blocks of a region together, as `KVLayout.regions` lists them."""
    here, there = (np.array(layout.region_starts(), np.int64).T[..., None] for layout in (src, dst))  # (3, regions, 1)
    return ((here[0] + here[1] * src_ids[first:last]).ravel(), (there[0] + there[1] * dst_ids[first:last]).ravel(),
            np.repeat(here[2], last - first, axis=1).ravel())


def _rows(src: KVLayout, src_ids: Ints, dst: KVLayout, dst_ids: Ints, start: int, stop: int, layers: Ints, keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Token runs: as long as both a source block and a destination block reach, as many heads as lie side by side in both."""
    cuts = [np.arange(-(-start // size) * size, stop, size) for size in (src.block_size, dst.block_size)]
    first = np.unique(np.concatenate([np.array([start] if stop > start else [], np.int64), *cuts])).astype(np.int64)  # each run's first token
    count = np.diff(np.append(first, stop))
    tables = (src_ids, src.block_size), (dst_ids, dst.block_size)
    parts = []
    for planes, heads, nbytes, views in ((layers, src.num_heads, src.row_bytes, ((src.offset, src.strides), (dst.offset, dst.strides))),
                                         (keys, 1, src.indexer_bytes, ((src.indexer_offset, src.indexer_strides), (dst.indexer_offset, dst.indexer_strides)))):
        if not planes.size:
            continue
        tokens, lengths, heads_each = first, count, 1
        if all(strides[3] == nbytes for _, strides in views):
            pass  # a head's rows follow each other in both: a run is one head's
        elif all(strides[3] == heads * nbytes for _, strides in views):
            heads_each = heads  # a token's heads follow each other in both: a run is all of them
        else:
            tokens, lengths = np.arange(start, stop, dtype=np.int64), np.ones(stop - start, np.int64)  # one of each: every row is alone
        places = []
        for (ids, size), (offset, strides) in zip(tables, views):
            layer, block, head, token, _ = strides
            at = ids[tokens // size] * block + tokens % size * token
            places.append((offset + (planes * layer)[:, None, None] + (np.arange(0, heads, heads_each) * head)[:, None] + at).ravel())
        parts.append((*places, np.tile(lengths * (nbytes * heads_each), planes.size * (heads // heads_each))))
    return tuple(np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, np.int64) for i in range(3))


def _merge(src: Ints, dst: Ints, nbytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Sorted by source, so that all which can touch do; joined where the next begins at this one's end on both sides."""
    if not nbytes.size:
        return src, dst, nbytes
    order = np.argsort(src, kind="stable")
    src, dst, nbytes = src[order], dst[order], nbytes[order]
    breaks = (src[1:] != src[:-1] + nbytes[:-1]) | (dst[1:] != dst[:-1] + nbytes[:-1])
    heads = np.flatnonzero(np.concatenate([[True], breaks]))
    return src[heads], dst[heads], np.add.reduceat(nbytes, heads)
