"""Window-Diffusion: only the first masks are computed, and masks beyond a window are not read (arXiv 2601.20332)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.constraints import Positive
from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Shape, Upstream

ACTIVE = "if a step commits more masks than are active, the reference overwrites decoded tokens; here it is refused"
DREAM = (
    "on Dream the reference leaves masks beyond the window out of full passes too, commits only the window's first "
    "token in them, and may stop at an end of text; here both kinds of models do as LLaDA does there"
)


@dataclass(frozen=True)
class WindowDiffusion(Policy):
    """refresh: passes per phase; the first is a full pass. active: masks computed per step. window: masks read."""

    refresh: Positive = 32
    active: Positive = 16
    window: Positive = 64

    card: ClassVar[Card] = Card(
        name="window-diffusion", title="Window-Diffusion", models="diffusion",
        idea="Between full passes only the first masks of the answer are computed, inside a wider window of masks that "
             "attention reads. Masks beyond the window are skipped until the next full pass.",
        arxiv="2601.20332", year=2026, family="diffusion", stages=("generation", "retrieval"), budget=BudgetKind.NONE,
        heads="independent", upstream=Upstream(repo="vhicrgit/Window-Diffusion", commit="d8bb349", license=None),
        deviations=(ACTIVE, "computed tokens are always read, even beyond the window", DREAM),
        limits=("the answer is one block: leave --gen block out",),
    )

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.active > self.window:
            raise UserError(f"window-diffusion: active must be at most window {self.window}, got {self.active}.")

    def identity(self, shape: Shape) -> bool:
        """True if every step is a full pass."""
        del shape
        return self.refresh == 1

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse blocks, and more tokens per step than are computed.

        Raises:
            UserError: the answer has several blocks, or a step commits more masks than are computed.
        """
        sampling.require_one_block("window-diffusion", answer)
        sampling.require_masks("window-diffusion", "active", self.active, answer)

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, or the first masks and what this phase decoded; the window is fixed after the full pass."""
        turn = d.nfe % self.refresh
        if turn == 0:
            return PassPlan()
        if turn == 1:
            d.notes["window"] = self._first(d, self.window) | d.known
            d.notes["fresh"] = d.known & ~d.before  # decoded by the full pass, computed once with their new tokens
            d.notes["phase"] = d.known
        active = self._first(d, self.active) | (d.known & ~d.notes["phase"])
        if turn == 1:
            active |= d.notes["fresh"]
        return PassPlan(compute=active | d.predictors(self._first(d, self.active)), read=d.notes["window"] | active)

    def open(self, d: Denoising) -> Tensor:
        """All masks in a full pass, then the computed ones."""
        full = (d.nfe - 1) % self.refresh == 0  # nfe already counts this pass
        return d.masked if full else self._first(d, self.active)

    @staticmethod
    def _first(d: Denoising, n: int) -> Tensor:
        """The first n masks. [B, N]"""
        return d.masked & (d.masked.cumsum(-1) <= n)
