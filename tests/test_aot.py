"""What the ahead-of-time report says of the kernels.

Triton reads TRITON_INTERPRET when it is imported, so the report runs in processes of its own.
"""
import os
import subprocess
import sys

import pytest


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_ahead_of_time_without_spills(arch, tmp_path):
    result = run_python("-m", "minkernels.aot", arch, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["kernel", "arch", "registers", "spill", "B", "shared", "B", "instructions"]
    for line in lines:
        kernel, target, registers, spill, shared, instructions = line.split()
        assert kernel == "gather_dequant_rows_kernel" and target == arch
        assert 0 < int(registers) <= 64 and int(spill) == 0 and int(shared) <= 4096 and 0 < int(instructions) < 2000
    assert lines


def test_the_report_names_what_it_cannot_compile():
    unknown = run_python("-m", "minkernels.aot", "sm_70")
    assert unknown.returncode == 1 and "arch='sm_70'" in unknown.stderr
    interpreted = run_python("-m", "minkernels.aot", "sm_90a", TRITON_INTERPRET="1")
    assert interpreted.returncode == 1 and "unset it" in interpreted.stderr
