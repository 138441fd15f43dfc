"""Moving a cache: the pieces that a layout cuts one request into, their bytes, and what a transfer of them takes."""
from __future__ import annotations

from dataclasses import dataclass

from minengine.config import KV_CACHE_LAYOUTS, ConfigError

__all__ = ["Copies", "copy_costs", "descriptors", "request_copies", "transfer_time_s", "wire_time_s"]


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
