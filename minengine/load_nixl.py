"""NIXL's Python classes, imported without the habits of that import.

On import NIXL configures logging as a whole: it closes every handler of the process, sets `logging.raiseExceptions`, and prints its
own messages on standard output. Here it is kept from that. Its loggers ("nixl...") are ordinary ones, at WARNING unless somebody has
set another level, and NIXL_LOG_LEVEL means what it says in NIXL's own documents. And an agent's progress thread is made to wait for
events: as NIXL's Python starts it, it spins.
"""
from __future__ import annotations

import logging
import logging.config
import os
import sys
import threading
from importlib.util import find_spec
from typing import Any

__all__ = ["NixlMissing", "load_nixl"]

PROGRESS_US = 10_000  # how long a progress thread waits for an event; 0, NIXL's own, took a quarter of a core and made a message take 44 ms, not 0.05
_lock = threading.Lock()


class NixlMissing(RuntimeError):
    """NIXL is not installed, or cannot be loaded; says which, and the command that installs it."""


def load_nixl() -> Any:
    """The module with `nixl_agent` and `nixl_agent_config`.

    Raises:
        NixlMissing
    """
    if find_spec("nixl") is None:
        raise NixlMissing("NIXL is not installed (pip install 'minengine[nixl]')")
    with _lock:
        logger, asked = logging.getLogger("nixl"), os.environ.get("NIXL_LOG_LEVEL")
        configure, raises, level = logging.config.dictConfig, logging.raiseExceptions, logger.level
        logging.config.dictConfig = lambda config: None if set(config.get("loggers", ())) == {"nixl"} else configure(config)
        if asked is None:
            os.environ["NIXL_LOG_LEVEL"] = "FATAL"  # its C++ half reads it once, on loading: what it would say comes back as an exception as well
        try:
            import nixl._api
        except Exception as error:
            raise NixlMissing(f"NIXL cannot be loaded ({str(error) or type(error).__name__})") from error
        finally:
            logging.config.dictConfig, logging.raiseExceptions = configure, raises
            if asked is None:
                del os.environ["NIXL_LOG_LEVEL"]
                logger.setLevel(level or logging.WARNING)
        module = sys.modules[nixl._api.nixl_agent.__module__]
        if hasattr(module, "nixlBind") and not isinstance(module.nixlBind, _Bindings):
            module.nixlBind = _Bindings(module.nixlBind)
    return nixl._api


class _Bindings:
    """NIXL's C++ bindings, whose agents' progress threads wait. There is no option for it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_US
        return self._real.nixlAgent(name, config)
