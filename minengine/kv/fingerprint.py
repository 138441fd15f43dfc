"""Which weights computed a KV row: a short text that two models share only if their configs and all their weights are equal.

The hash of a block knows its tokens, not the model. What outlives a process (the tiers) or leaves it (a transfer) needs both.
"""
from __future__ import annotations

from hashlib import sha256
from typing import Any, Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["joint_fingerprint", "model_fingerprint", "model_tensors", "source_sums"]


def model_fingerprint(model: Any) -> str:
    """32 hexadecimal digits for a `Decoder`'s config and its weights as they are in memory.

    Every byte counts: the words of a tensor's last axis are summed modulo 2^64, at the speed of memory, and the sums are hashed in order. So a
    changed weight, a swapped row, another dtype or shape is another model; where the weights were read from plays no part. One matrix at
    a time is copied, if the processor keeps it in an order of its own.
    """
    digest = sha256(f"{model.config!r} {model.dtype}".encode())
    with torch.inference_mode():
        for name, tensor in model_tensors(model):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_sums(tensor).numpy().tobytes())
    return digest.hexdigest()[:32]


def source_sums(source: Any, part: int, parts: int) -> dict[str, bytes]:
    """What `joint_fingerprint` takes of a `WeightSource`: a digest of every `parts`-th tensor as it is stored, whole, one after the other."""
    with torch.inference_mode():
        return {name: _digest(source.load(name)) for name in sorted(source.names())[part::parts]}


def joint_fingerprint(config: Any, dtype: Any, sums: Iterable[dict[str, bytes]]) -> str:
    """As `model_fingerprint`, of the weights as they are stored: the same for one rank that has them all and for ranks that have a part each.

    `sums`: of all tensors, in any number of parts (`source_sums`).
    """
    every = {name: digest for part in sums for name, digest in part.items()}
    digest = sha256(f"{config!r} {dtype}".encode())
    for name in sorted(every):
        digest.update(name.encode() + every[name])
    return digest.hexdigest()[:32]


def _digest(tensor: Tensor) -> bytes:
    return sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + _sums(tensor).numpy().tobytes()).digest()


def model_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a `Decoder`, with a name that tells where it is."""
    return _tensors(model, "model", set())


def _sums(tensor: Tensor) -> Tensor:
    """One int64 for each row of the last axis (on the CPU)."""
    plain = (tensor.to_dense() if tensor.is_mkldnn else tensor).contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.int64)
    rows = plain.reshape(-1, plain.shape[-1] if plain.dim() else 1).view(torch.uint8)
    width = next(size for size in (8, 4, 2, 1) if rows.shape[1] % size == 0)
    words = rows.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    return words.sum(1, dtype=torch.int64).cpu()


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object reaches through attributes, lists, tuples and dicts, each object once, in the order in which they were made."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        parts = getattr(value, "__dict__", {}).items()
    for key, part in parts:
        yield from _tensors(part, f"{name}.{key}", seen)
