"""AdaKV: each head gets a share of the layer's budget in proportion to its number of the layer's top scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Share
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Upstream
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.quantization.packed import PackedMethod
from kvbench.selection import ScoredMethod, best_by_head, go_around
from kvbench.store import LayerKV
from kvbench.techniques.cascade import round_shares

TOTAL = (
    "A layer keeps exactly its budget: fractions are rounded by largest remainder. The rounding of Ada-KV's authors "
    "may miss the budget by an entry per head."
)


@dataclass(frozen=True)
class HeadAllocation(ScoredMethod):
    """Keeps the best entries of a scorer, in unequal numbers per KV head; the layer's total is its budget."""

    floor: Share = 0.2
    """Share of the budget that every head gets before the rest is divided."""

    recompressible: ClassVar[str | None] = "heads keep unequal numbers of entries, which are then frozen."

    def layer(self, index: int) -> LayerKV:
        """The scorer's store, with unequal numbers of entries per head."""
        return replace(super().layer(index), ragged=True)

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep each head's best entries, as many as `allocate` gives it."""
        kv.keep_where(best_by_head(scores, allocate(scores, entries, self.floor)))


@dataclass(frozen=True)
class AdaKV(HeadAllocation, SnapKV):
    """AdaKV's allocation with SnapKV's scores; `x+adakv` uses the scores of method x."""

    card: ClassVar[Card] = Card(
        name="adakv",
        version="2",
        title="Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        idea="Some heads spread their attention over many entries, others concentrate it on few. "
        "A layer's budget goes to its top scores in any head, with a minimum for each head.",
        arxiv="2407.11550",
        year=2024,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="1024",
        heads="pooled",
        upstream=Upstream(repo="FFY0/AdaKV", commit="efe4e2e", license="MIT"),
        deviations=(
            TOTAL,
            ("floor: 0.2, as in the authors' LongBench scripts; `config_compress` in their code and README has 0.5 by "
            "default."),
        ),
    )

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Create `inner+adakv`: this allocation with the scores of another method (`UserError` if it packs entries)."""
        if issubclass(inner, PackedMethod):
            raise UserError(
                f"{inner.card.name}+adakv makes no sense: kivi packs the same blocks in all heads, and adakv keeps "
                "unequal numbers of entries. Leave one of the two out."
            )
        note = f"The number of entries of each head follows Ada-KV (arXiv {cls.card.arxiv}), their choice this method."
        return go_around(inner, HeadAllocation, cls.card, note, TOTAL)


def allocate(scores: Tensor, entries: int, floor: float) -> Tensor:
    """Number of entries of each head, `entries` on average, protected ones included. [B, H_kv]

    scores: [B, H_kv, n], infinite for protected entries. floor: share of the budget that every head gets.
    """
    count = scores.shape[2]
    protected = (scores == torch.inf).sum(-1)  # [B, H_kv]
    free = (entries - protected).clamp_min(0)
    open_scores = scores.masked_fill(scores == torch.inf, -torch.inf)
    total = free.sum(-1, keepdim=True)  # [B, 1]
    order = open_scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    owner = order // count
    ranked = torch.arange(order.shape[1], device=scores.device) < total  # the layer's top scores
    won = torch.zeros_like(protected).scatter_add_(1, owner, ranked.to(protected.dtype))
    share = won * (1 - floor) + free * floor
    return protected + round_shares(share.double(), total).long()
