"""The widget Kernel floor: from heads, chosen rows, queries and a card to bytes, operations, and the least time of each path.

    KernelFloor()                                                     # the source's launch on a GB200
    KernelFloor(heads=64, card="H200")
    KernelFloor(card="own", memory_tb_s=4.2, matrix_tflop_s=700)      # a card's measured peaks

The drawing (`kernel_floor.js`) works its numbers out in the page, so that it needs no kernel; they are those of
`minengine.arithmetic`, and `numbers` gives them here. The tables behind them (cards, rows, limits) are this file's.
"""
from __future__ import annotations

from dataclasses import asdict
from typing import Any

import traitlets
from minengine.arithmetic import CARDS, DECODE_ROWS, GLM_5_3, Card, PathFloor, decode_floor, row_bytes

from .modules import bundle, styles
from .page_widget import PageWidget, between, refuse_unknown, within

__all__ = ["KernelFloor"]

COUNTS = {"query_tokens": (1, 65536), "heads": (1, 512), "top_k": (1, 65536)}  # least and most; the page still counts their products exactly
AMOUNTS = {"fill": (0.0, 1.0), "memory_tb_s": (0.001, 1000.0), "matrix_tflop_s": (0.001, 100_000.0)}
OWN = "own"
TERA = 1e12
REPORTED = {  # the source's measured times; claims kernel_native_us, kernel_staged_us and kernel_fp8_us of book/claims.yml
    "setting": {"query_tokens": 15, "heads": 16, "top_k": 2048, "fill": 1.0, "card": "GB200"},
    "us": {"native": 12.0, "staged": 17.7, "fp8": 13.7},
}
TABLES = {
    "cards": {key: asdict(card) for key, card in CARDS.items()},
    "limits": {name: list(pair) for name, pair in {**COUNTS, **AMOUNTS}.items()},
    "rows": {path: row_bytes(row).total for path, row in DECODE_ROWS.items()},
    "order": {"cards": list(CARDS), "paths": list(DECODE_ROWS)},  # a stored page sorts keys
    "rank": GLM_5_3["kv_lora_rank"],
    "rope": GLM_5_3["qk_rope_head_dim"],
    "reported": REPORTED,
}


class KernelFloor(PageWidget):
    """Bytes, operations and least time of one launch of sparse decode attention, for each way to read its rows.

    Every trait is two-way while a kernel runs. A value outside its limits is a TraitError that names the trait.
    """

    _esm = bundle("kernel_floor.js")
    _css = styles("controls.css", "kernel_floor.css")

    query_tokens = traitlets.Int(15, help="queries of one launch: sequences times tokens decoded at once").tag(sync=True)
    heads = traitlets.Int(16, help="of one rank: the model's 64 over the tensor-parallel degree").tag(sync=True)
    top_k = traitlets.Int(GLM_5_3["index_topk"], help="slots in the list of a query").tag(sync=True)
    fill = traitlets.Float(1.0, help="share of the slots that hold a row; the rest is -1").tag(sync=True)
    card = traitlets.Enum((*CARDS, OWN), "GB200", help="whose peaks; own: the two below").tag(sync=True)
    memory_tb_s = traitlets.Float(1.0, help="own: peak of the memory, TB/s").tag(sync=True)
    matrix_tflop_s = traitlets.Float(100.0, help="own: peak of the matrix units on dense 16-bit values, TFLOP/s").tag(sync=True)
    tables = traitlets.Dict(TABLES, read_only=True, help="cards, rows, limits and reported times for the page").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the traits as they were made").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        known = (*COUNTS, *AMOUNTS, "card")
        refuse_unknown(traits, known)
        super().__init__(**traits)
        self.initial = {name: getattr(self, name) for name in known}

    @traitlets.validate(*COUNTS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(COUNTS[name], name, proposal["value"])

    @traitlets.validate(*AMOUNTS)
    def _between(self, proposal: Any) -> float:
        name = proposal["trait"].name
        return between(AMOUNTS[name], name, proposal["value"])

    @property
    def peaks(self) -> Card:
        """The card whose peaks the floors have now."""
        return CARDS.get(self.card) or Card("your own card", TERA * self.memory_tb_s, TERA * self.matrix_tflop_s, "given")

    @property
    def numbers(self) -> dict[str, PathFloor]:
        """What the page shows, by path."""
        return {path: decode_floor(path, self.peaks, self.query_tokens, self.heads, self.top_k, self.fill) for path in DECODE_ROWS}

    @property
    def reported_us(self) -> dict[str, float]:
        """The source's times by path where the setting is theirs; else empty."""
        return dict(REPORTED["us"]) if all(getattr(self, name) == value for name, value in REPORTED["setting"].items()) else {}

    def _in_words(self) -> str:
        def said(path: str, floor: PathFloor) -> str:
            bound = ", then ".join(dict.fromkeys(floor.bounds))
            ours = f"{path} {floor.nbytes / 1e6:,.2f} MB, at least {1e6 * floor.time_s:,.2f} µs (bound by {bound})"
            return ours + (f", reported {self.reported_us[path]} µs" if path in self.reported_us else "")

        numbers = self.numbers
        return (f"Kernel floor: one launch of {self.query_tokens:,} queries, {self.heads} heads and lists of {self.top_k:,} slots, {self.fill:.0%} full, "
                f"on {self.peaks.name}, {numbers['native'].flops / 1e9:,.2f} GFLOP: {'; '.join(said(*one) for one in numbers.items())}.")
