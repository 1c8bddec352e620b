"""kvbench: a benchmark harness for KV-cache techniques of language models (docs/python.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import compare, run
    from kvbench.engine.session import Session
    from kvbench.hf import load_model

__version__ = "0.1.0"
__all__ = ["Session", "compare", "load_model", "run"]

_MODULES = {
    "Session": "kvbench.engine.session", "compare": "kvbench.api", "load_model": "kvbench.hf", "run": "kvbench.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), so that `import kvbench` does not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvbench' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
