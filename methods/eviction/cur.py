"""CurDKV: keeps the entries with the largest approximate leverage of keys and values, compared with their neighbors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod, protect_first
from kvbench.store import LayerKV


@dataclass(frozen=True)
class CUR(ScoredMethod):
    """Keeps, per KV head, the sinks and the entries whose squared norms have the largest shares of their group's."""

    sinks: Natural = 4
    leverage: Literal["product", "mean", "key", "value"] = "product"
    """The score from the shares of key and value: their product, their mean, or one of them."""
    local: Positive | None = 16
    """Consecutive entries of a group, by whose sum a squared norm is divided; None: all entries of the head."""

    card: ClassVar[Card] = Card(
        name="cur",
        title="Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
        idea="Leverage scores of keys and values tell which tokens span the attention output. "
        "Squared norms approximate them, and an entry is kept if its share among its neighbors is large.",
        arxiv="2509.15038",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            "Scores and defaults are kvpress's; the random projection of the paper, off in kvpress, is left out.",
            "Sinks are always kept; kvpress gives them the score 1, which is the largest possible.",
            "Scores are not divided by the head's sum: within a head that changes no choice.",
        ),
        unverified=(
            ("local: 16 is kvpress's default. By summaries of the paper, which we did not have, it normalizes over the "
            "whole context, after a projection to about 20 channels."),
        ),
    )

    def minimum_entries(self) -> int:
        """The sinks and one entry to choose."""
        return self.sinks + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Shares of key and value combined; infinite for the sinks. [B, H_kv, n]"""
        key, value = (self._share(x.float().square().sum(-1)) for x in (kv.keys, kv.values))
        scores = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.leverage]
        return protect_first(scores, kv, self.sinks)

    def _share(self, squares: Tensor) -> Tensor:
        """Each entry's share of the sum over its neighbors. [B, H_kv, n]"""
        count = squares.shape[-1]
        size = self.local or count
        groups: Tensor = F.pad(squares, (0, -count % size)).unflatten(-1, (-1, size))
        total = groups.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return (groups / total).flatten(-2)[..., :count]
