"""PyramidKV: SnapKV with more entries in lower layers than in upper ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.constraints import Positive
from kvbench.method import Budget, BudgetKind, Card, Shape, Upstream, resolved
from kvbench.methods.eviction.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that decrease from layer to layer; the requested budget is their mean."""

    beta: Positive = 20
    """The top layer gets the window and at least the mean budget without it, divided by this; integer steps and short
    contexts give it more."""

    layer_rows: tuple[int, ...] | None = resolved()
    """Entries per KV head of each layer."""

    card: ClassVar[Card] = Card(
        name="pyramidkv",
        version="2",
        title="PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        idea="Attention is spread over many entries in lower layers and concentrates on few in upper layers. "
        "So the budget decreases linearly from layer to layer, and SnapKV's scores choose the entries.",
        arxiv="2406.02069",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="2048",
        heads="independent",
        upstream=Upstream(repo="Zefan-Cai/KVCache-Factory", commit="c97f9d7", license="MIT"),
        deviations=(
            ("The schedule is the authors', including its integer steps, so that its sum can exceed the budget: with "
            "the default window and 32 layers by 4 % at 256 entries, 11 % at 128 and 32 % at 47, where the step is 0 "
            "and every layer gets the largest budget. The measured bytes show it."),
            ("Scores are averaged over the query heads of a KV head, then pooled, and entries are kept per KV head, as "
            "in the authors' code with `kv_cache_granularity=kv_head`; its default repeats keys."),
            "Window, kernel and pooling are SnapKV's defaults here; the paper's tables use a window of 8.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the mean budget, then the budgets of the layers, unless every entry is kept."""
        fitted = super().fit(budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, layer_rows=None)  # of an earlier fit
        layer_entries = schedule(fitted.rows, self.window, self.beta, len(shape.layers), shape.length)
        return replace(fitted, layer_rows=layer_entries)

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The layer's own budget; sliding layers keep the same share of their window."""
        if self.layer_rows is None:
            return super().entries_in(layer, window)
        return self.in_window(self.layer_rows[layer], window)


def schedule(entries: int, window: int, beta: int, layers: int, length: int) -> tuple[int, ...]:
    """Entries of each layer, including the window, for a mean of `entries` (authors' code, `update_kv`)."""
    mean = entries - window
    if length < 2 * mean or layers == 1:
        return (entries,) * layers
    low = mean // beta
    high = 2 * mean - low
    if high >= length - window:
        high = length - window
        low = 2 * mean - high
    step = (high - low) // (layers - 1)
    return tuple(high - layer * step + window for layer in range(layers))
