"""Ahead-of-time report: `python -m minkernels.aot --target sm_100a`, no GPU needed.

Compiles every kernel that a `*_kernel.py` of this package lists in its `aot_cases()` and reads what the machine code needs: registers,
spilled bytes, shared memory, hence how many blocks and warps an SM holds; and whether it has the tensor-core and number-conversion
instructions that it was written for. `minkernels.aot_budget` keeps those figures from growing unseen.
"""
from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from minkernels.aot_case import ARCHITECTURES, Case
from minkernels.launch import NO_TRITON
from minkernels.machine_code import read_cubin
from minkernels.occupancy import LIMITS, occupancy

__all__ = ["ARCHITECTURES", "Report", "all_cases", "compile_case", "compile_report", "markdown", "table"]


@dataclass(frozen=True)
class Report:
    """One case on one architecture."""
    kernel: str  # the case's name
    arch: str
    registers: int  # a thread
    spill_bytes: int  # of stack a thread
    shared_bytes: int  # a block
    tensor_columns: int  # of tensor memory a block
    num_warps: int  # a block
    blocks_per_sm: int
    warps_per_sm: int
    limiter: str  # what ends first when an SM is filled with blocks
    instructions: int  # SASS
    opcodes: dict[str, int]  # tensor-core and conversion instructions, by opcode
    kinds: tuple[str, ...]  # of those, sorted
    wants: tuple[str, ...]  # the kinds that the case asks for


def all_cases() -> dict[str, Case]:
    """Every case of the package by its name.

    Raises:
        ImportError: no Triton.
        RuntimeError: the interpreter is on, which leaves nothing to compile.
        ValueError: two cases of one name.
    """
    try:
        import triton
    except ImportError as error:
        raise ImportError(NO_TRITON) from error
    cases: dict[str, Case] = {}
    for file in sorted(Path(__file__).parent.glob("*_kernel.py")):
        module = import_module(f"minkernels.{file.stem}")
        for case in getattr(module, "aot_cases", list)():  # a module without: device functions that the others share
            if not isinstance(case.kernel, triton.JITFunction):
                raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and cannot be compiled; unset it and run again")
            if case.name in cases:
                raise ValueError(f"case '{case.name}' of {file.name} has another's name; give it one of its own")
            cases[case.name] = case
    return cases


def compile_case(case: Case, arch: str):
    """Triton's compiled kernel: `.asm["ttgir"]`, `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`. Comes from Triton's cache the second time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # What a launch finds out about its arguments: torch's pointers are multiples of 16, and so are the numbers the case names.
    aligned = [i for i, (name, kind) in enumerate(case.signature.items()) if kind.startswith("*") or name in case.divisible]
    source = ASTSource(case.kernel, case.signature, case.constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), 32)
    return triton.compile(source, target=target, options={"num_warps": case.num_warps, "num_stages": case.num_stages})


def compile_report(arch: str, jobs: int = 1, only: str = "") -> list[Report]:
    """Compile every kernel for `arch`.

    Args:
        jobs: processes that compile side by side; 1: this one.
        only: no cases but those whose name has this in it.
    Raises:
        ValueError: an arch that is not one of ARCHITECTURES, or no case of that name.
        ImportError: no Triton.
        RuntimeError: the interpreter is on, or a kernel does not compile.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch='{arch}': use one of {', '.join(ARCHITECTURES)}")
    names = [case.name for case in all_cases().values() if arch in case.arches and only in case.name]
    if not names:
        raise ValueError(f"no kernel for {arch} has '{only}' in its name; use part of one of: {', '.join(all_cases())}")
    if jobs == 1:
        return [_report(name, arch) for name in names]
    with ProcessPoolExecutor(min(jobs, len(names)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(_report, names, [arch] * len(names)))


def _report(name: str, arch: str) -> Report:
    case = all_cases()[name]  # by name: a kernel does not travel to another process
    try:
        compiled = compile_case(case, arch)
    except Exception as error:  # Triton's own names no case, and not all of them travel between processes
        raise RuntimeError(f"case '{name}' does not compile for {arch}: {error}") from error
    code = read_cubin(compiled.asm["cubin"])
    shared, columns = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
    warps = compiled.metadata.num_warps
    held = occupancy(arch, code.registers, shared, warps, columns)
    return Report(name, arch, code.registers, code.stack_bytes, shared, columns, warps, held.blocks, held.warps, held.limiter,
                  code.instructions, code.opcodes, tuple(sorted(code.kinds)), case.wants)


HEADER = ("kernel", "registers", "spilled B", "shared B", "warps", "blocks/SM", "warps/SM", "limited by", "instructions", "of which")
LEFT = {"kernel", "limited by", "of which"}  # columns of words


def _cells(r: Report) -> tuple[str, ...]:
    opcodes = ", ".join(f"{count} {opcode}" for opcode, count in sorted(r.opcodes.items()))
    numbers = (r.registers, r.spill_bytes, r.shared_bytes, r.num_warps, r.blocks_per_sm, r.warps_per_sm)
    return r.kernel, *(f"{n:,}" for n in numbers), r.limiter, f"{r.instructions:,}", opcodes or "-"


def table(reports: list[Report]) -> str:
    """The reports as aligned text, a line a kernel."""
    rows = [HEADER, *map(_cells, reports)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(cell.ljust(w) if name in LEFT else cell.rjust(w) for name, cell, w in zip(HEADER, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(reports: list[Report]) -> str:
    """The reports as a Markdown table."""
    rows = [HEADER, [":--" if name in LEFT else "--:" for name in HEADER], *map(_cells, reports)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minkernels.aot", description="Compile every kernel ahead of time and say what its "
                                     "machine code needs.")
    parser.add_argument("positional", nargs="*", metavar="ARCH", help="the same as --target")
    parser.add_argument("--target", action="append", default=[], metavar="ARCH", help=f"{' or '.join(ARCHITECTURES)}; may be given twice. Default: all")
    parser.add_argument("--only", default="", metavar="PART", help="the kernels whose name has this part")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    parser.add_argument("--write-budget", action="store_true", help="make what was found the budget that the tests hold the kernels to")
    args = parser.parse_args(argv)
    try:
        if args.write_budget and (args.only or args.target or args.positional):
            raise ValueError("--write-budget needs every kernel on every target; leave --only and targets out")
        reports = {arch: compile_report(arch, args.jobs, args.only) for arch in args.target + args.positional or ARCHITECTURES}
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    every = [r for of_arch in reports.values() for r in of_arch]
    if args.write_budget:
        from minkernels import aot_budget

        aot_budget.write(every)
        print(f"{aot_budget.PATH.name}: {len(every)} kernels")
    elif args.format == "json":
        import json

        print(json.dumps([asdict(r) for r in every]))
    else:
        render = table if args.format == "text" else markdown
        print("\n\n".join(f"{arch}\n{render(of_arch)}\nLimits of an SM: {LIMITS[arch].source}." for arch, of_arch in reports.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
