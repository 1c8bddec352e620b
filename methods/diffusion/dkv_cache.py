"""dKV-Cache: KV entries are reused from one step after their token was decoded, with refreshes (arXiv 2505.15781).

Four variants of one idea, as in the paper: a token's keys and values hardly change after it is decoded. If a model's
head is shifted (Dream), an entry is kept once the next token, which it predicts, is decoded.

Keys are stored rotated. Positions do not change, so this equals rotating them at every step, as the reference does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.diffusion.policy import Denoising, PassPlan, Policy, top
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Shape, Upstream

UPSTREAM = Upstream(repo="horseee/dKV-Cache", commit="49a76fc", license=None)
BATCHES = "the reference requires equal counts in all sequences of a batch; here shorter ones repeat a position"
LAST = (
    "with a shifted head the last position, which predicts nothing, is kept from the first pass on; in the reference "
    "from the second"
)
DREAM = "made for Dream; here it also runs on models without a shifted head"


@dataclass(frozen=True)
class Refreshing(Policy):
    """Base of the variants. refresh: steps between full passes, counted from the start of each block."""

    refresh: Positive = 8

    def identity(self, shape: Shape) -> bool:
        """True if every step is a full pass."""
        del shape
        return self.refresh == 1


@dataclass(frozen=True)
class DkvCacheDecode(Refreshing):
    """Keeps the entries of decoded tokens.

    first: full passes at the start of a block; None: as in the reference, two on LLaDA and one on Dream (shifted head).
    shift: on a shifted head, the entries to keep: `un`: the next token is decoded; `un_right`: the own token is, too.
    """

    first: Positive | None = None
    shift: Literal["un", "un_right"] = "un"

    card: ClassVar[Card] = Card(
        name="dkv-cache-decode", title="dKV-Cache-Decode", models="diffusion",
        idea="Keys and values hardly change once their token is decoded. They are reused from one step after that, and "
             "only masks and newly decoded tokens are recomputed, until a full pass refreshes all.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(BATCHES, LAST),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, or all but those decoded before the last step began."""
        first = (1 if d.masking.shifted else 2) if self.first is None else self.first
        if d.step < first or d.step % self.refresh == 0:
            return PassPlan()
        kept = d.predictors(d.before)
        return PassPlan(compute=~(kept & d.before if self.shift == "un_right" else kept))


@dataclass(frozen=True)
class DkvCacheGreedy(Refreshing):
    """window: masks around each upcoming token that are computed with it."""

    refresh: Positive = 2
    window: Natural = 4

    card: ClassVar[Card] = Card(
        name="dkv-cache-greedy", title="dKV-Cache-Greedy", models="diffusion",
        idea="The order in which tokens are revealed is drawn in advance. A step computes only the tokens revealed "
             "in the last step, the tokens revealed next, and a few masks around them.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM,
        deviations=("made for LLaDA; with a shifted head the positions that predict these tokens are computed",),
        limits=("only with --gen remasking=random: the order must be known before the confidences",),
    )

    def check(self, sampling: Sampling, answer: int) -> None:
        """Require an order that is known in advance.

        Raises:
            UserError: tokens are committed by confidence.
        """
        del answer
        if sampling.remasking != "random":
            raise UserError("dkv-cache-greedy needs to know which tokens come next: add --gen remasking=random.")

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, or those of the last step, those of this step, and masks around them."""
        if d.step % self.refresh == 0:
            return PassPlan()
        coming = top(d.order.masked_fill(~self.open(d), float("-inf")), d.quota)
        chosen = (d.known & ~d.before) | coming
        near = self._near(coming, chosen, ~d.before & (d.positions >= d.prompt))
        return PassPlan(compute=chosen | d.predictors(coming) | near)

    def _near(self, coming: Tensor, taken: Tensor, masks: Tensor) -> Tensor:
        """The nearest free masks of each upcoming token, alternating left and right. [B, N]"""
        near = torch.zeros_like(coming)
        length = coming.shape[1]
        free = [set(x.nonzero().flatten().tolist()) for x in masks & ~taken]
        for sequence, position in coming.nonzero().tolist():
            outwards = (position + x for distance in range(1, length) for x in (-distance, distance))
            for other in islice((x for x in outwards if x in free[sequence]), self.window):
                near[sequence, other] = True
                free[sequence].remove(other)
        return near


@dataclass(frozen=True)
class DkvCachePrefill(Policy):
    """Computes the prompt once and the answer in every step."""

    card: ClassVar[Card] = Card(
        name="dkv-cache-prefill", title="dKV-Cache-Prefill", models="diffusion",
        idea="The prompt's entries are computed once, together with an answer of masks, and never again. The answer is "
             "computed in every step.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(DREAM,),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, then the answer and the position that predicts its first token."""
        return PassPlan() if d.nfe == 0 else PassPlan(compute=answer_and_predictor(d))


@dataclass(frozen=True)
class DkvCachePd(DkvCacheDecode):
    """Combines Prefill and Decode."""

    refresh: Positive = 4

    card: ClassVar[Card] = Card(
        name="dkv-cache-pd", title="dKV-Cache-PD", models="diffusion",
        idea="The prompt's entries are computed once. In the answer, only masks and new tokens are recomputed, "
             "until a pass over the answer refreshes it.",
        arxiv="2505.15781", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(BATCHES, LAST, DREAM),
    )

    def identity(self, shape: Shape) -> bool:
        """False: the prompt is never recomputed."""
        del shape
        return False

    def plan(self, d: Denoising) -> PassPlan:
        """As Decode, without the prompt after the first pass."""
        chosen = super().plan(d).compute
        if d.nfe == 0:
            return PassPlan()
        return PassPlan(compute=answer_and_predictor(d) if chosen is None else chosen & answer_and_predictor(d))


def answer_and_predictor(d: Denoising) -> Tensor:
    """Positions of the answer, and the one that predicts its first token. [B, N]"""
    answer = (d.positions >= d.prompt).expand_as(d.ids)
    return answer | d.predictors(answer)
