"""One kernel with the arguments that it is compiled for, ahead of time: what each `*_kernel.py` lists in its `aot_cases()`."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "INSTRUCTION_KINDS", "Case"]

ARCHITECTURES = ("sm_90a", "sm_100a")  # Hopper, Blackwell
INSTRUCTION_KINDS = ("tensor_core", "e2m1_convert")


@dataclass(frozen=True)
class Case:
    """A kernel, and everything that decides its machine code but the architecture.

    signature: Triton type by argument ("*u8", "i32", "constexpr", ...), in the kernel's order; a number in `constants` that the launch
        specialises, such as a stride of 1, is a "constexpr" here too.
    constants: value by name of the arguments that are "constexpr".
    divisible: the whole-number arguments that a launch finds to be multiples of 16, as it finds every pointer: it decides how wide loads are.
    arches: the architectures that the case is compiled for (an instruction of one of them makes it a case of that one).
    wants: the kinds of instruction (of INSTRUCTION_KINDS) that its machine code must have on each of them.
    """
    name: str  # unique over the package: "sparse_mla nvfp4 H=16"
    kernel: object  # the @triton.jit function
    signature: dict
    constants: dict
    num_warps: int
    num_stages: int
    arches: tuple[str, ...] = ARCHITECTURES
    wants: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()

    def __post_init__(self):
        for what, given, known in (("arches", self.arches, ARCHITECTURES), ("wants", self.wants, INSTRUCTION_KINDS)):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"case '{self.name}': {what} has {unknown}; use {', '.join(known)}")
        if unknown := [name for name in self.divisible if name not in self.signature]:
            raise ValueError(f"case '{self.name}': divisible has {unknown}; use arguments of the signature")
        declared = {name for name, kind in self.signature.items() if kind == "constexpr"}
        if declared != set(self.constants):
            raise ValueError(f"case '{self.name}': constants must be the signature's constexpr arguments; they differ in "
                             f"{sorted(declared ^ set(self.constants))}")
