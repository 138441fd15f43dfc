"""The widget Copy count: from tokens, layers, block size and layout to the pieces of a transfer, their bytes and its time.

    CopyCount()                                                       # a 200K-token request of GLM-5.3, layer by layer
    CopyCount(kv_cache_layout="BLHNC", block_size=64, num_indexer_layers=21)
    CopyCount(byte_s=2.5e-10, copy_s=1.1e-6, cost_source="measured on this machine, n=9")

The drawing (`copy_count.js`) works its numbers out in the page, so that it needs no kernel; they are those of
`minengine.arithmetic`, and `numbers` gives them here. The time is an estimate, linear in bytes and copies: `cost_source` says
where its two costs come from.
"""
from __future__ import annotations

from typing import Any

import traitlets
from minengine.arithmetic import GLM_5_3, Copies, copy_costs, indexer_bytes, layer_kinds, request_copies, row_bytes, transfer_time_s
from minengine.config import KV_CACHE_LAYOUTS, ConfigError

from .modules import bundle, styles
from .page_widget import PageWidget, refuse_unknown, within

__all__ = ["CopyCount"]

COUNTS = {  # least and most; the page still counts their products exactly
    "tokens": (1, 10**7),
    "num_hidden_layers": (1, 1000),
    "row_bytes": (1, 16_384),
    "num_indexer_layers": (0, 1000),
    "indexer_bytes": (1, 16_384),
    "block_size": (1, 65_536),
}
SECONDS = {"byte_s": (1e-15, 1e-6), "copy_s": (0.0, 1.0)}
CHOICES = ("kv_cache_layout", "regions_per_layer")
COMPARED = (("LBHNC", 1024), ("BLHNC", 64))  # the source's two settings
REPORTED = {  # claims descriptors_layer_major, transfer_layer_major_ms, descriptors_block_major, transfer_block_major_ms of book/claims.yml
    "layer_major": (19_559, 0.146),
    "block_major": (1_940, 0.078),
}
ROW = row_bytes("nvfp4_fp8_ds_mla").total
# The bytes are not reported: 1,940 descriptors are taken for as many blocks of 64 tokens of rows in 4 bits.
THEIR_BYTES = request_copies("BLHNC", REPORTED["block_major"][0] * 64, 64, GLM_5_3["num_hidden_layers"], ROW).nbytes
BYTE_S, COPY_S = (float(f"{cost:.3g}") for cost in copy_costs(THEIR_BYTES, *REPORTED.values()))
THEIRS = ("reasoned: what the source’s two reported transfers (19,559 descriptors in 146 ms, 1,940 in 78 ms) imply if time is linear in both "
          "and each moved 3.4 GB, a size that is not reported")
GIVEN = "as given"
TABLES = {
    "limits": {name: list(pair) for name, pair in {**COUNTS, **SECONDS}.items()},
    "layouts": list(KV_CACHE_LAYOUTS),
    "regions_per_layer": [1, 2],
    "indexer_layers": [0, layer_kinds()["full"]],
    "compared": [{"kv_cache_layout": layout, "block_size": size} for layout, size in COMPARED],
}


