"""What a public function asks of its arguments before it hands them to a kernel, which trusts them.

Types, shapes and devices only, compared in Python: no check waits for a device, so that all of them hold inside a CUDA graph's recording.
"""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOATS", "INDICES", "need", "need_whole"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


def need(name: str, x: Tensor, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """`x` has that shape, in which a word names a size that may be any, one of those dtypes, and lies on that device.

    Raises:
        ValueError: it does not; names `name`, what is wanted and what came.
    """
    if x.dtype in dtypes and x.device == device and x.dim() == len(shape):
        if all(isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, x.shape)):
            return
    sizes = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(f"{name} must be ({sizes}) {kinds} on {device}; got {tuple(x.shape)} {x.dtype} on {x.device}")


def need_whole(name: str, value: int, least: int) -> None:
    """Raises ValueError where `value` is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: use a whole number of at least {least}")
