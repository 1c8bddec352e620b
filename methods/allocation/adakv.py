"""AdaKV: heads share a layer's budget in proportion to how many of its top scores each owns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Share
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Upstream
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV

TOTAL = (
    "A layer's total is exactly the budget's, fractions settled by largest remainder, where Ada-KV's authors' rounding "
    "may miss it by an entry per head."
)


@dataclass(frozen=True)
class HeadAllocation(ScoredMethod):
    """A scorer's entries, in unequal numbers per KV head: the layer's total is the budget's."""

    floor: Share = 0.2
    """Share of the budget that every head gets before the rest is divided."""

    recompressible: ClassVar[str | None] = "entries that heads keep in unequal numbers are frozen: later ones stay."

    def layer(self, index: int) -> LayerKV:
        """The scorer's store, of unequal numbers of entries per head."""
        return replace(super().layer(index), ragged=True)

    def select(self, kv: LayerKV, scores: Tensor, rows: int) -> None:
        """Keep each head's best entries, as many as the layer's top scores give it."""
        kv.keep_where(best_by_head(scores, allocate(scores, rows, self.floor)))


@dataclass(frozen=True)
class AdaKV(HeadAllocation, SnapKV):
    """SnapKV's scores under AdaKV's allocation; `x+adakv` puts any other scorer's in their place."""

    card: ClassVar[Card] = Card(
        name="adakv",
        title="Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        idea="Some heads spread their attention wide and some concentrate it. "
        "A layer's budget goes to its top scores, whichever heads they are in, above a lower bound for each.",
        arxiv="2407.11550",
        year=2024,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="1024",
        heads="pooled",
        upstream=Upstream(repo="FFY0/AdaKV", commit=None, license="MIT"),
        deviations=(
            TOTAL,
            "Scores are pooled before they are averaged over the query heads of a KV head, as SnapKV's are here.",
        ),
    )

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """This allocation around another scorer."""
        if not issubclass(inner, ScoredMethod) or issubclass(inner, HeadAllocation):
            raise UserError(
                f"{inner.card.name}+adakv makes no sense: adakv divides the rows of a method that scores every row "
                f"once per head, and {inner.card.name} does not."
            )
        name = f"{inner.card.name}+adakv"
        ours, scorer = cls.card, inner.card
        around = f"How many entries a head keeps is Ada-KV's (arXiv {ours.arxiv}), which ones is this method's."
        card = scorer.model_copy(update={
            "name": name, "heads": ours.heads, "family": ours.family, "title": f"{scorer.title} + {ours.title}",
            "limits": (*scorer.limits, *ours.limits), "deviations": (*scorer.deviations, around, TOTAL),
        })
        body = {"card": card, "__doc__": inner.__doc__, "__module__": inner.__module__}
        return dataclass(frozen=True)(type(name, (HeadAllocation, inner), body))


def allocate(scores: Tensor, rows: int, floor: float) -> Tensor:
    """Entries of each head, `rows` on average, infinite scores first. scores: [B, H_kv, n]. Returns [B, H_kv]"""
    heads, held = scores.shape[1:]
    certain = (scores == torch.inf).sum(-1)  # [B, H_kv], protected by the scorer
    free = (rows - certain).clamp_min(0)
    open_scores = scores.masked_fill(scores == torch.inf, -torch.inf)
    total = free.sum(-1, keepdim=True)  # [B, 1]
    order = open_scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    owner = order // held
    ranked = torch.arange(order.shape[1], device=scores.device) < total  # the layer's top scores
    won = torch.zeros_like(certain).scatter_add_(1, owner, ranked.to(certain.dtype))
    share = won * (1 - floor) + free * floor
    whole = share.floor().long()
    left = total - whole.sum(-1, keepdim=True)
    first = (share - whole).argsort(dim=-1, descending=True, stable=True)
    extra = torch.zeros_like(whole).scatter_(1, first, (torch.arange(heads, device=scores.device) < left).long())
    return certain + whole + extra


def best_by_head(scores: Tensor, counts: Tensor) -> Tensor:
    """Marks each head's best entries. scores: [B, H_kv, n]. counts: [B, H_kv]. Returns [B, H_kv, n] bool"""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, places)
    return ranks < counts[..., None]
