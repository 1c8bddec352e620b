"""dKV-Cache: rows are kept from one step after their token was decoded, and rebuilt now and then (arXiv 2505.15781).

Four variants of one idea, as in the paper: a token's keys and values settle once it is decoded. Where a model's head is
shifted (Dream), what counts is the row that predicts a token, so a row is kept once the token after it is decoded.

Keys are stored rotated: positions never move, so this is the same as rotating them at every step, which the reference
does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.diffusion.policy import Denoising, PassPlan, Policy, top
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Shape, Upstream

UPSTREAM = Upstream(repo="horseee/dKV-Cache", commit="49a76fc", license=None)
BATCHES = "the reference wants equal counts in all sequences of a batch; here shorter ones repeat a row"
LAST = (
    "with a shifted head the last row, which predicts nothing, is kept from the first pass on; in the reference from "
    "the second"
)
DREAM = "made for Dream; here it runs on models without a shifted head too"


@dataclass(frozen=True)
class Refreshing(Policy):
    """What the variants share. refresh: steps between full passes, counted from each block's start."""

    refresh: int = 8

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.refresh < 1:
            raise UserError(f"{self.card.name}: refresh {self.refresh} must be 1 or more steps.")

    def identity(self, shape: Shape) -> bool:
        """A full pass at every step."""
        del shape
        return self.refresh == 1


@dataclass(frozen=True)
class DkvCacheDecode(Refreshing):
    """What settles once its token is decoded.

    first: full passes that begin a block; None: as the reference, two on LLaDA and one on Dream, whose head is shifted.
    shift: on a shifted head, the rows that are kept: `un` those whose next token is decoded, `un_right` those whose own
        is too.
    """

    first: int | None = None
    shift: Literal["un", "un_right"] = "un"

    card: ClassVar[Card] = Card(
        name="dkv-cache-decode", title="dKV-Cache-Decode", models="diffusion",
        idea="Keys and values settle once their token is decoded. So they are kept from one step after that, and only "
             "masks and fresh tokens are computed again, until a full pass rebuilds all.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(BATCHES, LAST),
    )

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.first is not None and self.first < 1:
            raise UserError(f"{self.card.name}: first {self.first} must be 1 or more full passes.")

    def plan(self, d: Denoising) -> PassPlan:
        """Everything, or all but what was decoded before the last step began."""
        first = (1 if d.masking.shifted else 2) if self.first is None else self.first
        if d.step < first or d.step % self.refresh == 0:
            return PassPlan()
        kept = d.predictors(d.before)
        return PassPlan(compute=~(kept & d.before if self.shift == "un_right" else kept))


@dataclass(frozen=True)
class DkvCacheGreedy(Refreshing):
    """window: masks around every token to come that are computed with it."""

    refresh: int = 2
    window: int = 4

    card: ClassVar[Card] = Card(
        name="dkv-cache-greedy", title="dKV-Cache-Greedy", models="diffusion",
        idea="The order in which tokens are revealed is drawn in advance. So a step computes only the tokens revealed "
             "in the last step, those to come, and a few masks around them.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM,
        deviations=("made for LLaDA; with a shifted head the rows that predict the tokens to come are computed too",),
        limits=("only with --gen remasking=random: the order must be known before the confidences are",),
    )

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.window < 0:
            raise UserError(f"dkv-cache-greedy: window {self.window} must be 0 or more masks.")

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse an order that nobody knows.

        Raises:
            UserError: tokens are committed by confidence.
        """
        del answer
        if sampling.remasking != "random":
            raise UserError("dkv-cache-greedy needs to know which tokens come next: add --gen remasking=random.")

    def plan(self, d: Denoising) -> PassPlan:
        """Everything, or last step's tokens, this step's, and their windows."""
        if d.step % self.refresh == 0:
            return PassPlan()
        coming = top(d.order.masked_fill(~self.open(d), float("-inf")), d.quota)
        rows = (d.known & ~d.before) | coming
        near = self._near(coming, rows, ~d.before & (d.positions >= d.prompt))
        return PassPlan(compute=rows | d.predictors(coming) | near)

    def _near(self, coming: Tensor, taken: Tensor, masks: Tensor) -> Tensor:
        """Of every token to come the nearest masks that are not taken, left and right by turns. [B, N]"""
        near = torch.zeros_like(coming)
        length = coming.shape[1]
        free = [set(x.nonzero().flatten().tolist()) for x in masks & ~taken]
        for sequence, place in coming.nonzero().tolist():
            outwards = (place + x for distance in range(1, length) for x in (-distance, distance))
            for other in islice((x for x in outwards if x in free[sequence]), self.window):
                near[sequence, other] = True
                free[sequence].remove(other)
        return near


@dataclass(frozen=True)
class DkvCachePrefill(Policy):
    """The prompt once, the answer at every step."""

    card: ClassVar[Card] = Card(
        name="dkv-cache-prefill", title="dKV-Cache-Prefill", models="diffusion",
        idea="The prompt's rows are computed once, beside an answer of masks, and never again. The answer's rows are "
             "computed at every step.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(DREAM,),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All, then the answer and the row that predicts its first token."""
        return PassPlan() if d.nfe == 0 else PassPlan(compute=answer_rows(d))


@dataclass(frozen=True)
class DkvCachePd(DkvCacheDecode):
    """Prefill and Decode at once."""

    refresh: int = 4

    card: ClassVar[Card] = Card(
        name="dkv-cache-pd", title="dKV-Cache-PD", models="diffusion",
        idea="The prompt's rows are computed once. Of the answer's, only masks and fresh tokens are computed again "
             "until a pass over the answer rebuilds it.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(BATCHES, LAST, DREAM),
    )

    def identity(self, shape: Shape) -> bool:
        """The prompt is never computed again."""
        del shape
        return False

    def plan(self, d: Denoising) -> PassPlan:
        """As Decode, the prompt left out after the first pass."""
        rows = super().plan(d).compute
        if d.nfe == 0:
            return PassPlan()
        return PassPlan(compute=answer_rows(d) if rows is None else rows & answer_rows(d))


def answer_rows(d: Denoising) -> Tensor:
    """The answer's places, and the row that predicts the first of them. [B, N]"""
    answer = (d.positions >= d.prompt).expand_as(d.ids)
    return answer | d.predictors(answer)
