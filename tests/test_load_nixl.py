"""An idle NIXL agent costs next to nothing."""
import sys

import pytest

from minengine.load_nixl import PROGRESS_US, NixlMissing, load_nixl


def test_the_progress_thread_waits_for_events(monkeypatch):
    try:
        nixl = load_nixl()
    except NixlMissing as error:
        pytest.skip(str(error))
    bindings = sys.modules[nixl.nixl_agent.__module__].nixlBind
    delays = []
    real = bindings._real.nixlAgent
    monkeypatch.setattr(bindings._real, "nixlAgent", lambda name, config: delays.append(config.pthrDelay) or real(name, config))
    agent = nixl.nixl_agent("calm", nixl.nixl_agent_config(backends=["UCX"]))
    assert delays == [PROGRESS_US] and PROGRESS_US >= 1000
    assert load_nixl() is nixl and sys.modules[nixl.nixl_agent.__module__].nixlBind is bindings  # once
    del agent
