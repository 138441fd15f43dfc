"""Every closed formula of the book, in plain Python: no torch, no numpy, nothing measured.

    rows      a token, a layer, a session, a model's config
    copies    where the cache lives, how many copies a topology keeps
    moving    how many pieces a transfer has, and what it takes
    returning what it takes to bring a history back, or to compute it again
    serving   what users and GPUs get
    kernel    traffic, operations, floors
    sharding  what one rank of a topology holds, and what it sends in a step
    memory    a card's memory, down to the tokens and sessions that it caches

Units: bytes, tokens, seconds. A figure that the engine also produces (a row's width, a layout's pieces) is
computed here once and used there, so that the book and the engine cannot disagree.
"""
from . import copies, kernel, memory, moving, returning, rows, serving, sharding
from .copies import *  # noqa: F403
from .kernel import *  # noqa: F403
from .memory import *  # noqa: F403
from .moving import *  # noqa: F403
from .returning import *  # noqa: F403
from .rows import *  # noqa: F403
from .serving import *  # noqa: F403
from .sharding import *  # noqa: F403

__all__ = sorted([*copies.__all__, *kernel.__all__, *memory.__all__, *moving.__all__, *returning.__all__, *rows.__all__, *serving.__all__,
                  *sharding.__all__])
