"""D2O: keeps heavy hitters and recent entries, more in some layers, and merges similar evicted ones into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Share
from kvbench.errors import UserError
from kvbench.kernels.blocks import fit_block
from kvbench.method import Budget, BudgetKind, Card, Shape, Step, Upstream, resolved
from kvbench.selection import best_by_head, protect_first
from kvbench.store import LayerKV
from kvbench.techniques.cascade import SharedBudgetMethod, fill_water, round_shares


@dataclass(frozen=True)
class D2O(SharedBudgetMethod):
    """Keeps, per KV head, sinks, heavy hitters and recent entries; merges an evicted entry into a similar one."""

    recent: Share = 0.5
    """Share of a layer's entries for the most recent ones."""
    sinks: Natural = 4
    merge: bool = True
    """Whether evicted entries are merged at all."""
    whole: tuple[int, ...] | None = None
    """Layers that keep every entry; None: 0, 1 and the last on models of 16 layers or more, none on others."""

    shared_rows: int | None = resolved()
    """Mean entries per KV head of the layers that are compressed."""

    card: ClassVar[Card] = Card(
        name="d2o",
        title="D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models",
        idea="Layers whose heads differ in how they spread attention need fewer entries. "
        "Evicted entries whose keys are similar to a kept one are merged into it, so that less context is lost.",
        arxiv="2406.13035",
        year=2024,
        family="merging",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="20%",
        heads="pooled",
        upstream=Upstream(repo="AIoT-MLSys-Lab/D2O", commit="12c99d8", license="Apache-2.0"),
        deviations=(
            ("Entries are merged with the paper's weights, e for the kept entry and exp(cosine) for the others, which "
            "add up to 1. The authors' code averages entries times their cosines, which shrinks them."),
            ("Each head merges its own entries above the layer's mean cosine. The authors' code takes one mask for all "
            "heads by the place of an entry among the evicted ones."),
            ("Compressed once, at the end of the context. The authors' code compresses in the first decode step, and "
            "then evicts or merges one entry per step with a running threshold."),
            ("Layers share the budget in proportion to exp(-F) and meet it, where F is the mean over heads of the "
            "variance of attention sums, scaled to the range of the layer's heads, as in the authors' code. Each layer "
            "gets `sinks` + 2 entries before. The authors' shares are clamped and then miss the budget."),
            ("A budget counts the layers that keep every entry. The ratio of the authors' code leaves them out: on 32 "
            "layers its others keep 20 % of the context where a budget of 20 % leaves them 12 %."),
            "On models below 16 layers no layer is left alone; the authors' code leaves three alone in every model.",
            "Attention sums and cosines are those of KV heads; the authors repeat keys for the query heads.",
        ),
        unverified=(
            ("recent: the authors' code and scripts have equal parts; a review names three heavy hitters to one recent "
            "entry as the best."),
        ),
        limits=(
            "With one or two KV heads F is the same in all layers, so that their budgets are equal.",
            "Every layer is stored whole until the last one is scored, so the peak does not fall.",
            "Keys are compared after rotation, which favors neighbors.",
            "Merged entries count as one in the softmax.",
        ),
    )

    def minimum_entries(self) -> int:
        """The sinks and two more entries, one of them recent."""
        return self.sinks + 2

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the layers that are compressed and the entries that the others leave (`UserError` if too few)."""
        fitted = super().fit(budget, shape)
        if fitted.pooled is None or fitted.rows is None:
            return replace(fitted, shared_rows=None)
        count = len(shape.layers)
        whole = diffuse_layers(count) if self.whole is None else self.whole
        if wrong := [x for x in whole if not 0 <= x < count]:
            raise UserError(f"d2o: whole names layer {wrong[0]} of a model of {count}. Allowed: 0 to {count - 1}.")
        pooled = tuple(x for x in fitted.pooled if x not in whole)
        rest = fitted.rows * len(fitted.pooled) - shape.length * (len(fitted.pooled) - len(pooled))
        if not pooled or rest < self.minimum_entries() * len(pooled):
            kept = len(fitted.pooled) - len(pooled)
            least = math.ceil((kept * shape.length + self.minimum_entries() * len(pooled)) / len(fitted.pooled))
            raise UserError(
                f"d2o: {kept} layers keep every entry and leave too little of a budget of {fitted.rows} tokens per KV "
                f"head. Use --budget {least} or more, or --set whole=[]."
            )
        return replace(fitted, pooled=pooled, shared_rows=rest // len(pooled))

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The mean budget of a compressed layer; None for a layer that keeps every entry."""
        if self.shared_rows is None or window is not None:
            return super().entries_in(layer, window)
        assert self.pooled is not None
        return self.shared_rows if layer in self.pooled else None

    def layer(self, index: int) -> LayerKV:
        """A store with accumulated attention, which is freed after the compression."""
        return LayerKV(column_sums=True)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Accumulated attention; infinite for the sinks. [B, H_kv, n]"""
        return protect_first(kv.scores.clone(), kv, self.sinks)

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep and merge in a sliding layer."""
        self.keep_and_merge(kv, scores, torch.full((len(scores),), entries, device=scores.device))

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Note how unequally the heads of a layer spread their attention."""
        super().evict(kv, step)
        if "score" in kv.state:
            kv.state["measure"] = inequality(kv.scores)

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """Divide the budget after the last layer that shares it, keep and merge."""
        seen = self.scored(layers, step)
        if self.pooled is None or self.shared_rows is None or len(seen) < len(self.pooled):
            return
        # Layers of a model that is spread over several GPUs are on devices of their own.
        weights = torch.exp(-torch.stack([x.state.pop("measure").to(step.key.device) for x in seen], dim=1))
        total = self.shared_rows * len(seen)
        least = self.minimum_entries()
        shares = least + fill_water(weights, total - least * len(seen), step.seen - least)
        for kv, counts in zip(seen, round_shares(shares, total).long().unbind(1), strict=True):
            self.keep_and_merge(kv, kv.state.pop("score"), counts.to(kv.keys.device))

    def keep_and_merge(self, kv: LayerKV, scores: Tensor, counts: Tensor) -> None:
        """Keep the best entries of every head and the recent ones; merge into them. counts: by sequence [B]"""
        places = torch.arange(kv.n, device=scores.device)
        recent = (counts * self.recent).round().long().minimum(counts - self.sinks)[:, None, None]
        kept = best_by_head(
            scores.masked_fill(places >= kv.n - recent, torch.inf), counts[:, None].expand(scores.shape[:2])
        )
        if self.merge and not kept.all():
            key, value = merge_similar(kv.keys, kv.values, kept)
            kv.keys.copy_(key)
            kv.values.copy_(value)
        if bool((counts == counts[0]).all()):
            kv.keep(kept.nonzero()[:, 2].view(*kept.shape[:2], -1))
        else:  # sequences of a batch differ
            kv.keep_where(kept)


def diffuse_layers(count: int) -> tuple[int, ...]:
    """The layers of a model that papers leave alone, 0, 1 and the last; none below 16, where three are too many."""
    return (0, 1, count - 1) if count >= 16 else ()


def inequality(sums: Tensor) -> Tensor:
    """Mean over heads of the variance of attention sums, scaled to the range of the heads. [B, H_kv, n] -> [B]"""
    spread = sums.double().var(-1, correction=min(1, sums.shape[-1] - 1))
    low, high = spread.amin(1, keepdim=True), spread.amax(1, keepdim=True)
    return ((spread - low) / (high - low + 1e-6)).mean(1)


def merge_similar(keys: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in which kept entries are weighted means with the similar evicted ones; the others as they were.

    An evicted entry belongs to the kept one with the highest cosine of keys. It is merged if the cosine is at least the
    mean over evicted entries and heads of its sequence. kept: [B, H_kv, n] bool.
    """
    nearest, cosines = find_nearest(keys, kept)
    gone = ~kept
    threshold = cosines.masked_fill(kept, 0.0).sum((1, 2)) / gone.sum((1, 2)).clamp_min(1)
    weights = torch.exp(cosines) * (gone & (cosines >= threshold[:, None, None]))
    weights = weights.masked_fill(kept, math.e)  # of an entry in itself, if it is kept
    owner = nearest.where(gone, torch.arange(keys.shape[2], device=keys.device))
    total = torch.zeros_like(weights).scatter_add_(2, owner, weights).clamp_min(1e-12)[..., None]
    merged = []
    for rows in (keys, values):
        sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        sums.scatter_add_(2, owner[..., None].expand_as(rows), weights[..., None] * rows.float())
        merged.append((sums / total).to(rows.dtype).where(kept[..., None], rows))
    return merged[0], merged[1]


def find_nearest(keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The kept entry whose key has the highest cosine with each key, and the cosine. [B, H_kv, n] each"""
    units = F.normalize(keys.float(), dim=-1)
    size = fit_block(kept.numel(), keys)
    found = [
        (block @ units.mT).masked_fill(~kept[:, :, None], -torch.inf).max(-1) for block in units.split(size, dim=2)
    ]
    return torch.cat([x.indices for x in found], dim=-1), torch.cat([x.values for x in found], dim=-1)
