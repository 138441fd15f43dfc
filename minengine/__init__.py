"""minengine: a compact engine for serving models whose hard part is the KV cache.

Names are loaded on first use, so `import minengine` and `import minengine.arithmetic` cost nothing.
"""
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "Cluster": "disagg.cluster",
    "LLMEngine": "engine",
    "EngineArgs": "engine_args",
    "ConfigError": "config",
    "SamplingParams": "request",
    "RequestOutput": "request",
    "RequestError": "request",
    "list_models": "model.weights",
    "check": "exercises",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'minengine' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
