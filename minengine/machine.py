"""What an engine's options come to on this machine: device, dtype, kernels, and how many blocks the pool has."""
from __future__ import annotations

import torch

from .config import KERNEL_DTYPES, ConfigError, ModelConfig
from .engine_args import EngineArgs
from .kv.cache import cache_layout

__all__ = ["attention_backend", "device_named", "dtype_named", "size_pool"]

DEFAULT_KV_BYTES = 256 << 20


def device_named(name: str) -> torch.device:
    """The device that `device` comes to.

    Raises:
        ConfigError: there is no such one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device='{name}': torch sees no CUDA device; use device='cpu' or install a CUDA build of torch")
    return torch.device(name)


def attention_backend(name: str, device: torch.device, kv_cache_dtype: str) -> str:
    """"triton" or "torch": what `attention_backend` comes to on this device, for these rows."""
    if name == "torch" or (name == "auto" and (device.type == "cpu" or kv_cache_dtype not in KERNEL_DTYPES)):
        return "torch"
    if kv_cache_dtype not in KERNEL_DTYPES:
        raise ConfigError(f"attention_backend='triton': no kernel reads rows of kv_cache_dtype='{kv_cache_dtype}'; use attention_backend='torch', "
                          f"or one of {', '.join(KERNEL_DTYPES)}")
    from minkernels.launch import use_triton

    try:
        return "triton" if use_triton(name, torch.empty(0, device=device)) else "torch"
    except ImportError as error:
        raise ConfigError(f"attention_backend='triton': {error}") from error
    except ValueError as error:
        raise ConfigError("attention_backend='triton' needs a GPU; use attention_backend='torch', or set TRITON_INTERPRET=1 before Triton is "
                          "imported, which runs the kernels slowly in Python") from error


def dtype_named(name: str, device: torch.device) -> str:
    """The name of the dtype that `dtype` comes to on this device."""
    if name != "auto":
        return name
    return "float32" if device.type == "cpu" else "bfloat16"


def size_pool(args: EngineArgs, config: ModelConfig, kv_cache_dtype: str, rows: int) -> tuple[int, int]:
    """Blocks in the pool, and the longest sequence this engine takes; `rows` of a block are on this rank."""
    block_bytes = cache_layout(config, kv_cache_dtype, args.kv_cache_layout, 1, rows).nbytes
    longest = args.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ConfigError(f"max_model_len={longest}: the model's positions end at {config.max_position_embeddings}")
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    elif args.kv_cache_memory_bytes is not None:
        num_blocks = args.kv_cache_memory_bytes // block_bytes
        if not num_blocks:
            raise ConfigError(f"kv_cache_memory_bytes={args.kv_cache_memory_bytes}: one block of {args.block_size} tokens takes {block_bytes}; "
                              f"give more memory or a smaller block_size")
    else:
        wanted = args.max_num_seqs * -(-longest // args.block_size)
        num_blocks = max(1, min(wanted, DEFAULT_KV_BYTES // block_bytes))
    if args.max_model_len is None:
        longest = min(longest, num_blocks * args.block_size)
    return num_blocks, longest
