"""Base classes of methods that divide one budget over layers, some of which trim earlier layers as later ones arrive.

In a cascade, a layer is scored and measured when the context has passed it. The budget of all layers is then divided
over the layers so far; more layers leave less to each, so earlier layers only ever shrink, and the result is that of a
division after the last layer. At most the budget and one whole layer are stored at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from kvbench.errors import UserError
from kvbench.method import Budget, Shape, resolved
from kvbench.selection import ScoredMethod, best_by_head, check_scores, keep_best, rank, top_entries
from kvbench.store.layer import SCORE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.step import Step
    from kvbench.store import LayerKV

ROUNDING = 1e-6
"""Added to a bound, so that the last division never asks for an entry that an earlier one dropped."""


@dataclass(frozen=True)
class SharedBudgetMethod(ScoredMethod):
    """Scores every full-attention layer and decides later what they keep; sliding layers keep their own budget.

    By default the best entries of all heads and layers stay. A subclass that decides otherwise overrides
    `end_of_layer`; it decides at the latest with the last layer of `pooled`, and removes what it finds in the layers'
    `state`.
    """

    pooled: tuple[int, ...] | None = resolved()
    """The layers that share one budget; None: every entry is kept."""

    recompressible: ClassVar[str | None] = "the budget is divided over the layers once, at the end of the context."

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget, and the layers that share it."""
        fitted = super().fit(budget, shape)
        full = tuple(i for i, x in enumerate(shape.layers) if x.window is None)
        if fitted.rows is None or fitted.rows >= shape.length or not full:
            return replace(fitted, pooled=None)
        if len({shape.layers[i] for i in full}) > 1:
            raise UserError(
                f"{self.card.name} divides one budget over layers with equal heads, and those of this model differ. "
                "Use a method with a budget per layer, such as snapkv."
            )
        return replace(fitted, pooled=full)

    def running_bytes(self, shape: Shape) -> int:
        """Bytes for scoring, and of the scores of every layer that shares the budget."""
        scores = sum(SCORE_BYTES * shape.length * shape.layers[i].kv_heads for i in self.pooled or ())
        return super().running_bytes(shape) + scores

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Score a layer that shares the budget; compress any other on its own."""
        if self.pooled is None or step.layer not in self.pooled:
            super().evict(kv, step)
        elif step.moment.compresses and self.rows is not None and self.rows < kv.n:
            kv.refuse_frozen()
            kv.state["score"] = check_scores(self.score(kv, step), kv, step, self.card.name)

    def scored(self, layers: Sequence[LayerKV], step: Step) -> list[LayerKV]:
        """The layers so far that share the budget; empty where this one does not."""
        if self.pooled is None or "score" not in layers[step.layer].state:
            return []
        return [layers[i] for i in self.pooled if i <= step.layer]

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """After the last layer that shares the budget, keep the best entries over all heads and layers."""
        seen = self.scored(layers, step)
        if self.pooled is not None and self.rows is not None and len(seen) == len(self.pooled):
            keep_best(seen, [x.state.pop("score") for x in seen], self.rows)


@dataclass(frozen=True)
class CascadeMethod(SharedBudgetMethod):
    """Divides the shared budget by a measure of each layer, and trims earlier layers as later ones arrive."""

    @abstractmethod
    def measure(self, kv: LayerKV, step: Step, scores: Tensor) -> Tensor:
        """The numbers that this layer's share depends on, by sequence. [B, ...]"""

    @abstractmethod
    def divide(self, measures: Tensor, total: int, stored: int) -> Tensor:
        """Entries per KV head of each layer so far, `total` in all layers of the model. [B, layers]

        Where all layers are there, whole numbers with this sum; before, bounds that later layers can only lower.
        measures: [B, layers, ...]. stored: entries of a layer before it is trimmed.
        """

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Measure a layer that it scores."""
        super().evict(kv, step)
        if "score" in kv.state:
            kv.state["measure"] = self.measure(kv, step, kv.state["score"])

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """Trim the layers so far to their shares; with the last one, exactly."""
        seen = self.scored(layers, step)
        if not seen:
            return
        assert self.pooled is not None and self.rows is not None
        # Layers of a model that is spread over several GPUs are on devices of their own.
        measures = torch.stack([x.state["measure"].to(step.key.device) for x in seen], dim=1)
        shares = self.divide(measures, self.rows * len(self.pooled), step.seen)
        last = len(seen) == len(self.pooled)
        bounds = shares if last else shares + ROUNDING
        for kv, counts in zip(seen, bounds.ceil().long().unbind(1), strict=True):
            self.trim(kv, counts.to(kv.keys.device), last=last)
            if last:
                del kv.state["measure"], kv.state["score"]

    def trim(self, kv: LayerKV, counts: Tensor, *, last: bool) -> None:
        """Keep each sequence's best entries, all heads as many; before the last layer, the most of any. counts: [B]"""
        scores = kv.state["score"]
        most = int(counts.max())
        if last and bool((counts < most).any()):  # sequences of a batch differ
            kv.keep_where(best_by_head(scores, counts[:, None].expand(scores.shape[:2])))
        elif most < kv.n:
            best = top_entries(scores, most)
            kv.keep(best)
            kv.state["score"] = scores.gather(-1, best)


def fill_water(weights: Tensor, total: int, most: int) -> Tensor:
    """Shares in proportion to weights, none above `most`, that add up to `total`. [B, layers] float64

    A share never grows when a layer is added. weights: [B, layers], not negative; all zero: equal shares.
    """
    weights = weights.double()
    highest = weights.amax(1, keepdim=True)
    weights = torch.where(highest > 0, weights.clamp_min(highest * 1e-12), torch.ones_like(weights))
    count = weights.shape[1]
    if total >= most * count:
        return torch.full_like(weights, most)
    ordered = weights.sort(dim=1, descending=True).values
    rest = ordered.flip(1).cumsum(1).flip(1)  # of the layers from each one on
    full = torch.arange(count, device=weights.device)  # layers before each one, all at `most`
    levels = (total - full * most) / rest
    fits = levels * ordered <= most
    first = fits.int().argmax(1, keepdim=True)  # as few full layers as possible
    return (levels.gather(1, first) * weights).clamp_max(most)


def round_shares(shares: Tensor, total: int | Tensor) -> Tensor:
    """Whole numbers that add up to `total`: rounded down, and one more for the largest remainders. [B, n]

    shares: float64. total: of all sequences, or [B, 1].
    """
    whole = shares.floor()
    left = total - whole.sum(1, keepdim=True)
    return whole + (rank(shares - whole) < left).double()
