"""LocalLeap: neighbors of a very confident token are accepted at a lower threshold (arXiv 2510.07081)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from kvbench.constraints import Natural, Share
from kvbench.diffusion.policy import Denoising, Policy
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Upstream


@dataclass(frozen=True)
class LocalLeap(Policy):
    """relaxed: threshold near an anchor. radius: positions on either side of an anchor."""

    relaxed: Share = 0.75
    radius: Natural = 4

    card: ClassVar[Card] = Card(
        name="local-leap", title="LocalLeap", models="diffusion",
        idea="A token above the run's threshold is an anchor. Near it a lower threshold suffices, so answers take "
             "fewer steps; nothing is cached.",
        arxiv="2510.07081", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=Upstream(repo="friedrichor/LocalLeap", commit=None, license=None),
        unverified=("the reference was read in a copy of its repository",),
        limits=("only with --gen threshold: the paper's is 0.9",),
    )

    def check(self, sampling: Sampling, answer: int) -> None:
        """Require a threshold.

        Raises:
            UserError: there is none, or it is below `relaxed`.
        """
        del answer
        if sampling.threshold is None or sampling.threshold < self.relaxed:
            raise UserError(
                f"local-leap relaxes a threshold to {self.relaxed}: give a higher one, such as --gen "
                f"threshold={max(0.9, (1 + self.relaxed) / 2):g}."
            )

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """Tokens above the threshold, and tokens above `relaxed` near an anchor."""
        assert d.sampling.threshold is not None
        anchors = (confidence >= d.sampling.threshold).float()[:, None]
        near = F.max_pool1d(anchors, 2 * self.radius + 1, stride=1, padding=self.radius)[:, 0] > 0
        return super().accept(d, confidence) | (near & (confidence >= self.relaxed))
