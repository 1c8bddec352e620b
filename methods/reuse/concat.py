"""Plain concatenation: entries of documents that were run apart, put one after the other and left as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card
from kvbench.techniques.reuse import LIMITS, ApartMethod, MixedPrompt


@dataclass(frozen=True)
class Concat(ApartMethod):
    """Keys keep the positions at which their documents were run."""

    card: ClassVar[Card] = Card(
        name="concat",
        title="Plain concatenation of cached documents",
        idea="The entries of each document were computed without the others. They are put one after the other as they "
        "are, with keys at the positions where their documents were run.",
        arxiv=None,
        year=None,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=None,
        limits=LIMITS,
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over the parts that occur in earlier prompts, at the positions where they were run."""
        known = mixed.reuse.known
        for i, (start, part) in enumerate(mixed.parts):
            if part in known:
                before = self.before(mixed) if i else ()
                mixed.add(mixed.obtain(before, part), start, at=len(before))
