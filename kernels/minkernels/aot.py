"""Ahead-of-time compile report: `python -m minkernels.aot [sm_90a sm_100a]`, no GPU needed.

Compiles each kernel for each architecture and reads its cubin's resource usage with the `cuobjdump` that comes
with Triton. A stack above zero means that registers spilled to local memory.
"""
from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minkernels.rows import NO_TRITON

__all__ = ["ARCHITECTURES", "Report", "compile_report"]

ARCHITECTURES = ("sm_90a", "sm_100a")  # Hopper, Blackwell


@dataclass(frozen=True)
class Report:
    kernel: str
    arch: str
    registers: int  # a thread
    spill_bytes: int  # of stack a thread
    shared_bytes: int  # a block
    instructions: int  # SASS


def compile_report(arch: str) -> list[Report]:
    """Compile every kernel for `arch`.

    Raises:
        ValueError: an arch that is not one of ARCHITECTURES.
        ImportError: no Triton.
        RuntimeError: the interpreter is on, which leaves nothing to compile.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch='{arch}': use one of {', '.join(ARCHITECTURES)}")
    try:
        import triton
    except ImportError as error:
        raise ImportError(NO_TRITON) from error
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minkernels import rows_kernel

    if not isinstance(rows_kernel.gather_dequant_rows_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and cannot be compiled; unset it and run again")
    kernel = rows_kernel.gather_dequant_rows_kernel
    (case,) = rows_kernel.aot_cases()
    source = ASTSource(case.kernel, case.signature, case.constants)
    capability = int(re.sub(r"\D", "", arch))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.num_warps})
    return [_read_cubin(kernel.__name__, arch, compiled.asm["cubin"], compiled.metadata.shared)]


def _read_cubin(name: str, arch: str, cubin: bytes, shared: int) -> Report:
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", path], check=True, capture_output=True, text=True).stdout
        sass = subprocess.run([tools / "cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return Report(name, arch, registers, stack, shared, len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s", sass, flags=re.MULTILINE)))


def main(arches: list[str]) -> int:
    print(f"{'kernel':32} {'arch':8} {'registers':>9} {'spill B':>7} {'shared B':>8} {'instructions':>12}")
    try:
        for arch in arches or ARCHITECTURES:
            for r in compile_report(arch):
                print(f"{r.kernel:32} {r.arch:8} {r.registers:9} {r.spill_bytes:7} {r.shared_bytes:8} {r.instructions:12}")
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
