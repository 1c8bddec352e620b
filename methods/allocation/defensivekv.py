"""DefensiveKV: scores entries by the worst case over the last queries, with a floor, instead of the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive, Share
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.methods.allocation.adakv import HeadAllocation
from kvbench.methods.eviction.criticalkv import projected_norms
from kvbench.selection import ScoredMethod, best_by_head, keep_best, protect_last
from kvbench.store import LayerKV
from kvbench.store.scores import window_weights_of
from kvbench.techniques.cascade import SharedBudgetMethod

DEVIATIONS = (
    ("The first stage and the window together hold first_stage of a head's mean attention. The authors' code cuts the "
    "window off, normalizes the rest, and subtracts the mass of the last 32 entries of that rest, over all heads."),
    ("The first stage takes at most the budget less the window. The authors' code takes the window off the context "
    "before it takes the budget's share, so its limit is lower by that share of the window."),
    ("The window and the entries of the first stage are always kept. The authors' code gives them the largest score of "
    "the layer, so that a layer with small scores can lose its window to others."),
    "Scores are float32; the authors' are in the model's type after the softmax.",
)
TINY = torch.finfo(torch.float32).tiny
UPSTREAM = Upstream(repo="FFY0/DefensiveKV", commit="9251b95", license="Apache-2.0")
LIMITS = (
    ("Where the first stage needs the whole budget, as with diffuse attention, the mean alone decides, and every head "
    "keeps equally many: lower first_stage for the worst case to count."),
    "It needs the weights of the output projection in memory, in floating point.",
    "Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",
)


@dataclass(frozen=True)
class DefensiveScores(ScoredMethod):
    """Scores an entry by the most attention that any of the last queries gives it, at least the head's mean."""

    window: Positive = 32
    kernel: Annotated[int, Ge(1), Odd] = 5
    aggregate: Literal["max", "mean"] = "max"
    """Over the window's queries and the heads of a group: the worst case, or the mean of earlier methods."""
    prior: bool = True
    """Whether no entry scores below the mean of its head."""
    first_stage: Share = 0.9
    """Share of the mean attention, that of the window included, whose entries are kept before any other."""

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, for heads with unequal numbers of entries."""
        return LayerKV(queries=self.window, ragged=True)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Risk times the head's share of a token's projected values; infinite for what always stays. [B, H_kv, n]"""
        assert kv.recent_queries is not None
        entries = self.entries_in(step.layer, step.window)
        before = max(0, kv.n - kv.recent_queries.shape[2])
        if entries is None or not before:
            return protect_last(torch.zeros(kv.keys.shape[:3], device=kv.keys.device), self.window)
        risks, means = [], []
        for head in range(kv.keys.shape[1]):  # one KV head at a time, to bound the memory
            weights = window_weights_of(kv.recent_queries, kv, step, slice(head, head + 1))
            every = torch.cat(list(weights), dim=-1)[:, 0]  # [B, G, w, n]
            risks.append(self.risk(every[..., :before]))
            means.append(every[..., :before].mean((1, 2)))
        risk, mean = torch.stack(risks, dim=1), torch.stack(means, dim=1)  # [B, H_kv, before]
        norms = projected_norms(kv.values[:, :, :before], step, self.card.name).mean(2)
        risk = risk * norms / norms.sum(1, keepdim=True).clamp_min(TINY)  # a token without values has no share
        first = count_first(mean, self.first_stage).clamp_max(entries - self.window)
        scores = torch.full(kv.keys.shape[:3], torch.inf, device=kv.keys.device)
        scores[..., :before] = risk.masked_fill(best_by_head(mean, first), torch.inf)
        return protect_last(scores, self.window)

    def risk(self, weights: Tensor) -> Tensor:
        """Pooled weights, aggregated over queries and heads of the group, with a floor. [B, G, w, n] -> [B, n]"""
        pooled = F.avg_pool1d(weights.flatten(0, 2)[:, None], self.kernel, stride=1, padding=self.kernel // 2)
        smooth = pooled[:, 0].view_as(weights)
        smooth = smooth * weights.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True).clamp_min(TINY)
        risk = smooth.amax((1, 2)) if self.aggregate == "max" else smooth.mean((1, 2))
        return torch.maximum(risk, risk.mean(-1, keepdim=True)) if self.prior else risk


def count_first(mean: Tensor, share: float) -> Tensor:
    """Entries of each head which, with the window, get less than a share of its mean attention, the best first.

    mean: before the window, so that it adds up to 1 minus the window's. [B, H_kv, n]. Returns [B, H_kv].
    """
    window = 1 - mean.sum(-1, keepdim=True)
    return (window + mean.sort(dim=-1, descending=True).values.cumsum(-1) < share).sum(-1)


@dataclass(frozen=True)
class DefensiveKV(HeadAllocation, DefensiveScores):
    """Keeps the layer's entries with the highest risk in any head, and the observation window."""

    floor: Share = 0.0
    """Share of the budget that every head gets before the rest is divided."""

    card: ClassVar[Card] = Card(
        name="defensivekv",
        version="3",
        title="Taming the Fragility of KV Cache Eviction in LLM Inference",
        idea="The mean attention of the last queries misses entries that one of them needs badly. "
        "The score is the most attention from any query, at least the mean of all entries, times the projected value.",
        arxiv="2510.13334",
        year=2025,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="20%",
        heads="pooled",
        upstream=UPSTREAM,
        deviations=DEVIATIONS,
        limits=LIMITS,
    )


@dataclass(frozen=True)
class LayerDefensiveKV(SharedBudgetMethod, DefensiveScores):
    """Keeps the entries with the highest risk in any head of any layer, and the observation window."""

    card: ClassVar[Card] = Card(
        name="layer-defensivekv",
        version="3",
        title="Taming the Fragility of KV Cache Eviction in LLM Inference (Layer-DefensiveKV)",
        idea="DefensiveKV's scores can be compared between layers, since projected values count as shares of a token's "
        "in all heads. "
        "One budget is filled with the entries with the highest risk in any head of any layer.",
        arxiv="2510.13334",
        year=2025,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="20%",
        heads="pooled",
        upstream=UPSTREAM,
        deviations=(*DEVIATIONS, "Layers with a sliding window keep an equal share of it each, as DefensiveKV does."),
        limits=(*LIMITS, "Every layer is stored whole until the last one is scored, so the peak does not fall."),
    )

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep the best entries of a sliding layer, in unequal numbers per head."""
        keep_best([kv], [scores], entries)
