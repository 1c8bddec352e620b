"""LagKV: keeps entries that stand out against the range of the next part of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod, protect_first
from kvbench.store import LayerKV


@dataclass(frozen=True)
class LagKV(ScoredMethod):
    """Keeps, per KV head, the sinks, the last one to two parts, and equally many of the best entries of each other."""

    sinks: Natural = 4
    lag: Positive = 128
    """Entries per part."""

    card: ClassVar[Card] = Card(
        name="lagkv",
        title="LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        idea="The text is cut into parts, and each part is scaled to the range of the part that follows it. "
        "Entries whose scaled channels vary most carry information that the next part lacks, so they are kept.",
        arxiv="2504.04704",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("Within the last parts, which have no complete part after them, the most recent entries come first, where "
            "the budget does not cover them. In kvpress they tie, except in contexts without a complete part that has "
            "one after it, where recent ones come first, too."),
            ("A channel without range in the next part counts as zero. kvpress divides by zero there, and all scores "
            "of the part are undefined."),
            "sinks: 4 as in kvpress; the authors' code has 16.",
        ),
        limits=(
            ("The last part and an incomplete one are kept before any scored entry. Where the budget is not larger, "
            "only sinks and recent entries stay, as in StreamingLLM: use a smaller lag."),
        ),
    )

    def minimum_entries(self) -> int:
        """The sinks and one recent entry."""
        return self.sinks + 1

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The rank of each entry in its part, from 0 to below 1; above 1 in the last parts. [B, H_kv, n]"""
        first = int((kv.logical_positions().flatten()[: kv.n] < self.sinks).sum())  # sinks that are still stored
        parts = max(0, (kv.n - first) // self.lag - 1)  # those with a complete part after them
        stop = first + parts * self.lag
        scores = torch.linspace(1, 2, kv.n, device=kv.keys.device).expand(kv.keys.shape[:3]).clone()
        if parts:
            key, value = (self._vary(x[:, :, first : stop + self.lag].float()) for x in (kv.keys, kv.values))
            ranks = (key + value).argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag  # [B, H_kv, parts, lag]
            scores[..., first:stop] = ranks.flatten(-2)
        return protect_first(scores, kv, self.sinks)

    def _vary(self, rows: Tensor) -> Tensor:
        """Share of each entry in its part's variation, scaled to the range of the next part. [B, H_kv, parts, lag]"""
        rows = rows.unflatten(2, (-1, self.lag))
        low, high = (x[:, :, 1:, None] for x in rows.aminmax(dim=3))
        scaled = ((rows[:, :, :-1] - low) / (high - low)).where(high > low, 0.0)
        return scaled.std(-1).softmax(-1)
