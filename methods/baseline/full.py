"""The full cache: every entry, at the model's own precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card, Method


@dataclass(frozen=True)
class Full(Method):
    """Keeps everything; the anchor of accuracy, bytes and time."""

    card: ClassVar[Card] = Card(
        name="full",
        title="Full KV cache",
        idea="Every key and value stays, one entry per token and KV head. Attention is exact.",
        arxiv=None,
        year=None,
        family="baseline",
        stages=(),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=None,
        limits=("--recompress is accepted and changes nothing: what a run with it is compared with must have it too.",),
    )
