"""Kernels against their oracles, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so they run in processes of their own.
"""
import os
import subprocess
import sys

import pytest
import torch

from minengine.arithmetic import row_bytes
from minengine.kv.rows import row_format
from minkernels.rows import gather_dequant_rows, pack

SHAPES = [(512, 64), (64, 16), (144, 6), (16, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pages_and_slots(rank: int, rope: int, slot_dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages whose strides are not their sizes, over a background of NaN bytes; slots with every kind of invalid entry."""
    torch.manual_seed(rank)
    blocks, size, width = 3, 4, row_bytes("nvfp4_fp8_ds_mla", rank, rope).total
    latent = torch.randn(blocks, size, rank) * torch.exp2(torch.randint(-8, 8, (blocks, size, 1)).float())
    rows = pack(latent, torch.randn(blocks, size, rope) * 9, "nvfp4_fp8_ds_mla")
    pages = torch.full((blocks, 2 * size, width + 5), 0x7F, dtype=torch.uint8)[:, :size, 2 : 2 + width]
    pages.copy_(rows)
    limits = torch.iinfo(slot_dtype)
    slots = torch.tensor([11, 0, -1, 5, 5, 12, limits.max, limits.min, 3, -1], dtype=slot_dtype)
    return pages, slots


def check_interpreter() -> int:
    """Every case through the kernel and the oracle, to the bit; the number of cases."""
    cases = 0
    for rank, rope in SHAPES:
        for dtype in DTYPES:
            for slot_dtype in (torch.int32, torch.int64):
                pages, slots = pages_and_slots(rank, rope, slot_dtype)
                got = gather_dequant_rows(pages, slots, rank, rope, dtype, backend="triton")
                wanted = gather_dequant_rows(pages, slots, rank, rope, dtype, backend="torch")
                for g, w in zip(got, wanted):
                    assert g.dtype == dtype and torch.equal(g, w), (rank, rope, dtype, slot_dtype, (g != w).nonzero()[:3])
                cases += 1
    pages, slots = pages_and_slots(64, 16)
    assert [t.shape for t in gather_dequant_rows(pages, slots[:0], 64, 16, backend="triton")] == [(0, 64), (0, 16)]
    strided = torch.stack((slots, slots.flip(0)), dim=1)[:, 1]
    assert torch.equal(gather_dequant_rows(pages, strided, 64, 16, backend="triton")[0], gather_dequant_rows(pages, slots.flip(0), 64, 16)[0])
    return cases


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


def test_the_kernel_equals_its_oracle_in_the_interpreter():
    code = "import test_minkernels; print('cases', test_minkernels.check_interpreter())"
    result = run_python("-c", code, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    assert result.stdout.strip() == f"cases {len(SHAPES) * len(DTYPES) * 2}", result.stdout + result.stderr


@pytest.mark.gpu
def test_the_kernel_equals_its_oracle_on_a_gpu():
    for rank, rope in SHAPES:
        for dtype in DTYPES:
            pages, slots = (t.cuda() for t in pages_and_slots(rank, rope))
            got = gather_dequant_rows(pages, slots, rank, rope, dtype, backend="triton")
            for g, w in zip(got, gather_dequant_rows(pages.cpu(), slots.cpu(), rank, rope, dtype, backend="torch")):
                assert torch.equal(g.cpu(), w), (rank, rope, dtype)


@pytest.mark.parametrize("rank, rope", SHAPES)
def test_the_oracle_reads_what_the_row_format_wrote(rank, rope):
    """Listed rows equal the format's own reading of them, and every entry outside the pool is zero."""
    pages, slots = pages_and_slots(rank, rope)
    latent, rope_key = gather_dequant_rows(pages, slots, rank, rope, torch.float32)
    all_latent, all_rope = row_format("nvfp4_fp8_ds_mla", rank, rope).dequantize(pages.flatten(0, 1))
    for i, slot in enumerate(slots.tolist()):
        inside = 0 <= slot < 12
        assert torch.equal(latent[i], all_latent[slot] if inside else torch.zeros(rank))
        assert torch.equal(rope_key[i], all_rope[slot] if inside else torch.zeros(rope))


@pytest.mark.parametrize("change, words", [
    (dict(pages=torch.zeros(2, 4, 351, dtype=torch.uint8)), "352"),
    (dict(pages=torch.zeros(2, 4, 352)), "float32"),
    (dict(pages=torch.zeros(2, 4, 704, dtype=torch.uint8)[..., ::2]), "contiguous rows"),
    (dict(backend="cuda"), "backend='cuda'"),
])
def test_wrong_arguments_are_named(change, words):
    arguments = dict(pages=torch.zeros(2, 4, 352, dtype=torch.uint8), slots=torch.zeros(1, dtype=torch.int32)) | change
    with pytest.raises(ValueError, match=words):
        gather_dequant_rows(**arguments)


def test_triton_on_a_cpu_without_the_interpreter_is_refused():
    pages = "torch.zeros(1, 4, 352, dtype=torch.uint8)"
    result = run_python("-c", f"import torch; from minkernels.rows import gather_dequant_rows as g; g({pages}, torch.tensor([0]), backend='triton')")
    assert result.returncode == 1 and "ValueError: backend='triton' needs pages on a GPU" in result.stderr and "TRITON_INTERPRET=1" in result.stderr


WITHOUT_TRITON = """
import sys, torch, warnings
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton": raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
from minkernels.rows import gather_dequant_rows
from minkernels import aot
pages, slots = torch.zeros(1, 4, 352, dtype=torch.uint8), torch.tensor([-1])
assert not gather_dequant_rows(pages, slots)[0].any()
try:
    gather_dequant_rows(pages, slots, backend="triton")
except ImportError as error:
    print(error)
print(aot.main([]))
"""


def test_without_triton_the_torch_path_works_and_the_rest_says_what_to_install():
    result = run_python("-c", WITHOUT_TRITON)
    assert "pip install 'minengine[kernels]'" in result.stdout and "1" in result.stdout.splitlines()[-1], result.stdout + result.stderr
    assert "pip install 'minengine[kernels]'" in result.stderr


def test_importing_minkernels_imports_no_triton():
    result = run_python("-c", "import sys, minkernels.rows, minkernels.fp4, minkernels.aot; print('triton' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
