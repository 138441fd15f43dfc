"""How far a long command has come, on stderr: a bar where that is a terminal, elsewhere a line now and then, so that a log shows that it goes on."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["EVERY_S", "progress"]

EVERY_S = 10.0  # between two lines


@contextmanager
def progress(what: str, total: float, unit: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[..., None]]:
    """Gives what is to be told: how much of `total` is done, and what else to say of it."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=round(total, 3), desc=what, bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} " + unit + "{postfix}") as bar:
            def draw(done: float, more: str = "") -> None:
                bar.set_postfix_str(more, refresh=False)
                bar.update(max(0.0, min(done, total) - bar.n))

            yield draw
        return
    last_s = clock()

    def write(done: float, more: str = "") -> None:
        nonlocal last_s
        if clock() - last_s >= EVERY_S:
            last_s = clock()
            print(f"{what}: {min(done, total):.0f} of {total:.0f} {unit}{more and f', {more}'}", file=sys.stderr, flush=True)

    yield write
