"""What a compiled kernel's machine code says of itself: registers, stack, and how many instructions of which kind.

Read with the `cuobjdump` that comes with Triton, so no CUDA toolkit and no GPU is needed.
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "MachineCode", "count_instructions", "disassemble", "read_cubin"]

# Opcodes by kind. tensor_core: HMMA and its like run in a warp (mma.sync), HGMMA in four (Hopper's wgmma), UTC*MMA on tensor memory
# (Blackwell's tcgen05). e2m1_convert: two E2M1 values into float16s in one instruction (cvt.rn.f16x2.e2m1x2).
KINDS = {
    "tensor_core": re.compile(r"(?:[HQOIBD]MMA|[HQI]GMMA|UTC\w*MMA)\b"),
    "e2m1_convert": re.compile(r"F2FP\S*\.E2M1"),
}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", flags=re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    registers: int  # a thread
    stack_bytes: int  # a thread; kernels without arrays of their own have a stack for spilled registers alone
    instructions: int
    opcodes: dict[str, int]  # opcode of one of KINDS, up to its first dot ("HMMA", "UTCHMMA") -> how often
    kinds: frozenset[str]  # the KINDS found


def read_cubin(cubin: bytes) -> MachineCode:
    """
    Raises:
        RuntimeError: `cuobjdump` did not understand it.
    """
    usage = _cuobjdump("-res-usage", cubin)
    found = [re.search(rf"\b{word}:(\d+)", usage) for word in ("REG", "STACK")]
    if not all(found):
        raise RuntimeError(f"cuobjdump names no registers of a compiled kernel: {usage}")
    opcodes = INSTRUCTION.findall(disassemble(cubin))
    return MachineCode(int(found[0][1]), int(found[1][1]), len(opcodes), *count_instructions(opcodes))


def disassemble(cubin: bytes) -> str:
    """The machine code as text, an instruction a line.

    Raises:
        RuntimeError: `cuobjdump` found none.
    """
    text = _cuobjdump("-sass", cubin)
    if not INSTRUCTION.search(text):
        raise RuntimeError(f"cuobjdump found no instruction in a compiled kernel: {text}")
    return text


def _cuobjdump(option: str, cubin: bytes) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run([tool, option, path], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"cuobjdump could not read a compiled kernel: {result.stderr}")
    return result.stdout


def count_instructions(opcodes: list[str]) -> tuple[dict[str, int], frozenset[str]]:
    """["HMMA.16816.F32", ...] -> ({"HMMA": 1}, {"tensor_core"}), of the opcodes that are of one of KINDS."""
    counts: dict[str, int] = {}
    kinds = set()
    for opcode in opcodes:
        for kind, pattern in KINDS.items():
            if pattern.match(opcode):
                kinds.add(kind)
                name = "F2FP.E2M1" if kind == "e2m1_convert" else opcode.partition(".")[0]
                counts[name] = counts.get(name, 0) + 1
    return counts, frozenset(kinds)
