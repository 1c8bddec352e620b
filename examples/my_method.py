"""Keeps the rows whose keys are smallest, and the last rows. Copy this file and change `score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import ScoredMethod, protect_last
from kvbench.store import LayerKV


@dataclass(frozen=True)
class MyMethod(ScoredMethod):
    """Keeps, per KV head, the last `window` rows and the rows with the smallest key norm."""

    window: int = 32

    card: ClassVar[Card] = Card(
        name="my-method", title="Small keys stay", arxiv="2406.11430", year=2024, family="eviction",
        idea="Rows with a small key norm tend to receive much attention. They stay, and so do the last rows.",
        stages=("compression",), budget=BudgetKind.STORED, heads="independent", upstream=None,
    )

    def minimum_entries(self) -> int:
        """The window and a row to choose."""
        return self.window + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """How much each row is worth; the highest scores stay. [B, H_kv, n]"""
        return protect_last(-kv.keys.float().norm(dim=-1), self.window)
