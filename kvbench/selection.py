"""Base classes of methods that score entries; pooling, reduction over query heads, protected entries and top-k."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Method
from kvbench.step import Moment
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbench.hf import Model
    from kvbench.method import Card
    from kvbench.step import Step

Pool = Literal["avg", "max"]


@dataclass(frozen=True)
class ScoredMethod(Method):
    """Scores the entries of every KV head at the end of the context and keeps the best."""

    signed: ClassVar[bool] = False
    """Whether scores may be below zero, so that they cannot be weighed by a factor."""

    @abstractmethod
    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Score of each entry; infinite for protected ones. [B, H_kv, n] float32"""

    def summed(self, step: Step, kv_heads: int) -> int:
        """How many attention weights a score adds up; 1: it is a mean, or no attention. kv_heads: of the layer."""
        del step, kv_heads
        return 1

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Once, after the attention of the context's last chunk, so that the prefill itself is exact."""
        if not step.moment.compresses:
            return
        kv.refuse_frozen()
        entries = self.entries_in(step.layer, step.window)
        if entries is None or entries >= kv.n:
            return
        scores = check_scores(self.score(kv, step), kv, step, self.card.name)
        refuse_nan(scores, f"score of {self.card.name} has NaN in layer {step.layer}")
        if not step.moment.in_context:  # a later turn: the context may have been shorter than the budget
            entries = max(entries, int((scores == torch.inf).sum(-1).max()))  # protected entries stay
        self.select(kv, scores, entries)

    def select(self, kv: LayerKV, scores: Tensor, entries: int) -> None:
        """Keep the best entries of every head, equally many; allocations over heads override this."""
        kv.keep(top_entries(scores, entries))


@dataclass(frozen=True)
class AttentionSums(ScoredMethod):
    """Scores tokens by accumulated attention, the same in all heads; the outermost tokens are always kept."""

    first: Natural = 1
    """First tokens, which are always kept."""
    last: Natural = 1
    """Last tokens, which are always kept."""

    def minimum_entries(self) -> int:
        """The outermost tokens and one more."""
        return self.first + self.last + 1

    def layer(self, index: int) -> LayerKV:  # noqa: ARG002  # overrides
        """A store with accumulated attention, which is freed after the compression."""
        return LayerKV(column_sums=True)

    def score(self, kv: LayerKV, step: Step) -> Tensor:  # noqa: ARG002  # overrides
        """Accumulated attention, mean over all heads; infinite for the outermost tokens. [B, H_kv, n]"""
        sums = kv.scores.mean(1, keepdim=True).expand_as(kv.scores)
        return protect_first(protect_last(sums, self.last), kv, self.first)


@dataclass(frozen=True)
class RollingMethod(Method):
    """Drops the worst entries at the end of the context and after every later forward; its stores are `bounded`."""

    recompressible: ClassVar[str | None] = "the worst entries are dropped after every forward as it is."
    graphable: ClassVar[str | None] = "an entry is dropped in every step, by a score that may use numbers of the host."

    @abstractmethod
    def score(self, kv: LayerKV, step: Step, entries: int) -> Tensor:
        """Score of each entry if `entries` of them stay; infinite for protected ones. [B, H_kv, n] float32"""

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Down to the budget: the context's entries into a block of their own, later ones in place.

        Decode steps on a GPU are not searched for NaN, because the host would wait for every layer.
        """
        entries = self.entries_in(step.layer, step.window)
        if entries is None or entries >= kv.n or not step.moment.is_last:
            return
        scores = check_scores(self.score(kv, step, entries), kv, step, self.card.name)
        if step.moment is not Moment.DECODE or not scores.is_cuda:
            refuse_nan(scores, f"score of {self.card.name} has NaN in layer {step.layer}")
        if step.moment.in_context:
            kv.keep(top_entries(scores, entries))
        else:
            kv.drop(scores.topk(kv.n - entries, dim=-1, largest=False).indices)


@dataclass(frozen=True)
class PeriodicMethod(RollingMethod):
    """Drops the worst entries at the end of the context, and later whenever `period` entries exceed the budget."""

    period: Positive = 128
    """Entries above the budget at which entries are dropped again, down to the budget."""

    graphable: ClassVar[str | None] = "entries are dropped now and then, and the store counts its entries on the host."

    def layer(self, index: int) -> LayerKV:
        """A store with positions, in which entries are dropped in place, with room for those of a period."""
        del index
        return LayerKV(track=True, bounded=True, slack=self.period)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Down to the budget, where a whole period exceeds it."""
        entries = self.entries_in(step.layer, step.window)
        if entries is not None and (step.moment.in_context or kv.n >= entries + self.period):
            super().evict(kv, step)


