"""LaViDa: the prompt is run once under a prefix mask, and every step computes the answer only (arXiv 2505.16839)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Gt
from kvbench.diffusion.policy import Denoising, top
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.methods.diffusion.sections import Sections


@dataclass(frozen=True)
class Lavida(Sections):
    """schedule: `linear`, the run's own; `shift`: steps of a block commit unequal numbers of tokens.

    factor: of the shifted schedule: below 1, many tokens in the first steps and few in the last; 1, even; above, the
    reverse. 0.33 is that of the authors' evaluation; their function falls back to 3.
    """

    schedule: Literal["linear", "shift"] = "linear"
    factor: Annotated[int | float, Gt(0)] = 0.33  # earlier runs have a whole number in their identity

    card: ClassVar[Card] = Card(
        name="lavida", title="LaViDa's prefix cache", models="diffusion",
        idea="The prompt attends to itself only, so it is run once, and its entries never change. Every step computes "
             "the answer, which attends to the prompt and to all of itself.",
        arxiv="2505.16839", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="jacklishufan/LaViDa", commit="284ef5c", license="Apache-2.0"),
        deviations=(
            "text only; of its four schedules the logit-normal and the cosine are left out",
            ("with a shifted head the prompt's last position, which predicts the first token, is computed with the "
            "answer; the authors' code commits the first token from the pass over the prompt"),
        ),
        limits=(
            ("exact on models trained with the prefix mask, whose config.json says "
            '`"diffusion": {"attention": "prefix"}`; on others, whose prompts attend to the answer, an approximation'),
            "the pass over the prompt counts as a forward pass",
        ),
    )

    prefixed: ClassVar[bool] = True

    def section(self, d: Denoising) -> tuple[int, int]:
        """The whole answer."""
        return d.prompt - d.masking.shifted, d.ids.shape[1]

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """As many tokens as the schedule says, or the threshold."""
        if self.schedule == "linear" or d.sampling.threshold is not None:
            return super().accept(d, confidence)
        counts = reveal_counts(d.sampling.block, d.steps, self.factor)
        return top(confidence, torch.full_like(d.quota, counts[min(d.step, len(counts) - 1)]))


def reveal_counts(tokens: int, steps: int, factor: float) -> list[int]:
    """Tokens that each step commits: the shifted times factor * t / (1 + (factor - 1) * t), from the last step back.

    Every step commits at least one, so there are at most as many steps as tokens.
    """
    steps = min(steps, tokens)
    exact = Fraction(factor)  # in floating point the last step can miss a token
    reached = [exact * i * tokens // (steps + (exact - 1) * i) for i in range(steps + 1)]
    counts = [max(1, b - a) for a, b in pairwise(reached)]
    excess, step = sum(counts) - tokens, 0
    while excess:
        if counts[step % steps] > 1:
            counts[step % steps] -= 1
            excess -= 1
        step += 1
    return counts[::-1]
