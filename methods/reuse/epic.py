"""EPIC: the first tokens of every document are computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.constraints import Natural
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.techniques.reuse import LIMITS, ApartMethod, Behind, MixedPrompt


@dataclass(frozen=True)
class Epic(ApartMethod):
    """LegoLink: a document's first tokens are sinks where it is run alone, and must not be in a longer prompt."""

    behind: Behind = "nothing"
    first: Natural = 16
    """Tokens at the start of each document that are computed again."""
    card: ClassVar[Card] = Card(
        name="epic",
        title="EPIC: efficient position-independent caching for serving large language models",
        idea="A document that was run alone has attention sinks at its start. The first tokens of every document are "
        "computed again in the prompt, in all layers; the others are rotated to their places.",
        arxiv="2410.15332",
        year=2024,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="DerekHJH/epic", commit="3204410", license="Apache-2.0"),
        deviations=(
            "Documents have no beginning-of-text token of their own: the prompt is that of the task, for every method.",
        ),
        limits=LIMITS,
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over the known parts; the first tokens of each document are computed."""
        super().place(mixed)
        for start, part in mixed.parts[1:]:
            mixed.renew(mixed.places[start : start + min(self.first, len(part))])
