"""H2O: keeps the entries with the most accumulated attention, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Share
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import RollingMethod, mark_recent
from kvbench.store import LayerKV


@dataclass(frozen=True)
class H2O(RollingMethod):
    """Keeps, per KV head, the heavy hitters by accumulated attention and a recent window, at every step."""

    recent: Share = 0.5
    """Share of the budget for the most recent entries."""

    card: ClassVar[Card] = Card(
        name="h2o",
        title="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        idea="Accumulated attention follows a power law, so few entries receive most of it. "
        "These heavy hitters and a recent window are kept, and the rest is evicted at every step.",
        arxiv="2306.14048",
        year=2023,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="20%",
        heads="independent",
        upstream=Upstream(repo="FMInference/H2O", commit="ac75c2a", license="MIT"),
        deviations=(
            "Scores are summed over the query heads of a KV head; the paper has no grouped queries.",
            "Scores are float32; the authors' code sums in the model's type, and for LLaMA takes one sequence only.",
            "Scores accumulate over the whole prompt, and eviction happens once, at its end.",
        ),
        limits=("Sums favor early tokens, which more queries see. This is the paper's score; others normalize it.",),
    )

    graphable: ClassVar[str | None] = None

    def minimum_entries(self) -> int:
        """One heavy hitter and one recent entry."""
        return 2

    def layer(self, index: int) -> LayerKV:
        """A store with accumulated attention and positions, in which entries are dropped in place."""
        return LayerKV(column_sums=True, track=True, bounded=True)

    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Accumulated attention of each entry; infinite for recent ones. [B, H_kv, n]"""
        recent = mark_recent(kv, step, round(entries * self.recent))
        return kv.scores.masked_fill(recent, torch.inf)
