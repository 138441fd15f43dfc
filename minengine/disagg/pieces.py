"""From block ids to the pieces of a transfer: which bytes of one pool go to which bytes of another, and how few copies that takes.

Two pools of the same geometry move whole blocks, region by region. Any other pair moves runs of tokens: a run is what lies in one
piece on both sides, so pools may differ in block size and in order. Neighbours that are dense on BOTH sides become one piece, which
is the only merge a transfer engine may do: a gap on either side is somebody else's memory. numpy only.

A pool of one of several ranks may have some of a request's tokens, or some of the heads; `shared_pieces` moves what two such have in common.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minengine.arithmetic.moving import Take
from minengine.config import ConfigError
from minengine.kv.layout import KVLayout

__all__ = ["Pieces", "Side", "check_pair", "pieces", "shared_pieces"]

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
        found = _rows(src, src_ids, dst, dst_ids, _runs(src, dst, start, stop), rows, keys, (0, 0, src.num_heads))
    asked = len(found[2])
    return Pieces(*(_merge(*found) if merge else found), asked=asked)


@dataclass(frozen=True)
class Side:
    """One rank's pool, as far as `shared_pieces` asks: it has every `context`-th token, from the rank's first on, and these heads of the model's.

    Its layout's blocks are as long as what the rank keeps of a block.
    """

    layout: KVLayout
    block_ids: Sequence[int]
    context: int = 1
    heads: range = range(1)


def shared_pieces(src: Side, dst: Side, take: Take, *, start: int, stop: int) -> Pieces:
    """What `take` says of tokens start ... stop-1, from one rank's pool to another's.

    Raises:
        IndexError: as `pieces`.
    """
    first = take.first + max(0, -(-(start - take.first) // take.every)) * take.every
    tokens = range(first, stop, take.every)
    begin = [first // side.context for side in (src, dst)]  # the first one's place among the rank's own
    step = [take.every // side.context for side in (src, dst)]
    if not tokens:
        return Pieces(*np.zeros((3, 0), np.int64), asked=0)
    stops = [at + each * (len(tokens) - 1) + 1 for at, each in zip(begin, step)]
    if step == [1, 1] and begin[0] == begin[1] and src.heads == dst.heads:
        return pieces(src.layout, src.block_ids, dst.layout, dst.block_ids, start=begin[0], stop=stops[0])
    ids = [_ids(side.layout, side.block_ids, name, end) for side, end, name in zip((src, dst), stops, ("source", "destination"))]
    if step == [1, 1]:
        runs = _runs(src.layout, dst.layout, begin[0], stops[0])
    else:  # what is neighbours on one side is not on the other
        places = np.arange(len(tokens), dtype=np.int64)
        runs = begin[0] + step[0] * places, begin[1] + step[1] * places, np.ones(len(tokens), np.int64)
    heads = take.heads.start - src.heads.start, take.heads.start - dst.heads.start, len(take.heads)
    every_plane = [np.arange(n, dtype=np.int64) for n in (src.layout.num_layers, src.layout.num_indexer_layers)]
    found = _rows(src.layout, ids[0], dst.layout, ids[1], runs, *every_plane, heads)
    return Pieces(*_merge(*found), asked=len(found[2]))


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


def _runs(src: KVLayout, dst: KVLayout, start: int, stop: int) -> tuple[Ints, Ints, Ints]:
    """Tokens start ... stop-1 as runs that reach as far as both a source block and a destination block: first token there, and here, and how many."""
    cuts = [np.arange(-(-start // size) * size, stop, size) for size in (src.block_size, dst.block_size)]
    first = np.unique(np.concatenate([np.array([start] if stop > start else [], np.int64), *cuts])).astype(np.int64)
    return first, first, np.diff(np.append(first, stop))


def _rows(src: KVLayout, src_ids: Ints, dst: KVLayout, dst_ids: Ints, runs: tuple[Ints, Ints, Ints], layers: Ints, keys: Ints,
          shared: tuple[int, int, int]) -> tuple[Ints, Ints, Ints]:
    """Runs of tokens, of as many heads as lie side by side in both. `shared`: the first head there, and here, and how many."""
    parts = []
    for planes, (*head_at, heads), nbytes, views in (
            (layers, shared, src.row_bytes, ((src.offset, src.strides), (dst.offset, dst.strides))),
            (keys, (0, 0, 1), src.indexer_bytes, ((src.indexer_offset, src.indexer_strides), (dst.indexer_offset, dst.indexer_strides)))):
        if not planes.size:
            continue
        *tokens, lengths = runs
        heads_each = 1
        if all(strides[3] == nbytes for _, strides in views):
            pass  # a head's rows follow each other in both: a run is one head's
        elif all(strides[3] == heads * nbytes for _, strides in views):
            heads_each = heads  # a token's heads follow each other in both: a run is all of them
        else:  # every row is alone
            within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens, lengths = [np.repeat(first, lengths) + within for first in tokens], np.ones(len(within), np.int64)
        places = []
        for at, head, ids, size, (offset, strides) in zip(tokens, head_at, (src_ids, dst_ids), (src.block_size, dst.block_size), views):
            layer, block, head_step, token, _ = strides
            within_plane = ids[at // size] * block + at % size * token
            places.append((offset + (planes * layer)[:, None, None] + ((head + np.arange(0, heads, heads_each)) * head_step)[:, None] + within_plane).ravel())
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
