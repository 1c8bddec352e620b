"""PrefixKV: every layer keeps the entries that make up the same share of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import AttentionSums
from kvbench.store import LayerKV
from kvbench.techniques.cascade import CascadeMethod


@dataclass(frozen=True)
class PrefixKV(AttentionSums, CascadeMethod):
    """Keeps in each layer the most attended tokens, the same in all heads, up to a share that all layers have."""

    card: ClassVar[Card] = Card(
        name="prefixkv",
        title="PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient "
        "Generation",
        idea="Layers differ in how many tokens make up most of their attention. "
        "Tokens are sorted by attention, and every layer keeps the prefix that has the same share of it.",
        arxiv="2412.03409",
        year=2024,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="50%",
        heads="pooled",
        upstream=Upstream(repo="THU-MIG/PrefixKV", commit="39b7265", license="MIT"),
        deviations=(
            ("The share is found on each context and meets the budget exactly. The authors find one by binary search "
            "on ten samples, to within five entries, and apply the mean shares of entries to every prompt."),
            ("Earlier layers are trimmed as later ones arrive, which gives the same result as after the last layer; "
            "the authors keep all layers until then."),
            "Entries after the context are kept; the authors' code drops one at a fixed place now and then.",
            "Text only: the paper is about images and text.",
            "Layers with a sliding window keep an equal share of it each.",
        ),
        limits=("Sums favor early tokens, which more queries see.",),
    )

    def measure(self, kv: LayerKV, step: Step, scores: Tensor) -> Tensor:
        """The share of attention that larger entries have before each entry, in descending order. [B, n - outer]"""
        ordered = kv.scores.mean(1).double().sort(dim=-1, descending=True).values
        shares = ordered / ordered.sum(-1, keepdim=True)
        return (shares.cumsum(-1) - shares)[:, : kv.n - self.first - self.last]

    def divide(self, measures: Tensor, total: int, stored: int) -> Tensor:
        """The entries with the smallest shares before them, over all layers so far, and the outermost. [B, layers]"""
        assert self.pooled is not None
        outer = self.first + self.last
        rest = min(total - outer * len(self.pooled), measures[0].numel())
        chosen = measures.flatten(1).argsort(dim=1, stable=True)[:, :rest] // measures.shape[2]
        counts = torch.zeros(measures.shape[:2], dtype=torch.float64, device=measures.device)
        return outer + counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
