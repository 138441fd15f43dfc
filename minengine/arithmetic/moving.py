"""Moving a cache: the pieces that a layout cuts one request into, their bytes, who takes which of them, and what a transfer takes."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from minengine.config import KV_CACHE_LAYOUTS, ConfigError

from .copies import topology
from .sharding import rank_share

__all__ = ["Copies", "Take", "Taken", "copy_costs", "descriptors", "request_copies", "taken", "takes", "transfer_time_s", "wire_time_s"]


def descriptors(layout: str, tokens: int, block_size: int, layers: int, regions_per_layer: int = 1, indexer_planes: int = 0) -> int:
    """Pieces of one request's cache before merging.

    One a block where the blocks are outermost (`BLHNC`, ...), else `regions_per_layer` a layer and block, and one an indexer plane and
    block: 200,000 tokens are 15,288 at 78 layers and 1,024-token blocks, 3,125 block-major at 64.

    Raises:
        ConfigError: an unknown layout.
    """
    if layout not in KV_CACHE_LAYOUTS:
        raise ConfigError(f"kv_cache_layout='{layout}': use one of {', '.join(KV_CACHE_LAYOUTS)}")
    blocks = -(-tokens // block_size)
    return blocks if layout[0] == "B" else blocks * (layers * regions_per_layer + indexer_planes)


@dataclass(frozen=True)
class Copies:
    """One request's cache as pieces. Whole blocks move: the last one as if it were full."""

    blocks: int
    regions: int  # pieces that one block is in; also all that is left where its blocks are neighbours on both sides, and merge
    piece_bytes: int  # of one that holds rows; where blocks are outermost, of a whole block
    indexer_piece_bytes: int  # of one that holds indexer keys alone; 0: there is none
    nbytes: int  # of all
    used_bytes: int  # of them, those of the request's tokens

    @property
    def count(self) -> int:
        return self.blocks * self.regions


