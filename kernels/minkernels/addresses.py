"""Which bytes a kernel's loads and stores touch, worked out from the compiler's intermediate text (TTIR or TTGIR).

Every access is followed back to the kernel's arguments and its addresses are computed for one program and for the first pass through each
loop. Bytes that several lanes ask for count once: memory serves them once and the caches the rest. What is masked away does not count;
where a mask hangs on what a loop computed, all its lanes do.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Touched", "touched"]


@dataclass(frozen=True)
class Touched:
    """Bytes by argument."""
    loaded: dict[str, int]  # distinct ones
    stored: dict[str, int]
    asked: dict[str, int]  # as loaded, but a byte counts as often as a lane asks for it


def touched(code: str, names: list[str], lists: Mapping[str, np.ndarray], numbers: Mapping[str, int],
            program: tuple[int, int, int] = (0, 0, 0)) -> Touched:
    """
    Args:
        code: TTIR or TTGIR of one kernel.
        names: its arguments that are no constants, in order.
        lists: arguments that hold indices, such as slots: what stands in them. Their own bytes are not counted.
        numbers: the whole-number arguments; one that addresses need and that is missing makes them unknown.
        program: the program's ids.
    Raises:
        ValueError: the address of a load or store could not be worked out.
    """
    text = _Code(code, names, lists, numbers, program)
    loaded: dict[str, list[np.ndarray]] = {}
    stored: dict[str, list[np.ndarray]] = {}
    for number, op in text.accesses:
        address, mask = text.access(number, op)
        if address.base not in lists:
            offsets, active = np.broadcast_arrays(address.offset, mask)
            lanes = offsets[active][:, None] + np.arange(address.size)  # (active lanes, bytes of an element)
            (stored if op == "tt.store" else loaded).setdefault(address.base, []).append(lanes.ravel())
    distinct = [{name: len(np.unique(np.concatenate(parts))) for name, parts in by_name.items()} for by_name in (loaded, stored)]
    return Touched(*distinct, {name: sum(map(len, parts)) for name, parts in loaded.items()})


@dataclass(frozen=True)
class _Address:
    base: str  # the argument
    offset: np.ndarray  # bytes
    size: int  # bytes of an element


DEFINITION = re.compile(r"^\s*(%[\w$.]+)(?::\d+)? = (.*)$")
USE = re.compile(r"%[\w$.]+(?:#\d+)?")
SIZES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
COMPARE = {"eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater, "sge": np.greater_equal,
           "ult": np.less, "ule": np.less_equal, "ugt": np.greater, "uge": np.greater_equal}  # nothing here is negative where it is unsigned
INTEGERS = {"addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor,
            "shli": np.left_shift, "shrsi": np.right_shift, "shrui": np.right_shift, "minsi": np.minimum, "maxsi": np.maximum,
            "remsi": np.fmod, "divui": np.floor_divide, "remui": np.remainder, "divsi": lambda a, b: (a - np.fmod(a, b)) // b}
SAME = {"arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "ttg.convert_layout"}


class _Code:
    """A kernel's text, in which a value is looked up when an address asks for it. None stands for a value that is not known."""

    def __init__(self, code: str, names: list[str], lists: Mapping[str, np.ndarray], numbers: Mapping[str, int], program: tuple[int, int, int]) -> None:
        self.lists, self.numbers, self.program = lists, numbers, program
        self.lines = code.splitlines()
        self.definitions: dict[str, list[int]] = {}  # value -> the lines that define one of that name
        self.arguments: dict[str, tuple[str, str]] = {}  # value -> (argument, type)
        self.accesses: list[tuple[int, str]] = []
        self.known: dict[tuple[str, int], object] = {}
        for number, line in enumerate(self.lines):
            if "tt.func" in line:
                values = re.findall(r"(%[\w$.]+): ([^\s,)]+)", line)
                self.arguments = {value: (name, kind) for name, (value, kind) in zip(names, values, strict=True)}
            if loop := re.search(r"scf\.for (%[\w$.]+) = ", line):
                self.definitions.setdefault(loop[1], []).append(number)
            if found := DEFINITION.match(line):
                self.definitions.setdefault(found[1], []).append(number)
            if access := re.search(r"\b(tt\.load|tt\.store|ttg\.async_copy_global_to_local)\b", line):
                self.accesses.append((number, access[1]))

    def access(self, number: int, op: str) -> tuple[_Address, np.ndarray | bool]:
        """Address and mask of the load or store on that line."""
        operands = self._operands(number, op)
        address = self.value(operands[0], number)
        if not isinstance(address, _Address):
            raise ValueError(f"the address of this access is not known: {self.lines[number].strip()[:160]}")
        position = {"tt.load": 1, "tt.store": 2, "ttg.async_copy_global_to_local": 2}[op]
        mask = self.value(operands[position], number) if len(operands) > position else True
        return address, True if mask is None else mask

    def value(self, name: str, before: int):
        """The value that `name` has on line `before`: that of its last definition above."""
        if name in self.arguments:
            return self._argument(*self.arguments[name])
        at = max((line for line in self.definitions.get(name.partition("#")[0], ()) if line < before), default=None)
        if at is None:
            return None
        if (name, at) not in self.known:
            self.known[name, at] = self._compute(name, at)
        return self.known[name, at]

    def _argument(self, name: str, kind: str):
        pointer = re.match(r"!tt\.ptr<(\w+)", kind)
        return _Address(name, np.int64(0), SIZES[pointer[1]]) if pointer else self.numbers.get(name)

    def _operands(self, number: int, op: str) -> list[str]:
        return USE.findall(self.lines[number].split(op, 1)[1].split(" : ")[0])

    def _compute(self, name: str, at: int):
        line = self.lines[at]
        if loop := re.search(r"scf\.for (%[\w$.]+) = (%[\w$.]+(?:#\d+)?) ", line):
            if loop[1] != name:
                return None  # what a loop leaves behind
            start = self.value(loop[2], at)
            return 0 if start is None else start  # the first pass; it touches as much wherever it starts
        op = re.match(r'"?([\w.]+)', DEFINITION.match(line)[2])[1]
        if op == "arith.constant":
            constant = re.search(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? ?(?::|loc|$)", line)
            if constant is None:
                return None  # a fraction
            return constant[1] == "true" if constant[1] in ("true", "false") else int(constant[1])
        if op == "tt.get_program_id":
            return self.program["xyz".index(re.search(r"program_id (\w)", line)[1])]
        if op == "tt.make_range":
            return np.arange(int(re.search(r"start = (\d+)", line)[1]), int(re.search(r"end = (\d+)", line)[1]), dtype=np.int64)
        values = [self.value(operand, at) for operand in self._operands(at, op)]
        if op == "tt.load":
            return self._loaded(values)
        if not values or any(v is None for v in values):
            return None
        return self._apply(op, line, values)

    def _loaded(self, values: list):
        address, mask = values[0], values[1] if len(values) > 1 else True
        if not isinstance(address, _Address) or address.base not in self.lists:
            return None
        entries, index = self.lists[address.base], address.offset // address.size
        inside = (index >= 0) & (index < len(entries)) & (True if mask is None else mask)
        return np.where(inside, entries[np.where(inside, index, 0)], -1)

    def _apply(self, op: str, line: str, values: list):
        first = values[0]
        if isinstance(first, _Address):
            if op == "tt.addptr":
                return replace(first, offset=first.offset + np.int64(first.size) * values[1])
            moved = self._apply(op, line, [first.offset, *values[1:]])
            return None if moved is None else replace(first, offset=moved)
        room, short = op.partition(".")[0], op.partition(".")[2]
        if op in SAME:
            return first
        if op == "arith.cmpi":
            return COMPARE[re.search(r"cmpi (\w+)", line)[1]](*values)
        if op == "arith.select":
            return None if isinstance(values[1], _Address) else np.where(*values)
        if room == "arith" and short in INTEGERS:
            return INTEGERS[short](*values)
        shape = [int(n) for n in re.findall(r"(\d+)x", re.findall(r"tensor<((?:\d+x)+)", line)[-1])] if "tensor<" in line else []
        if op in ("tt.splat", "tt.broadcast"):
            return np.broadcast_to(first, shape)
        if op == "tt.expand_dims":
            return np.expand_dims(np.broadcast_to(first, self._shape(line)), int(re.search(r"axis = (\d+)", line)[1]))
        if op == "tt.reshape":
            return np.broadcast_to(first, self._shape(line)).reshape(shape)
        if op == "tt.trans":
            order = re.search(r"order = array<i32: ([\d, ]+)>", line)[1]
            return np.broadcast_to(first, self._shape(line)).transpose([int(n) for n in order.split(",")])
        return None

    @staticmethod
    def _shape(line: str) -> list[int]:
        """Of the operand, which stands before the result."""
        return [int(n) for n in re.findall(r"(\d+)x", re.findall(r"tensor<((?:\d+x)+)", line)[0])]