def require_inverse_rotation(model: Model, name: str) -> None:
    """Refuse a model whose rotary embedding cannot be inverted (`UserError`). name: of the method."""
    if not all(rope.trusted for rope in model.ropes):
        raise UserError(
            f"{name} inverts the rotary embedding, which is not understood on every layer of {model.id}. Use a method "
            "that does not, such as knorm."
        )


def mark_recent(kv: LayerKV, step: Step, count: int) -> Tensor:
    """Mark the entries of the last `count` tokens, in a store with positions. [B, H_kv, n] bool"""
    assert kv.positions is not None
    return kv.positions > step.positions[:, None, -1:] - count


def refuse_nan(scores: Tensor, what: str = "the scores have NaN") -> None:
    """Refuse scores by which a choice would be arbitrary (`UserError`). what: the start of the message.

    The largest score is read on the host: compression is timed, so the host waits for it anyway.
    """
    if scores.numel() and math.isnan(scores.amax().item()):
        raise UserError(f"{what}, so that no choice follows from it. Correct the score; infinities are allowed.")


def check_scores(scores: Tensor, kv: LayerKV, step: Step, name: str) -> Tensor:
    """The scores of the method `name` after `hide_unseen`; `UserError` if they are not one per entry and KV head.

    Scores of one head would be broadcast, and a method would keep the same entries in all heads unnoticed.
    """
    wanted = [*step.key.shape[:2], kv.n]
    found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if found != wanted:
        raise UserError(
            f"score of {name} gives {found} in layer {step.layer}, not a tensor [B, H_kv, n] of {wanted}. Give one "
            "number for each entry of each KV head."
        )
    return hide_unseen(scores, kv, step.window)


def top_entries(scores: Tensor, entries: int) -> Tensor:
    """Ascending indices of the best entries of every head; of equal scores the first. [B, H_kv, entries]"""
    refuse_nan(scores)
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :entries].sort(dim=-1).values


def keep_best(stores: Sequence[LayerKV], scores: Sequence[Tensor], entries: int) -> None:
    """Keep the best entries over all heads of these layers, `entries` per head on average. scores: [B, H_kv, n] each"""
    for store, mask in zip(stores, mark_best(scores, entries), strict=True):
        store.keep_where(mask)


def mark_best(scores: Sequence[Tensor], entries: int) -> tuple[Tensor, ...]:
    """Mark the best entries over all heads of these layers. scores: [B, H_kv, n] each. Returns as many bool masks"""
    pool = torch.stack([x.to(scores[0].device) for x in scores], dim=1)  # [B, layers, H_kv, n]
    best = top_entries(pool.flatten(1), entries * pool.shape[1] * pool.shape[2])
    marked = torch.zeros_like(pool, dtype=torch.bool).flatten(1).scatter_(1, best, True).view_as(pool)
    return tuple(mask.to(x.device) for mask, x in zip(marked.unbind(1), scores, strict=True))


