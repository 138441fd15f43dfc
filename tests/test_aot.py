"""What the ahead-of-time report says of the kernels, and the budget that holds them to it.

Triton reads TRITON_INTERPRET when it is imported, so the report runs in processes of its own. Each architecture is compiled once for all tests.
"""
import json
import re
from dataclasses import replace
from functools import lru_cache

import pytest

from kernel_harness import run_python
from minkernels import aot_budget
from minkernels.aot import Report, main, markdown, table
from minkernels.aot_case import ARCHITECTURES, Case
from minkernels.machine_code import count_instructions, read_cubin
from minkernels.occupancy import occupancy


@lru_cache
def reports(arch: str) -> list[Report]:
    result = run_python("-m", "minkernels.aot", "--target", arch, "--jobs", "2", "--format", "json")
    assert result.returncode == 0, result.stderr
    entries = json.loads(result.stdout)
    return [Report(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}) for entry in entries]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_keeps_its_budget(arch):
    over = aot_budget.broken(reports(arch), aot_budget.read())
    assert not over, "\n".join(over)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_the_report_says_can_be(arch):
    for r in reports(arch):
        assert r.arch == arch and 0 < r.registers <= 255 and r.instructions > 10 and 0 < r.blocks_per_sm <= 32, r
        assert r.warps_per_sm == r.blocks_per_sm * r.num_warps <= 64 and r.shared_bytes <= 227 * 1024, r


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_thread_spills_at_sixteen_heads(arch):
    spilled = {r.kernel: r.spill_bytes for r in reports(arch) if "H=16" in r.kernel}
    assert len(spilled) >= 4 and not any(spilled.values()), spilled


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float32_queries_are_multiplied_in_float32(arch):
    """Tensor cores know TF32 only; Triton 3.7 turns to them on Blackwell, whatever input_precision says, where rows were widened."""
    kinds = {r.kernel: r.kinds for r in reports(arch) if re.search(r"(float32|fp32) queries", r.kernel)}
    assert kinds and not any("tensor_core" in found for found in kinds.values()), kinds


def a_report(**changes) -> Report:
    report = Report("attend", "sm_90a", 120, 0, 4096, 0, 4, 4, 16, "registers", 900, {"HMMA": 12}, ("tensor_core",), ("tensor_core",))
    return replace(report, **changes)


def a_budget(triton=None, **changes) -> dict:
    entry = {"registers": 120, "spill_bytes": 0, "shared_bytes": 4096, "kinds": ["tensor_core"]} | changes
    return {"triton": triton or aot_budget.version("triton"), "sm_90a": {"attend": entry}, "sm_100a": {"attend": entry}}


@pytest.mark.parametrize("changes, words", [
    (dict(registers=121), "attend on sm_90a: registers is 121, the budget 120"),
    (dict(spill_bytes=8), "attend on sm_90a: spill_bytes is 8, the budget 0"),
    (dict(shared_bytes=8192), "shared_bytes is 8192, the budget 4096"),
    (dict(kinds=()), "attend on sm_90a: no tensor_core instruction was found"),
    (dict(kinds=("e2m1_convert", "tensor_core")), "attend on sm_90a: e2m1_convert instructions were found, the budget has none"),
    (dict(wants=("e2m1_convert",)), "no e2m1_convert instruction was found"),
])
def test_a_budget_that_breaks_says_which_figure_of_which_kernel(changes, words):
    assert aot_budget.broken([a_report()], a_budget()) == []
    (said,) = aot_budget.broken([a_report(**changes)], a_budget())
    assert words in said


def test_a_kernel_without_a_budget_and_a_budget_without_a_kernel_are_named():
    said = aot_budget.broken([a_report(kernel="unknown")], a_budget())
    assert len(said) == 2 and "attend on sm_90a: in the budget" in said[0] and "unknown on sm_90a: has no budget" in said[1]


def test_another_triton_is_held_to_spills_and_instructions_alone():
    assert aot_budget.broken([a_report(registers=200, shared_bytes=9999)], a_budget("2.0")) == []
    assert len(aot_budget.broken([a_report(spill_bytes=4, kinds=())], a_budget("2.0"))) == 2


def test_a_written_budget_is_kept_by_what_it_was_written_from(tmp_path, monkeypatch):
    monkeypatch.setattr(aot_budget, "PATH", tmp_path / "budget.json")
    written = [a_report(), a_report(arch="sm_100a", registers=97, shared_bytes=5000, wants=())]
    aot_budget.write(written)
    assert aot_budget.broken(written, aot_budget.read()) == []
    assert aot_budget.read()["sm_100a"]["attend"] == {"registers": 104, "spill_bytes": 0, "shared_bytes": 5120, "kinds": ["tensor_core"]}


