"""Observed attention: scores each entry by its mean attention from the queries that could see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV


@dataclass(frozen=True)
class ObservedAttention(ScoredMethod):
    """Keeps, per KV head, the entries with the most attention per query that could see them; evicts once."""

    card: ClassVar[Card] = Card(
        name="observed-attention",
        title="Observed attention (kvpress's relative of H2O)",
        idea="The sums of H2O favor early entries, which more queries can see. "
        "Dividing by the number of those queries removes the bias, and the cache is compressed once.",
        arxiv="2306.14048",
        year=2024,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=("Sums are taken block by block; kvpress materializes the attention matrix.",),
    )

    recompressible: ClassVar[str | None] = (
        "the number of queries that could see an entry is known only at the first compression."
    )

    def layer(self, index: int) -> LayerKV:
        """A store with accumulated attention, which is freed after the compression."""
        return LayerKV(column_sums=True)

    def summed(self, step: Step, kv_heads: int) -> int:
        """Those of the query heads of a KV head; over the queries a score is a mean."""
        return step.query.shape[1] // kv_heads

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Accumulated attention divided by the number of queries that could see the entry. [B, H_kv, n]"""
        queries = kv.seen - kv.logical_positions()
        return kv.scores / queries
