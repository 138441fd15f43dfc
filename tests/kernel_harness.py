"""Kernels in Triton's interpreter: checks run in one child process, because Triton reads TRITON_INTERPRET when it is imported.

    def check_something(rank): ...           # at module level; runs the kernel, raises if it is wrong
    def test_something(): interpreted(check_something, 64)

Asserts in the child are not rewritten by pytest: give them a message with the values.
"""
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context

__all__ = ["interpreted", "run_python"]


def interpreted(check, *arguments):
    """`check(*arguments)` where Triton interprets its kernels; its result, or its exception with the child's traceback.

    The function, its arguments and its result travel by pickle. The child starts once for a whole test run.
    """
    return _child().submit(check, *arguments).result()


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` with this process's import path, the given environment, and kernels compiled unless that says otherwise."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


@lru_cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before TRITON_INTERPRET was set")
    os.environ["TRITON_INTERPRET"] = "1"
    import conftest  # noqa: F401  hypothesis's settings, which pytest loaded in the parent only
