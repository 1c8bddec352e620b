"""Keeps the entries with the smallest keys, and the last entries. Copy this file and change `score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import ScoredMethod, protect_last
from kvbench.store import LayerKV


@dataclass(frozen=True)
class MyMethod(ScoredMethod):
    """Keeps, in each KV head, the last `window` entries and the entries with the smallest key norm."""

    window: int = 32

    card: ClassVar[Card] = Card(
        name="my-method", title="Small keys", arxiv="2406.11430", year=2024, family="eviction",
        idea="Keys with a small norm tend to receive much attention, so the method keeps them and the last tokens.",
        stages=("compression",), budget=BudgetKind.STORED, heads="independent", upstream=None,
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Score each entry; the entries with the highest scores are kept. [B, H_kv, n]"""
        return protect_last(-kv.keys.float().norm(dim=-1), self.window)
