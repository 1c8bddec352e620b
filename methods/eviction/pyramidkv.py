"""PyramidKV: SnapKV's scores, with more entries for lower layers than for upper ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.constraints import Positive
from kvbench.method import Budget, BudgetKind, Card, Shape, Upstream, resolved
from kvbench.methods.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV under budgets that fall from layer to layer; the budget asked for is their mean."""

    beta: Positive = 20
    """The top layer's share is one part in `beta`."""

    layer_rows: tuple[int, ...] | None = resolved()
    """Entries per KV head of each layer."""

    card: ClassVar[Card] = Card(
        name="pyramidkv",
        title="PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        idea="Attention is spread wide in lower layers and funnels into few entries in upper ones. "
        "So the budget falls arithmetically from layer to layer, and SnapKV's scores choose within it.",
        arxiv="2406.02069",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2048",
        heads="independent",
        upstream=Upstream(repo="Zefan-Cai/KVCache-Factory", commit="c97f9d7", license="MIT"),
        deviations=(
            ("The schedule is the authors', integer steps and all: its sum exceeds the budget (13 % at 64 rows of 32 "
            "layers), which the measured bytes show."),
            "Window, kernel and pooling are SnapKV's defaults here; the paper's tables use a window of 8.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """The mean budget, then the schedule over layers, unless the budget is for every entry."""
        fitted = super().fit(budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return fitted
        rows = schedule(fitted.rows, self.window, self.beta, len(shape.layers), shape.length)
        return replace(fitted, layer_rows=rows)

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The layer's own budget; sliding layers keep the same share of what they hold."""
        if self.layer_rows is None:
            return super().entries_in(layer, window)
        return self.in_window(self.layer_rows[layer], window)


def schedule(rows: int, window: int, beta: int, layers: int, length: int) -> tuple[int, ...]:
    """Entries of each layer, window included, for a mean budget of `rows` (authors' code, `update_kv`)."""
    mean = rows - window
    if length < 2 * mean or layers == 1:
        return (rows,) * layers
    low = mean // beta
    high = 2 * mean - low
    if high >= length - window:
        high = length - window
        low = 2 * mean - high
    step = (high - low) // (layers - 1)
    return tuple(high - layer * step + window for layer in range(layers))
