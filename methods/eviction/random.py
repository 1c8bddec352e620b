"""Random eviction: the control that every scoring method should beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural
from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import ScoredMethod, protect_last
from kvbench.store import LayerKV


@dataclass(frozen=True)
class Random(ScoredMethod):
    """Keeps the last `window` entries of every head, as SnapKV does, and a random choice of the others."""

    window: Natural = 32
    seed: int = 0

    card: ClassVar[Card] = Card(
        name="random",
        title="Random eviction",
        idea="Every head keeps its last entries and a random choice of the others. It is the control for every score.",
        arxiv=None,
        year=None,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="indexed",
        upstream=None,
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Uniform random numbers per head and layer, the same for every sequence of a batch. [B, H_kv, n]"""
        batch, heads = kv.keys.shape[:2]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step.layer)
        numbers = torch.rand(1, heads, kv.n, generator=generator).to(kv.keys.device)
        return protect_last(numbers.expand(batch, -1, -1), self.window)
