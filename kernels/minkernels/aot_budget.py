"""The budget of every compiled kernel: what it may need at most, and the kinds of instruction that it has.

`aot_budget.json` holds it, by architecture and case, for one version of Triton. A change to a kernel may exceed it: look at why, and if the new
figures are right write them with `python -m minkernels.aot --write-budget`. Spilled bytes are those of that day, so a kernel that begins to
spill is over budget at once; registers and shared memory are rounded up to what is given out anyway, so that a change which costs nothing passes.
"""
from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from minkernels.aot import Report

__all__ = ["PATH", "broken", "read", "write"]

PATH = Path(__file__).with_name("aot_budget.json")
UNITS = {"registers": 8, "spill_bytes": 1, "shared_bytes": 1024}  # the figures that must not grow: a warp gets 256 registers at a time
ON_ANY_TRITON = ("spill_bytes",)  # other versions allot registers and shared memory in ways of their own
REMEDY = "if that is meant, run: python -m minkernels.aot --write-budget"


def read() -> dict:
    """{"triton": version, arch: {case: {"registers": most, "spill_bytes": most, "shared_bytes": most, "kinds": [every kind that it has]}}}."""
    return json.loads(PATH.read_text())


def write(reports: list[Report]) -> None:
    """Make the reports' figures the budget, in the place of all that stood there."""
    budget: dict[str, dict[str, dict]] = {}
    for r in reports:
        most = {figure: -(-getattr(r, figure) // unit) * unit for figure, unit in UNITS.items()}
        budget.setdefault(r.arch, {})[r.kernel] = {**most, "kinds": sorted({*r.kinds, *r.wants})}
    lines = [f'  "triton": "{version("triton")}"']
    for arch, cases in budget.items():
        lines.append(f'  "{arch}": {{\n' + ",\n".join(f'    "{name}": {json.dumps(entry)}' for name, entry in cases.items()) + "\n  }")
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def broken(reports: list[Report], budget: dict) -> list[str]:
    """What the reports say against the budget of their architectures, one sentence each; empty when all is kept."""
    figures = UNITS if version("triton") == budget["triton"] else ON_ANY_TRITON
    said = []
    for arch in dict.fromkeys(r.arch for r in reports):
        entries, of_arch = budget.get(arch, {}), {r.kernel: r for r in reports if r.arch == arch}
        said += [f"{name} on {arch}: in the budget, but no such kernel was compiled; {REMEDY}" for name in entries if name not in of_arch]
        for name, report in of_arch.items():
            if name not in entries:
                said.append(f"{name} on {arch}: has no budget; {REMEDY}")
                continue
            for figure in figures:
                if (found := getattr(report, figure)) > (most := entries[name][figure]):
                    said.append(f"{name} on {arch}: {figure} is {found}, the budget {most}; {REMEDY}")
            lost = {*entries[name]["kinds"], *report.wants}.difference(report.kinds)
            said += [f"{name} on {arch}: no {kind} instruction was found, and it must have one" for kind in sorted(lost)]
            gained = set(report.kinds).difference(entries[name]["kinds"])  # float32 products that became TF32's, say
            said += [f"{name} on {arch}: {kind} instructions were found, the budget has none; {REMEDY}" for kind in sorted(gained)]
    return said
