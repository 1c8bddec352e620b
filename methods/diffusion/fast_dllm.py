"""Fast-dLLM: blocks are decoded in order, and the entries outside the current block are reused (arXiv 2505.22618).

Its other half, committing every token above a threshold, is a setting of the run: `--gen threshold=0.9`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.method import BudgetKind, Card, Upstream

UPSTREAM = Upstream(repo="NVlabs/Fast-dLLM", commit="24cc59e", license="Apache-2.0")
SHIFTED = (
    "with a shifted head the position before the block is computed, too; the reference commits the block's first token "
    "from the full pass unconditionally"
)
COMPLETE = "the reference runs one more pass if the first one completes a block"


@dataclass(frozen=True)
class FastDllmPrefix(Policy):
    """Reuses the entries before the block."""

    card: ClassVar[Card] = Card(
        name="fast-dllm-prefix", title="Fast-dLLM, prefix cache", models="diffusion",
        idea="A full pass begins every block. Until the block is complete, the entries before it are reused; the block "
             "and all masks after it are computed.",
        arxiv="2505.22618", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(SHIFTED, COMPLETE),
        limits=("without --gen block the whole answer is one block, and only the prompt is reused",),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, then those from the block on."""
        if d.step == 0:
            return PassPlan()
        chosen = (d.positions >= d.start).expand_as(d.ids)
        return PassPlan(compute=chosen | d.predictors(chosen))


@dataclass(frozen=True)
class FastDllmDual(Policy):
    """Reuses the entries before and after the block."""

    card: ClassVar[Card] = Card(
        name="fast-dllm-dual", title="Fast-dLLM, dual cache", models="diffusion",
        idea="A full pass begins every block. Until the block is complete, only its tokens are computed; the entries "
             "before and after it are reused.",
        arxiv="2505.22618", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(SHIFTED, COMPLETE),
        limits=("without --gen block the whole answer is one block, and it equals fast-dllm-prefix",),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All tokens, then the block."""
        if d.step == 0:
            return PassPlan()
        chosen = d.within(d.start, d.end).expand_as(d.ids)
        return PassPlan(compute=chosen | d.predictors(chosen))
