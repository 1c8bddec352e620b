"""SimLayerKV: layers that look at the first and last tokens only keep only those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import protect_first
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of
from kvbench.techniques.cascade import CascadeMethod, round_shares

LEAST_SHARE = 5
"""A lazy layer keeps at least this part of the mean budget, where sinks and recent entries would be more."""


@dataclass(frozen=True)
class SimLayerKV(CascadeMethod):
    """Keeps sinks and recent entries in the layers that attend to those most, and every entry in the others."""

    sinks: Natural = 4
    recent: Positive = 1024
    """Last entries of a lazy layer."""
    queries: Positive = 1
    """Last queries, by whose attention a layer is found to be lazy."""

    card: ClassVar[Card] = Card(
        name="simlayerkv",
        title="SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction",
        idea="Some layers attend to the first and the most recent tokens only, whatever the text. "
        "These lazy layers keep nothing else, and the other layers keep every entry.",
        arxiv="2410.13846",
        year=2024,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("The budget decides how many layers are lazy: those with the most attention to sinks and recent entries, "
            "as few as the budget allows. In the paper a threshold on that attention decides, per model."),
            ("Lazy layers keep sinks and recent entries, or a fifth of the mean budget if that is less, and what the "
            "other layers leave of the budget widens their windows."),
            "Entries after the context are kept.",
            "Layers with a sliding window keep an equal share of it each.",
        ),
        unverified=("queries: the context's last, as in kvpress; the authors' code takes the first decoded token.",),
        limits=(
            ("A budget that does not hold one whole layer and the least windows of all others makes every layer lazy, "
            "as StreamingLLM is."),
            "Lazy layers lose the middle of the text.",
        ),
    )

    def minimum_entries(self) -> int:
        """The sinks and one recent entry."""
        return self.sinks + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.queries)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """The place of each entry, so that recent ones stay; infinite for the sinks. [B, H_kv, n]"""
        places = torch.arange(kv.n, dtype=torch.float32, device=kv.keys.device).expand(kv.keys.shape[:3])
        return protect_first(places, kv, self.sinks)

    def measure(self, kv: LayerKV, step: Step, scores: Tensor) -> Tensor:
        """Share of attention on sinks and recent entries, mean over heads and queries. [B]"""
        assert kv.recent_queries is not None and self.rows is not None
        mass = attention_mass_of(kv.recent_queries, kv, step).mean(1) / kv.recent_queries.shape[2]
        recent = max(self.sinks, kv.n - (self._least(self.rows) - self.sinks))
        return mass[:, : self.sinks].sum(-1) + mass[:, recent:].sum(-1)

    def divide(self, measures: Tensor, total: int, stored: int) -> Tensor:
        """All entries of the least lazy layers, and equal parts of what they leave for the others. [B, layers]"""
        assert self.pooled is not None
        layers, seen = len(self.pooled), measures.shape[1]
        full = (total - self._least(total // layers) * layers) // (stored - self._least(total // layers))
        full = min(full, layers - 1)
        lazy = torch.full(measures.shape, (total - full * stored) / (layers - full), dtype=torch.float64,
                          device=measures.device)
        ranks = measures.argsort(dim=1, stable=True).argsort(dim=1)
        if seen == layers:
            part = lazy[:, full:]
            whole = round_shares(part, total - full * stored)
            return torch.cat([torch.full_like(lazy[:, :full], stored), whole], dim=1).gather(1, ranks)
        return lazy.masked_fill(ranks < full, stored)

    def _least(self, entries: int) -> int:
        """Entries of a lazy layer, at least. entries: the mean budget."""
        return max(self.sinks + 1, min(self.sinks + self.recent, entries // LEAST_SHARE))
