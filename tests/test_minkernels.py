"""What all of minkernels promises: it imports without Triton, and says what to do where a kernel cannot run."""
import pytest
import torch

from kernel_harness import run_python
from minkernels.launch import use_triton
from minkernels.rows import gather_dequant

CALL = """
import torch
from minkernels.rows import gather_dequant
gather_dequant(torch.zeros(1, 4, 352, dtype=torch.uint8), torch.tensor([0]), backend="triton")
"""


def test_triton_on_a_cpu_without_the_interpreter_is_refused():
    result = run_python("-c", CALL)
    assert result.returncode == 1 and "ValueError: backend='triton' needs data on a GPU" in result.stderr and "TRITON_INTERPRET=1" in result.stderr


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="backend='cuda': use auto, torch or triton"):
        use_triton("cuda", torch.zeros(1))


WITHOUT_TRITON = """
import sys, torch, warnings
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton": raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
from minkernels.rows import gather_dequant
from minkernels import aot
pages, slots = torch.zeros(1, 4, 352, dtype=torch.uint8), torch.tensor([-1])
assert not gather_dequant(pages, slots)[0].any()
try:
    gather_dequant(pages, slots, backend="triton")
except ImportError as error:
    print(error)
print(aot.main([]))
"""


def test_without_triton_the_torch_path_works_and_the_rest_says_what_to_install():
    result = run_python("-c", WITHOUT_TRITON)
    assert "pip install 'minengine[kernels]'" in result.stdout and "1" in result.stdout.splitlines()[-1], result.stdout + result.stderr
    assert "pip install 'minengine[kernels]'" in result.stderr


def test_importing_minkernels_imports_no_triton():
    result = run_python("-c", "import sys, minkernels.rows, minkernels.indexer, minkernels.fp4, minkernels.aot; print('triton' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
