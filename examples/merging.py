"""Merges the value of every dropped entry into the kept entry with the most similar key. An example of merging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.method import BudgetKind, Card, Step
from kvbench.selection import ScoredMethod, protect_last, top_entries
from kvbench.store import LayerKV


@dataclass(frozen=True)
class Merging(ScoredMethod):
    """Chooses entries by the norm of their keys, and gives each kept one the mean value of those that it stands for."""

    window: int = 32

    card: ClassVar[Card] = Card(
        name="mean-merging", title="Mean merging", arxiv="2407.08454", year=2024, family="merging",
        idea="Dropped entries leave their values behind, in the kept entry whose key points in the same direction.",
        stages=("compression",), budget=BudgetKind.STORED, heads="independent", upstream=None,
    )

    def minimum_entries(self) -> int:
        """The window and one entry to merge into."""
        return self.window + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Entries with small keys stay, and the last ones. [B, H_kv, n]"""
        return protect_last(-kv.keys.float().norm(dim=-1), self.window)

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Drop the others from the store, and put their means into the kept values, in place."""
        kept = top_entries(scores, entries)  # [B, H_kv, C], ascending
        keys, values = normalize(kv.keys.float(), dim=-1), kv.values.float()  # [B, H_kv, n, D]
        chosen = keys.gather(2, kept[..., None].expand(-1, -1, -1, keys.shape[-1]))
        target = (keys @ chosen.mT).argmax(-1)  # [B, H_kv, n]: the kept entry that each entry joins
        target.scatter_(2, kept, torch.arange(entries, device=kept.device).expand_as(kept))
        ones = torch.ones_like(target, dtype=torch.float32)
        counts = ones.new_zeros(kept.shape).scatter_add_(2, target, ones)
        sums = values.new_zeros(*kept.shape, values.shape[-1])
        sums.scatter_add_(2, target[..., None].expand_as(values), values)
        kv.keep(kept)
        kv.values.copy_(sums / counts[..., None])
