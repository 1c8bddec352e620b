"""Drops, while decoding too, the entries that received the least attention per step. An example of state per entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import RollingMethod, group_mean, protect_last
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of


@dataclass(frozen=True)
class StatefulEviction(RollingMethod):
    """Keeps, in each KV head, the last `window` entries and those with the most attention per token since they came."""

    window: int = 8

    card: ClassVar[Card] = Card(
        name="mean-attention", title="Mean attention", arxiv="2306.14048", year=2023, family="eviction",
        idea="H2O's sums of attention favor old entries, so the method divides them by the age of the entry.",
        stages=("compression",), budget=BudgetKind.STORED, heads="independent", upstream=None,
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store that drops in place, with positions, and one number per entry that moves with it."""
        return LayerKV(track=True, bounded=True, entry_state=("received",))

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over all entries; what each receives from the new queries is added to its sum. [B, H_q, T, D_v]"""
        received = attention_mass_of(step.query, kv, step)  # [B, H_q, n]
        kv.get_entry_state("received").add_(group_mean(received, step.key.shape[1]))
        return super().attend(kv, step)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Attention per token since the entry arrived. [B, H_kv, n]"""
        age = step.seen - kv.logical_positions()
        return protect_last(kv.get_entry_state("received") / age, self.window)
