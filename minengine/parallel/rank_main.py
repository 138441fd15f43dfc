"""The process of a rank that is not rank 0: it runs the functions that it is sent, one after the other, and sleeps in between.

    python -m minengine.parallel.rank_main FD RANK SIZE FOLDER        started by group.py, by nobody else

It ends when its standard input does, which rank 0's process holds: with that process, whatever becomes of it.
"""
from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from threading import Thread

from .comm import PeerLost
from .group import LOST_PEER, Failed, Job, Member

__all__ = ["main"]


def main(fd: int, rank: int, size: int, folder: str) -> int:
    """Run jobs until rank 0 has gone; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_rank_0, name="ends with rank 0", daemon=True).start()
    connection, member = Connection(fd), Member(rank, size, folder)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return 0
        try:
            result = job.function(member, *job.args)
        except PeerLost:
            return LOST_PEER
        except BaseException as error:
            traceback.print_exc()
            _say(connection, Failed(f"{type(error).__name__}: {error}"))
            return 1
        if job.answers:
            _say(connection, result)


def _say(connection: Connection, message: object) -> None:
    try:
        connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
    except OSError:  # rank 0 has ended
        os._exit(0)


def _end_with_rank_0() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)  # at once: a step that is under way is for nobody


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(code)
