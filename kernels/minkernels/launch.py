"""Which of a function's two ways runs, the Triton kernel or plain torch, and what a kernel may count on."""
from __future__ import annotations

import importlib.util
import warnings
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["NO_TRITON", "has_e2m1_convert", "has_e4m3_convert", "interpreted", "num_sms", "use_triton"]

NO_TRITON = "Triton is not installed, so the Triton kernels cannot run here; install it with: pip install 'minengine[kernels]'"
INTERPRETER_SMS = 4  # the interpreter runs one program after another; four make splits and their merge happen in tests


def use_triton(backend: str, data: Tensor) -> bool:
    """Whether `backend` means the kernel for `data`: "auto" does on a GPU where Triton is installed.

    Raises:
        ValueError: an unknown backend, or "triton" for CPU data without the interpreter.
        ImportError: "triton" without Triton.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend='{backend}': use auto, torch or triton")
    if backend == "torch" or (backend == "auto" and not data.is_cuda):
        return False
    if importlib.util.find_spec("triton") is None:
        if backend == "triton":
            raise ImportError(NO_TRITON)
        warnings.warn(f"{NO_TRITON}. Using plain torch.", stacklevel=3)
        return False
    if not data.is_cuda and not interpreted():
        raise ValueError(f"backend='triton' needs data on a GPU, got {data.device}; use backend='torch', "
                         "or set TRITON_INTERPRET=1 before Triton is imported")
    return True


@lru_cache
def interpreted() -> bool:
    """Whether Triton runs its kernels in Python: it decides when it is imported."""
    import triton

    from .numbers_kernel import decode_e4m3

    return not isinstance(decode_e4m3, triton.JITFunction)


def has_e2m1_convert(device: torch.device) -> bool:
    """Whether the GPU has an instruction that turns E2M1 pairs into float16 (Blackwell's data-center cards)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def has_e4m3_convert(device: torch.device) -> bool:
    """Whether the GPU has an instruction that turns E4M3 pairs into float16 (Ada and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETER_SMS