def best_by_head(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark each head's best entries. scores: [B, H_kv, n]. counts: [B, H_kv]. Returns [B, H_kv, n] bool"""
    refuse_nan(scores)
    return rank(scores) < counts[..., None]


def rank(scores: Tensor) -> Tensor:
    """How many scores of its row stand before each one: 0 for the greatest; of equal ones the first. [..., n] int64"""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def hide_unseen(scores: Tensor, kv: LayerKV, window: int | None) -> Tensor:
    """Give entries that no later token sees through a sliding window the lowest score. [B, H_kv, n]"""
    if window is None:
        return scores
    return scores.masked_fill(kv.logical_positions() <= kv.seen - window, -torch.inf)


def protect_last(scores: Tensor, entries: int) -> Tensor:
    """Scores with the last entries infinite. [B, H_kv, n]"""
    scores = scores.clone()
    scores[..., max(0, scores.shape[-1] - entries) :] = torch.inf
    return scores


def protect_first(scores: Tensor, kv: LayerKV, tokens: int) -> Tensor:
    """Scores with the entries of the first tokens infinite, where they are still stored. [B, H_kv, n]"""
    return scores.masked_fill(kv.logical_positions() < tokens, torch.inf)


def pool_scores(scores: Tensor, kernel: int, kind: Pool) -> Tensor:
    """Smooth scores along the entries, so that neighbors of a peak survive with it. [B, H, n]

    `avg` counts the zero padding at both ends, as PyTorch does and as SnapKV's code does by using it.
    """
    if not scores.shape[-1]:
        return scores
    pool = F.avg_pool1d if kind == "avg" else F.max_pool1d
    pooled: Tensor = pool(scores, kernel, stride=1, padding=kernel // 2)
    return pooled


def pool_before(scores: Tensor, window: int, kernel: int, kind: Pool) -> Tensor:
    """Smooth the scores of entries before the observation window; those of the window are infinite. [B, H, n]"""
    before = max(0, scores.shape[-1] - window)
    return torch.cat([
        pool_scores(scores[..., :before], kernel, kind), torch.full_like(scores[..., before:], torch.inf)
    ], dim=-1)


def go_around(
    inner: type[Method], around: type, card: Card, note: str, *notes: str, revision: str = ""
) -> type[Method]:
    """Create `inner+around`: `around` decides or weighs, with the scores of another method.

    card: of the outer method. note: what comes from which paper. notes: further deviations. revision: added to the
    inner method's version, where the outer one has changed the numbers of compositions.

    Raises:
        UserError: the inner method does not score every entry once, decides more than scores, or has this one already.
    """
    if card.name in inner.card.name.split("+"):
        raise UserError(
            f"{inner.card.name}+{card.name} makes no sense: {card.name} is in this composition already. Name it once."
        )
    if not issubclass(inner, ScoredMethod) or decides_itself(inner) or issubclass(inner, around):
        raise UserError(
            f"{inner.card.name}+{card.name} makes no sense: {card.name} goes around a method that scores every entry "
            f"once and keeps the best of each head, and {inner.card.name} does not. Use one that does, such as snapkv."
        )
    scorer = inner.card
    heads = card.heads if scorer.heads == "independent" else scorer.heads
    made = scorer.model_copy(update={
        "name": f"{scorer.name}+{card.name}", "version": scorer.version + revision, "heads": heads,
        "family": card.family,
        "title": f"{scorer.title} + {card.title}", "limits": (*scorer.limits, *card.limits),
        "deviations": (*scorer.deviations, note, *notes), "unverified": (*scorer.unverified, *card.unverified),
    })
    body = {"card": made, "__doc__": inner.__doc__, "__module__": inner.__module__}
    return dataclass(frozen=True)(type(made.name, (around, inner), body))


def decides_itself(method: type[ScoredMethod]) -> bool:
    """Whether it has its own choice by the scores, of a layer or across layers, which another choice would undo."""
    return method.select is not ScoredMethod.select or method.end_of_layer is not Method.end_of_layer


def group_mean(scores: Tensor, kv_heads: int) -> Tensor:
    """Mean over the query heads that share a KV head. [B, H_q, n] -> [B, H_kv, n]"""
    mean: Tensor = scores.unflatten(1, (kv_heads, -1)).mean(2)
    return mean