@pytest.mark.parametrize("arguments, wanted", [
    (dict(registers=32, shared=0, num_warps=1), (32, 32, "blocks")),
    (dict(registers=32, shared=0, num_warps=4), (16, 64, "registers")),  # 65536 / (4 * 32 * 32): as many as there are warps for
    (dict(registers=33, shared=0, num_warps=4), (12, 48, "registers")),  # a warp gets 40 * 32
    (dict(registers=255, shared=0, num_warps=8), (1, 8, "registers")),
    (dict(registers=64, shared=100 * 1024, num_warps=4), (2, 8, "shared")),
    (dict(registers=64, shared=114 * 1024, num_warps=4), (1, 4, "shared")),  # 2 * 114 KiB would fit without the 1 KiB each
    (dict(registers=24, shared=0, num_warps=8), (8, 64, "warps")),
    (dict(registers=64, shared=0, num_warps=4, tensor_columns=256), (2, 8, "tensor memory")),
])
def test_occupancy_by_hand(arguments, wanted):
    held = occupancy("sm_100a", **arguments)
    assert (held.blocks, held.warps, held.limiter) == wanted


def test_instructions_are_told_by_kind():
    opcodes = ["HMMA.16816.F32", "HGMMA.64x16x16.F32", "UTCHMMA", "UTCQMMA.2CTA", "F2FP.F16.E2M1.UNPACK_B", "F2FP.F16.F32.PACK_AB", "UTCBAR", "FMUL"]
    counts, kinds = count_instructions(opcodes)
    assert counts == {"HMMA": 1, "HGMMA": 1, "UTCHMMA": 1, "UTCQMMA": 1, "F2FP.E2M1": 1} and kinds == {"tensor_core", "e2m1_convert"}


def test_what_is_no_machine_code_is_refused():
    with pytest.raises(RuntimeError, match="cuobjdump could not read a compiled kernel: .*[Ii]nvalid|does not contain device code"):
        read_cubin(b"no machine code")


def test_both_tables_show_every_figure():
    row = ["attend", "120", "0", "4,096", "4", "4", "16", "registers", "900", "12 HMMA"]
    assert table([a_report()]).splitlines()[1].split(maxsplit=9) == row
    assert markdown([a_report()]).splitlines()[2] == f"| {' | '.join(row)} |"


@pytest.mark.parametrize("changes, words", [
    (dict(arches=("sm_70",)), "arches has .'sm_70'."),
    (dict(wants=("speed",)), "wants has .'speed'."),
    (dict(divisible=("stride",)), "divisible has .'stride'."),
    (dict(constants={}), ".* differ in .'WIDTH'."),
])
def test_a_case_that_cannot_be_is_refused(changes, words):
    arguments = dict(name="copy", kernel=None, signature={"rows": "*u8", "WIDTH": "constexpr"}, constants={"WIDTH": 8}, num_warps=1, num_stages=3)
    Case(**arguments)
    with pytest.raises(ValueError, match=f"case 'copy': {words}"):
        Case(**arguments | changes)


@pytest.mark.parametrize("arguments, words", [
    (("--target", "sm_70"), "arch='sm_70': use one of sm_90a, sm_100a"),
    (("sm_70",), "arch='sm_70'"),
    (("sm_90a", "--only", "no such kernel"), "no kernel for sm_90a has 'no such kernel' in its name"),
    (("sm_90a", "--write-budget"), "--write-budget needs every kernel on every target"),
])
def test_the_report_names_what_it_cannot_do(arguments, words, capsys):
    assert main(list(arguments)) == 1
    said = capsys.readouterr()
    assert words in said.err and not said.out


def test_interpreted_kernels_cannot_be_compiled_and_the_report_says_so():
    result = run_python("-m", "minkernels.aot", "--target", "sm_90a", TRITON_INTERPRET="1")
    assert result.returncode == 1 and "unset it" in result.stderr


def test_a_target_may_stand_without_its_flag():
    result = run_python("-m", "minkernels.aot", "sm_90a", "--only", "gather_dequant 352")
    assert result.returncode == 0, result.stderr
    arch, header, line, limits = result.stdout.splitlines()
    assert arch == "sm_90a" and header.split()[:2] == ["kernel", "registers"] and line.startswith("gather_dequant 352") and "Hopper" in limits
