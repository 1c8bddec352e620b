"""Concatenation with aligned positions: entries of documents that were run apart, rotated to their new positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card
from kvbench.techniques.reuse import LIMITS, ApartMethod


@dataclass(frozen=True)
class ConcatAligned(ApartMethod):
    """Keys are rotated to their positions in the prompt; nothing is computed again."""

    card: ClassVar[Card] = Card(
        name="concat-aligned",
        title="Concatenation of cached documents with aligned positions",
        idea="The entries of each document were computed without the others. Their keys are rotated to their positions "
        "in the prompt, which is exact; the error that remains is that no document attended to those before it.",
        arxiv=None,
        year=None,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=None,
        limits=(*LIMITS, "With unchanged weights this is Block-Attention (2409.15355) before its fine-tuning."),
    )