class CopyCount(PageWidget):
    """Copies of one request's transfer before merging, the bytes of each, and an estimate of the time of all.

    Every trait is two-way while a kernel runs. A value outside its limits is a TraitError that names the trait. What does
    not fit together (more indexer planes than layers, two regions of an odd layer) is refused by the constructor and by `numbers`,
    not by an assignment, since one trait changes at a time; the page shows the same sentence.
    """

    _esm = bundle("copy_count.js")
    _css = styles("controls.css", "copy_count.css")

    tokens = traitlets.Int(200_000, help="of the request").tag(sync=True)
    num_hidden_layers = traitlets.Int(GLM_5_3["num_hidden_layers"], help="layers that keep rows").tag(sync=True)
    row_bytes = traitlets.Int(ROW, help="of one token in one layer, all its heads").tag(sync=True)
    num_indexer_layers = traitlets.Int(0, help="layers that keep an indexer key as well; 0: the rows alone").tag(sync=True)
    indexer_bytes = traitlets.Int(indexer_bytes("nvfp4_fp8_ds_mla").total, help="of one indexer key").tag(sync=True)
    kv_cache_layout = traitlets.Enum(KV_CACHE_LAYOUTS, "LBHNC", help="the physical order of layer, block, head, token, channel").tag(sync=True)
    block_size = traitlets.Int(1024, help="tokens of a block").tag(sync=True)
    regions_per_layer = traitlets.Enum((1, 2), 1, help="tensors that a layer's rows are split over").tag(sync=True)
    byte_s = traitlets.Float(BYTE_S, help="seconds that a byte takes").tag(sync=True)
    copy_s = traitlets.Float(COPY_S, help="seconds that a copy takes besides its bytes").tag(sync=True)
    cost_source = traitlets.Unicode(THEIRS, help="where the two costs come from").tag(sync=True)
    tables = traitlets.Dict(TABLES, read_only=True, help="limits, choices and the settings to compare, for the page").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the traits as they were made").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        known = (*COUNTS, *CHOICES, *SECONDS, "cost_source")
        refuse_unknown(traits, known)
        if {*SECONDS}.intersection(traits):
            traits.setdefault("cost_source", GIVEN)
        super().__init__(**traits)
        self.initial = {name: getattr(self, name) for name in known}
        self.numbers  # an author's mistake is an error here, not a sentence in the page

    @traitlets.validate(*COUNTS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(COUNTS[name], name, proposal["value"])

    @traitlets.validate(*SECONDS)
    def _between(self, proposal: Any) -> float:
        name, value = proposal["trait"].name, proposal["value"]
        least, most = SECONDS[name]
        if not least <= value <= most:
            raise traitlets.TraitError(f"{name}={value}: use seconds from {least:g} to {most:g}")
        return value

    def _at(self, layout: str, block_size: int) -> Copies:
        return request_copies(layout, self.tokens, block_size, self.num_hidden_layers, self.row_bytes, self.regions_per_layer,
                              self.num_indexer_layers, self.indexer_bytes)

    @property
    def numbers(self) -> Copies:
        """The copies of the traits as they are now.

        Raises:
            ConfigError: more indexer planes than layers, or two regions of an odd number of bytes.
        """
        return self._at(self.kv_cache_layout, self.block_size)

    @property
    def compared(self) -> dict[tuple[str, int], tuple[int, float]]:
        """(copies, seconds) of the same request, by (layout, block size): the source's two, and what is set where that is another."""
        settings = dict.fromkeys((*COMPARED, (self.kv_cache_layout, self.block_size)))
        found = {setting: self._at(*setting) for setting in settings}
        return {setting: (it.count, transfer_time_s(it.nbytes, it.count, self.byte_s, self.copy_s)) for setting, it in found.items()}

    def _in_words(self) -> str:
        try:
            now, compared = self.numbers, self.compared
        except ConfigError as error:
            return f"Copy count: {error}"
        pieces = "1 piece" if now.regions == 1 else f"{now.regions} pieces"
        keys = f" and {now.indexer_piece_bytes:,}" if now.indexer_piece_bytes else ""
        told = "; ".join(f"{layout} with blocks of {size:,} tokens: {count:,} copies, about {1e3 * time_s:,.0f} ms"
                         for (layout, size), (count, time_s) in compared.items())
        return (f"Copy count: {self.tokens:,} tokens, {self.num_hidden_layers} layers, {self.kv_cache_layout}, blocks of {self.block_size:,} tokens: "
                f"{now.blocks:,} blocks of {pieces} are {now.count:,} copies of {now.piece_bytes:,}{keys} bytes, {now.nbytes:,} bytes in all. "
                f"Estimated times ({self.cost_source}): {told}.")
