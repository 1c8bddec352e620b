"""No cache: every denoising step computes every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.diffusion.policy import Policy
from kvbench.method import BudgetKind, Card, Shape


@dataclass(frozen=True)
class NoCache(Policy):
    """The baseline of diffusion models."""

    card: ClassVar[Card] = Card(
        name="none", title="No cache", models="diffusion",
        idea="Every denoising step runs the whole sequence. Nothing is cached or approximated.",
        arxiv="2502.09992", year=2025, family="diffusion", stages=(), budget=BudgetKind.NONE, heads="independent",
        upstream=None,
    )

    prefixed: ClassVar[bool] = True

    def identity(self, shape: Shape) -> bool:
        """True: nothing is approximated."""
        del shape
        return True
