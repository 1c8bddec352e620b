"""A job of `kvbench bench`: the loaded model, the methods, and the grid of cells to time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.bench.forecast import Need, read_budget
from kvbench.bench.records import Timing
from kvbench.bench.state import Setting
from kvbench.budget import Budget
from kvbench.hf import ModelSize
from kvbench.method import Method
from kvbench.runs.spec import Implementation

OUT_OF_TIME = "no time was left for it"


@dataclass(frozen=True)
class BenchJob:
    """A grid of cells that is ready to be timed."""

    setting: Setting
    outline: ModelSize
    methods: dict[str, Method]
    """By name; the anchors come first."""
    anchors: tuple[str, ...]
    lengths: Sequence[int]
    batches: Sequence[str]
    """Numbers, or `max`."""
    timings: Sequence[Timing]
    budget: str | None
    kernels: Implementation
    rounds: dict[Timing, int]
    memory: int
    """Bytes that weights and caches may take together."""
    host_memory: int | None
    """Bytes of host memory for pinned blocks, on a GPU; None on a CPU, where `memory` is host memory."""
    copy_bandwidth: float
    """Bytes per second, read plus written, of a large copy on the device."""
    deadline: float = math.inf
    """No cell is started after this time (perf_counter, seconds)."""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.setting.model.device

    @property
    def late(self) -> bool:
        """True after the deadline."""
        return time.perf_counter() > self.deadline

    def fit(self, name: str, length: int) -> Method:
        """Bind a method to the model and fit its budget to a context length.

        Raises:
            UserError: the budget is invalid, or the method cannot declare the bytes by which memory is foreseen.
        """
        method, shape = self.methods[name].bind(self.setting.model), self.setting.model.shape(length)
        fitted = method.fit(self.budget_of(name), shape)
        fitted.declared_bytes(shape)
        return fitted

    def budget_of(self, name: str) -> Budget | None:
        """The budget of a method; None for a method without one."""
        return read_budget(self.budget, self.methods[name])

    def need(self, method: Method, length: int) -> Need:
        """The predicted memory of a fitted method at a length."""
        outline = replace(self.outline, shape=replace(self.outline.shape, length=length))
        return Need(outline, method, self.setting.chunk, self.setting.later)
