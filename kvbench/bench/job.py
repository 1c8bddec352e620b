"""A job of `kvbench bench` that can start: the model loaded, the methods made, and what is to be timed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.bench.forecast import Need, read_budget
from kvbench.bench.records import Clock
from kvbench.bench.state import Setting
from kvbench.budget import Budget
from kvbench.hf import Prediction
from kvbench.method import Method
from kvbench.runs.spec import Implementation

OUT_OF_TIME = "no time was left for it"


@dataclass(frozen=True)
class Job:
    """What is to be timed. Methods are by name as they were asked for, the anchors first."""

    setting: Setting
    outline: Prediction
    methods: dict[str, Method]
    anchors: tuple[str, ...]
    lengths: Sequence[int]
    batches: Sequence[str]
    """Numbers, or `max`."""
    clocks: Sequence[Clock]
    budget: str | None
    kernels: Implementation
    rounds: dict[Clock, int]
    memory: int
    """Bytes that weights and caches may take together."""
    ruler: float
    """Bytes per second of a copy."""
    deadline: float = math.inf
    """When nothing more is begun, by perf_counter."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.setting.model.device

    @property
    def late(self) -> bool:
        """Whether nothing more is begun."""
        return time.perf_counter() > self.deadline

    def fit(self, name: str, length: int) -> Method:
        """A method bound to the model, with its budget at a length."""
        method = self.methods[name].bind(self.setting.model)
        return method.fit(self.budget_of(name), self.setting.model.shape(length))

    def budget_of(self, name: str) -> Budget | None:
        """What a method is given."""
        return read_budget(self.budget, self.methods[name])

    def need(self, method: Method, length: int) -> Need:
        """What a fitted method will take."""
        outline = replace(self.outline, shape=replace(self.outline.shape, length=length))
        return Need(outline, method, self.setting.chunk, self.setting.later)