def request_copies(layout: str, tokens: int, block_size: int, layers: int, row: int, regions_per_layer: int = 1, indexer_planes: int = 0,
                   indexer: int = 0) -> Copies:
    """The pieces of a request of `tokens` tokens with rows of `row` bytes in each of `layers` layers and, in `indexer_planes` of
    them, keys of `indexer` bytes. Two regions a layer are two tensors of half the width.

    Raises:
        ConfigError: an unknown layout, more planes than layers, or a layer's bytes that the regions do not divide.
    """
    if indexer_planes > layers:
        raise ConfigError(f"num_indexer_layers={indexer_planes}: use at most num_hidden_layers, {layers}")
    if block_size * row % regions_per_layer:
        raise ConfigError(f"regions_per_layer={regions_per_layer}: block_size x row_bytes is {block_size * row}, which they do not divide; "
                          "use an even one")
    blocks = -(-tokens // block_size)
    regions = descriptors(layout, 1, 1, layers, regions_per_layer, indexer_planes)
    token = layers * row + indexer_planes * indexer
    whole = layout[0] == "B"
    return Copies(
        blocks=blocks,
        regions=regions,
        piece_bytes=block_size * token if whole else block_size * row // regions_per_layer,
        indexer_piece_bytes=0 if whole or not indexer_planes else block_size * indexer,
        nbytes=blocks * block_size * token,
        used_bytes=tokens * token,
    )


# --- from one topology to another --------------------------------------------------------------------------------

class Take(NamedTuple):
    """What one rank reads of a request from one rank that has rows of it."""

    source: int  # that rank
    first: int  # tokens first, first + every, first + 2 * every, ...
    every: int
    heads: range  # of the model's; range(1) of a latent, which has none


def takes(held: str, kept: str, rank: int, kv_heads: int = 1) -> list[Take]:
    """Who rank `rank` of a group of topology `kept` reads a request's rows from, when a group of topology `held` has them.

    A tensor-parallel rank has all rows of a latent: one of them is enough, and readers are spread over them. With DCP it has every m-th row.
    Of grouped heads (kv_heads above 1) it has those of its own heads. Of a data-parallel group one rank has the request, and has all
    of it: the topology counts as one rank on that side, number 0.

    Raises:
        ConfigError: a topology that cannot be read, or heads that its ranks do not divide.
    """
    here, there = topology(kept), topology(held)
    if kv_heads > 1:
        for name, shape in ((kept, here), (held, there)):
            if kv_heads % shape.tensor or shape.context > 1:
                raise ConfigError(f"topology='{name}': {kv_heads} heads are not split so; use a number of tensor-parallel ranks that divides them")
        mine = rank_share(kv_heads, here.tensor, rank)
        theirs = [rank_share(kv_heads, there.tensor, source) for source in range(there.tensor)]
        common = [range(max(mine.start, part.start), min(mine.stop, part.stop)) for part in theirs]
        return [Take(source, 0, 1, heads) for source, heads in enumerate(common) if heads]
    group = rank // here.context % (there.tensor // there.context)  # of ranks that have all rows between them
    every = math.lcm(here.context, there.context)
    return [Take(group * there.context + first % there.context, first, every, range(1))
            for first in range(every) if first % here.context == rank % here.context]


class Taken(NamedTuple):
    """What a `Take` comes to."""

    source: int
    pieces: int  # before neighbours are joined
    nbytes: int


def taken(held: str, kept: str, rank: int, layout: str, tokens: int, block_size: int, layers: int, row: int, *, kv_heads: int = 1,
          indexer_planes: int = 0, indexer: int = 0, start: int = 0) -> list[Taken]:
    """The pieces that `takes` comes to for tokens `start` to `tokens`, between pools of one layout and block size.

    Where both ranks keep the same rows and heads of a block, whole blocks move; else row by row, or as many rows as lie side by side on both
    sides: of a head in the layouts that have a block's tokens innermost.

    Args:
        start: a whole number of blocks.
        row, indexer: bytes of a token in one head, and of its indexer key, in one layer.
    """
    here, there = topology(kept), topology(held)
    found = []
    for source, first, every, heads in takes(held, kept, rank, kv_heads):
        count = len(range(start + first, tokens, every))
        if here.context == there.context and (kv_heads == 1 or here.tensor == there.tensor):
            apart = layout == "LHBNC"  # heads outside the blocks: a piece of its own for each
            copies = request_copies(layout, count, block_size // here.context, layers, len(heads) * row, len(heads) if apart else 1, indexer_planes, indexer)
            found.append(Taken(source, copies.count, copies.nbytes))
            continue
        runs = -(-tokens // block_size) - start // block_size if every == 1 and layout.endswith("NC") else count
        if not count:
            runs = 0
        found.append(Taken(source, runs * (layers * len(heads) + indexer_planes), count * (layers * len(heads) * row + indexer_planes * indexer)))
    return found


def transfer_time_s(nbytes: float, pieces: float, byte_s: float, copy_s: float) -> float:
    """Seconds of a transfer if each byte and each piece costs the same whatever the others do."""
    return nbytes * byte_s + pieces * copy_s


def copy_costs(nbytes: float, one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """(byte_s, copy_s) of `transfer_time_s` from two transfers, (pieces, seconds) each, of the same bytes.

    Raises:
        ValueError: the same number of pieces in both, which tells nothing.
    """
    (pieces, seconds), (others, other_s) = one, other
    if pieces == others:
        raise ValueError(f"pieces={pieces} in both transfers: two different counts tell what a piece costs")
    copy_s = (seconds - other_s) / (pieces - others)
    return (seconds - pieces * copy_s) / nbytes, copy_s


def wire_time_s(nbytes: float, bytes_per_s: float) -> float:
    """Seconds that the bytes alone take on a link, one way."""
    return nbytes / bytes_per_s
