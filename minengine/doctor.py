"""`minengine doctor`: what this machine has, what runs on it, and one remedy for each thing that is missing."""
from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["report"]


def report() -> tuple[list[str], int]:
    """The lines to print, and the exit code: 0 when every model and chapter can run here, else 1."""
    lines = [f"Python    {platform.python_version()} on {platform.machine()}"]
    remedies: list[str] = []
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        remedies.append("Python 3.11, 3.12 or 3.13 is needed: make a virtual environment with one of them")
    cuda = _torch(lines, remedies)
    _triton(lines, cuda)
    _nixl(lines)
    _server(lines)
    _memory(lines, remedies)
    _models(lines, remedies)
    _chapters(lines, cuda)
    lines += [f"remedy    {r}" for r in remedies] or ["all well"]
    return lines, 1 if remedies else 0


def _torch(lines: list[str], remedies: list[str]) -> bool:
    try:
        import torch
    except ImportError as error:
        lines.append(f"torch     not there ({error})")
        remedies.append("install torch: pip install torch==2.13.0")
        return False
    lines.append(f"torch     {torch.__version__}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        lines.append("GPU       none seen by torch: the engine runs on the CPU in float32")
        return False
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        lines.append(f"GPU {i}     {torch.cuda.get_device_name(i)}, capability {major}.{minor}, {free >> 30} of {total >> 30} GiB free")
    return True


def _triton(lines: list[str], cuda: bool) -> None:
    if not find_spec("triton"):
        lines.append("Triton    not there: kernels fall back to torch (pip install 'minengine[kernels]' brings it)")
        return
    mode = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled for the GPU" if cuda else "ahead-of-time compile only; TRITON_INTERPRET=1 runs kernels on the CPU"
    lines.append(f"Triton    {version('triton')}, {mode}")


def _nixl(lines: list[str]) -> None:
    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            lines.append(f"NIXL      {version(name)}, moves KV between prefill and decode workers")
            return
        except PackageNotFoundError:
            continue
    lines.append("NIXL      not there: KV moves between workers through shared memory alone (pip install 'minengine[nixl]' brings it)")


def _server(lines: list[str]) -> None:
    parts = ("fastapi", "uvicorn", "xgrammar")
    missing = [name for name in parts if not find_spec(name)]
    lines.append(f"server    without {' and '.join(missing)}: pip install 'minengine[serve]'" if missing
                 else "server    " + ", ".join(f"{name} {version(name)}" for name in parts))


def _memory(lines: list[str], remedies: list[str]) -> None:
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        lines.append("memory    unknown on this system")
        return
    lines.append(f"memory    {available / 2**30:.1f} of {total / 2**30:.1f} GiB free, {os.cpu_count()} cores")
    if total < 2 << 30:
        remedies.append("smollm2 in float32 needs about 1.3 GB: use a machine with at least 2 GiB")


def _models(lines: list[str], remedies: list[str]) -> None:
    try:
        from .config import ConfigError
        from .model.weights import list_models, resolve_model
    except ImportError as error:
        lines.append(f"models    cannot be listed ({error})")
        return
    for name in list_models():
        try:
            path = resolve_model(name)
            size = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())
            lines.append(f"model     {name}: {size / 1e6:.0f} MB")
        except ConfigError as error:
            lines.append(f"model     {name}: not there")
            remedies.append(str(error))


def _chapters(lines: list[str], cuda: bool) -> None:
    where = "on the GPU" if cuda else "on the CPU"
    lines.append("chapter   An agent turn is a cache lookup: arithmetic and traces, no model")
    lines.append(f"chapter   One engine, one budget: smollm2 {where}, measured live")
    lines.append(f"chapter   The latent row: glm-mini {where}, measured live")
    lines.append(f"chapter   Four bits a value: glm-mini and smollm2 {where}, measured live")
    lines.append("chapter   A kernel that reads four bits: kernels in Triton's interpreter, compiled ahead of time; glm-mini on the CPU")
    lines.append("chapter   Tool calls: smollm2 and a server of its own on this machine, measured live")
