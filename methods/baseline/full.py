"""The full cache: every entry, in the model's element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card, Method


@dataclass(frozen=True)
class Full(Method):
    """Keeps every entry; the reference for accuracy, bytes and time."""

    card: ClassVar[Card] = Card(
        name="full",
        title="Full KV cache",
        idea="Every key and value is kept, one entry per token and KV head. Attention is exact.",
        arxiv=None,
        year=None,
        family="baseline",
        stages=(),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=None,
        limits=("--recompress is accepted and changes nothing, so that runs with it have a run to be compared with.",),
    )
