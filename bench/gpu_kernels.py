"""Sparse MLA decode attention on a card: the paths native, staged and fp8 beside each other, beside their floors, and beside FlashMLA.

One pool of rows serves every case; a case draws its lists from all of it. Imported where CUDA is there.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch

from minengine.arithmetic import decode_launches
from minkernels.rows import pack
from minkernels.sparse_mla import sparse_mla_decode

from .gpu_timing import graph_samples, l2_bytes

__all__ = ["CASES", "Case", "Pool", "flash_mla"]

RANK, ROPE, TOP_K = 512, 64, 2048
BLOCK = 64  # rows of a page
ROWS = 1 << 20  # of the pool, in each format
FORMATS = {"native": "nvfp4_fp8_ds_mla", "staged": "nvfp4_fp8_ds_mla", "fp8": "fp8"}
COLD_L2S = 4  # a cold graph reads this many times what L2 holds
MOST_LAUNCHES, FEWEST_LAUNCHES = 64, 4


@dataclass(frozen=True)
class Case:
    """One setting; all paths run it."""

    tokens: int
    heads: int = 16
    fill: float = 1.0  # share of the list that holds a row; the rest is -1
    cold: bool = True
    empty: str = "skipped"  # "row zero": what a kernel without the lesson of -1 does, every empty entry reads the pool's first row

    @property
    def name(self) -> str:
        words = [f"{self.tokens} tokens", f"{self.heads} heads", f"{self.fill:.0%} full", "cold L2" if self.cold else "warm L2"]
        return ", ".join(words + ([] if self.empty == "skipped" else ["empty entries read row zero"]))


POINT = Case(15)  # the source's point: 15 query tokens, 16 heads, 2,048 positions
CASES = (
    POINT, Case(15, cold=False), *(Case(tokens) for tokens in (1, 4, 64, 256, 512)), Case(256, cold=False),
    *(Case(tokens, fill=fill) for tokens in (15, 256) for fill in (0.05, 0.25, 0.5)), Case(15, heads=64), Case(256, heads=64),
    Case(35, fill=0.5), Case(35, fill=0.5, empty="row zero"),
)


class Pool:
    """Random rows in every format, with the same contents, and the launches of a case over them."""

    def __init__(self, rows: int = ROWS, device: str = "cuda", seed: int = 0) -> None:
        self.rows, self.device = rows, device
        self.draw = torch.Generator(device=device).manual_seed(seed)
        self.pages = {name: [] for name in {*FORMATS.values(), "fp8_ds_mla"}}
        for _ in range(0, rows, part := min(rows, 1 << 17)):  # in parts: float32 rows are seven times as wide as packed ones
            latent = torch.randn(part, RANK, device=device, generator=self.draw)
            rope = torch.randn(part, ROPE, device=device, generator=self.draw)
            for name, parts in self.pages.items():
                parts.append(pack(latent, rope, name))
        self.pages = {name: torch.cat(parts).unflatten(0, (-1, BLOCK)) for name, parts in self.pages.items()}

    def query(self, case: Case) -> torch.Tensor:
        """(T, H, 576) float16, scaled as an engine would."""
        q = torch.randn(case.tokens, case.heads, RANK + ROPE, device=self.device, generator=self.draw)
        return (q * (192 + ROPE) ** -0.5).half()

    def lists(self, case: Case) -> Iterator[torch.Tensor]:
        """(T, 2048) int32 slots for ever; the filled part comes first, as an indexer that sees too few tokens leaves it."""
        filled = round(case.fill * TOP_K)
        while True:
            slots = torch.randint(self.rows, (case.tokens, TOP_K), device=self.device, generator=self.draw, dtype=torch.int32)
            slots[:, filled:] = -1 if case.empty == "skipped" else 0
            yield slots

    def launches(self, case: Case, path: str) -> list[Callable[[], Any]]:
        nbytes = sum(launch.nbytes for launch in decode_launches(path, case.tokens, case.heads, TOP_K, case.fill))
        count = min(MOST_LAUNCHES, max(FEWEST_LAUNCHES, -(-COLD_L2S * l2_bytes() // nbytes))) if case.cold else 20
        q, lists, pages = self.query(case), self.lists(case), self.pages[FORMATS[path]]
        slots = [next(lists) for _ in range(count)] if case.cold else [next(lists)] * count

        def launch(slots: torch.Tensor) -> Callable[[], Any]:
            return lambda: sparse_mla_decode(q, pages, slots, RANK, FORMATS[path], path="staged" if path == "staged" else "native", backend="triton")

        return [launch(one) for one in slots]

    def samples(self, case: Case, path: str) -> list[float]:
        """Seconds a launch."""
        return graph_samples(self.launches(case, path))


def flash_mla(pool: Pool, case: Case) -> list[float] | str:
    """FlashMLA's sparse decode on its own 656-byte rows: seconds a launch, or in words why there are none.

    It takes 64 or 128 heads; a case with fewer says so.
    """
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        return "FlashMLA is not installed"
    if case.heads not in (64, 128):
        return f"FlashMLA takes 64 or 128 heads, not {case.heads}"
    q = pool.query(case).bfloat16().unsqueeze(1)  # (T, 1, H, 576)
    pages = pool.pages["fp8_ds_mla"].unsqueeze(2).view(torch.float8_e4m3fn)  # (B, 64, 1, 656)
    lists = pool.lists(case)
    slots = [next(lists).unsqueeze(1) for _ in range(8)]  # (T, 1, K)
    plan, _ = get_mla_metadata()

    def launch(indices: torch.Tensor) -> Callable[[], Any]:
        return lambda: flash_mla_with_kvcache(q, pages, None, None, RANK, plan, softmax_scale=1.0, is_fp8_kvcache=True, indices=indices)

    try:
        launch(slots[0])()  # the first call makes its plan, which a recorded one must find there
        return graph_samples([launch(one) for one in slots])
    except Exception as error:  # another version's interface, a card it does not know
        return f"FlashMLA is installed, but its call failed: {type(error).__name__}: {error}"
