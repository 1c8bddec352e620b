"""Fast-dLLM: what lies outside a block hardly changes while it is decoded, so its rows are reused (arXiv 2505.22618).

Its other half, committing every token above a probability, is a setting of the run: `--gen threshold=0.9`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.method import BudgetKind, Card, Upstream

UPSTREAM = Upstream(repo="NVlabs/Fast-dLLM", commit="24cc59e", license="Apache-2.0")
SHIFTED = (
    "with a shifted head the row before the block is computed too, where the reference commits the block's first token "
    "from the full pass unconditionally"
)
COMPLETE = "the reference runs one more pass where the first one completed a block"


@dataclass(frozen=True)
class FastDllmPrefix(Policy):
    """The rows before the block."""

    card: ClassVar[Card] = Card(
        name="fast-dllm-prefix", title="Fast-dLLM, prefix cache", models="diffusion",
        idea="A full pass begins every block. Until it is done, the rows before it are read as they were; the block "
             "and all masks behind it are computed.",
        arxiv="2505.22618", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(SHIFTED, COMPLETE),
        limits=("without --gen block the whole answer is one block, and only the prompt is reused",),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All, then from the block on."""
        if d.step == 0:
            return PassPlan()
        rows = (d.positions >= d.start).expand_as(d.ids)
        return PassPlan(compute=rows | d.predictors(rows))


@dataclass(frozen=True)
class FastDllmDual(Policy):
    """The rows before and behind the block."""

    card: ClassVar[Card] = Card(
        name="fast-dllm-dual", title="Fast-dLLM, dual cache", models="diffusion",
        idea="A full pass begins every block. Until it is done, only its own rows are computed; those before and "
             "behind it are read as they were.",
        arxiv="2505.22618", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=UPSTREAM, deviations=(SHIFTED, COMPLETE),
        limits=("without --gen block the whole answer is one block: then it is fast-dllm-prefix",),
    )

    def plan(self, d: Denoising) -> PassPlan:
        """All, then the block."""
        if d.step == 0:
            return PassPlan()
        rows = d.within(d.start, d.end).expand_as(d.ids)
        return PassPlan(compute=rows | d.predictors(rows))
