"""A worker's process, made on the machine where it is to run: by the front itself, or on another node by what Ray runs there (ray_node.py).

It is a Python of its own, not a fork, that imports nothing of the program that made it: a notebook or a script without a `__main__` guard can
have workers. It ends with what made it, however that ends (worker.py).
"""
from __future__ import annotations

import os
import subprocess
from typing import Sequence

from ..children import command

__all__ = ["spawn"]


def spawn(fd: int, threads: int, path: Sequence[str]) -> subprocess.Popen:
    """Start `python -m minengine.disagg.worker` on the open connection `fd`, which remains the caller's to close.

    On Linux it ends with the THREAD that calls this.

    Args:
        threads: of torch and its libraries.
        path: where its Python finds modules.

    Raises:
        OSError: it cannot be started.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env.setdefault("UCX_LOG_LEVEL", "fatal")  # what fails is told by exceptions; a killed peer would be several lines of every other worker
    # A session of its own: Ctrl-C in the terminal is for the parent, which ends its workers when it has drained.
    return subprocess.Popen(command("minengine.disagg.worker", fd, os.getpid(), path=path), env=env, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=2,
                            start_new_session=True)
