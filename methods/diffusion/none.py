"""No cache: every step of a diffusion model computes every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.diffusion.policy import Policy
from kvbench.method import BudgetKind, Card, Shape


@dataclass(frozen=True)
class NoCache(Policy):
    """What the others are compared with."""

    card: ClassVar[Card] = Card(
        name="none", title="No cache", models="diffusion",
        idea="Every denoising step runs the whole sequence. Nothing is kept between them, and nothing is approximated.",
        arxiv="2502.09992", year=2025, family="diffusion", stages=(), budget=BudgetKind.NONE, heads="independent",
        upstream=None,
    )

    def identity(self, shape: Shape) -> bool:
        """There is nothing to lose."""
        del shape
        return True
