"""PIE: after an edit the keys behind it are rotated to their new positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.engine.reuse import apply_edits, find_edits
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.techniques.reuse import LIMITS, MixedPrompt, ReuseMethod, run_earlier


@dataclass(frozen=True)
class Pie(ReuseMethod):
    """Takes over the entries of the earlier prompt of which this one is an edit, and computes what was inserted."""

    card: ClassVar[Card] = Card(
        name="pie",
        title="Let the code LLM edit itself when you edit the code",
        idea="Where a cached text is edited, only the inserted tokens are computed. The keys behind an edit are "
        "rotated by its change of length; the error that remains is that they still reflect the old text.",
        arxiv="2407.03157",
        year=2024,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="zhenyuhe00/PIE", commit=None, license=None),
        deviations=(
            "Edits are found by comparing the prompt with each earlier one in whole parts; the most similar is used.",
        ),
        unverified=("The authors' repository has no code: this follows the description.",),
        limits=(*LIMITS, "Parts in another order count as deleted and inserted."),
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over everything that the best earlier prompt shares with this one, in its order."""
        best: tuple[int, int] | None = None
        spans: list[tuple[int, int, int]] = []
        for age, prompt in enumerate(mixed.reuse.earlier):
            ids = [x for part in prompt for x in part]
            kept = apply_edits(ids, find_edits(prompt, mixed.reuse.parts))[1]
            found = sum(count for _, _, count in kept), age
            if found[0] and (best is None or found > best):
                best, spans = found, kept
        if best is not None:
            chunk = run_earlier(mixed, mixed.reuse.earlier[best[1]])
            for first, start, count in spans:
                mixed.add(chunk, start, first=first, count=count)
