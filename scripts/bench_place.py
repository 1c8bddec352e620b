"""The machine, versions and commit that scripts/bench.py writes next to what it measures."""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch

from kvbench.machine import cpu_name, find_version
from kvbench.runs.environment import find_git


@functools.cache
def find_place() -> dict[str, Any]:
    """Where this process measures."""
    git = find_git()
    return {
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "torch": find_version("torch"), "transformers": find_version("transformers"),
        "git": None if git is None else git.model_dump(),
    }
