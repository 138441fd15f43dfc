"""What one selected row costs in memory traffic on each way from cached rows to attention, read out of the kernels' generated code.

The formulas are the book's (`minengine.arithmetic`): 352 bytes native; 352 + 576 + 576 = 1,504 staged; 576 where the cache holds FP8 rows.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from minkernels.addresses import touched
from minkernels.aot import all_cases, compile_case

__all__ = ["PATHS", "row_traffic"]

# Path -> the kernels that it runs: name, row format, and the arguments whose bytes are a row's.
PATHS = {
    "native": (("sparse_mla_kernel", "nvfp4_fp8_ds_mla", ("pages",)),),
    "staged": (("gather_to_fp8_kernel", None, ("pages", "out")), ("sparse_mla_kernel", "fp8", ("pages",))),
    "fp8": (("sparse_mla_kernel", "fp8", ("pages",)),),
}
BLOCK_SIZE, ROW = 64, 1024  # the pool that addresses are worked out for: rows so far apart that no two overlap


def row_traffic(path: str, arch: str = "sm_90a") -> dict[str, float]:
    """Bytes of memory that one selected row of GLM-5.3's shape costs, by what moves them: {"gather_to_fp8_kernel loads": 352, ...}.

    The list of slots, and what does not grow with the rows (queries, results), are left out.

    Raises:
        ValueError: an unknown path.
        ImportError, RuntimeError: as `minkernels.aot.all_cases`.
    """
    if path not in PATHS:
        raise ValueError(f"path='{path}': use one of {', '.join(PATHS)}")
    cases = [case for case in all_cases().values() if arch in case.arches and case.constants.get("RANK") == 512]
    costs: dict[str, float] = {}
    for kernel, row_format, arguments in PATHS[path]:
        case = next(case for case in cases if case.kernel.__name__ == kernel and case.constants.get("FORMAT") == row_format)
        rows = case.constants.get("BLOCK_N", 1)  # of a pass through the loop; a program without a loop has one row
        # Compiled without stages, so that a loop loads what it needs in the same pass.
        code = compile_case(replace(case, num_stages=1), arch).asm["ttgir"]
        numbers = {"num_slots": 2**31 - 1, "block_size": BLOCK_SIZE, "page_stride": BLOCK_SIZE * ROW, "row_stride": ROW, "num_heads": 16,
                   "num_entries": rows, "split_entries": rows, "q_stride": 2**16, "q_head_stride": 2**12, "slots_stride": rows, "slot_stride": 1}
        slots = np.arange(rows) * (3 * BLOCK_SIZE + 1)  # each in a block of its own
        found = touched(code, [name for name, kind in case.signature.items() if kind != "constexpr"], {"slots": slots}, numbers)
        for verb, by_argument in (("loads", found.loaded), ("stores", found.stored)):
            if total := sum(by_argument.get(name, 0) for name in arguments):
                costs[f"{kernel} {verb}"] = total / rows
    return costs
