"""Multi-Block Diffusion: later blocks start while earlier ones are unfinished (arXiv 2606.29215)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.diffusion.policy import Denoising, PassPlan, require_single, top
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.methods.diffusion.fast_dllm import COMPLETE, FastDllmPrefix


@dataclass(frozen=True)
class MultiBlock(FastDllmPrefix):
    """blocks: most blocks that are decoded at the same time.

    add: share of the last running block that is decoded when the next one joins. ready: share of a block that is
    decoded when the next one commits a token in every step, whatever its confidence.
    """

    blocks: Positive = 4
    add: Share = 0.1
    ready: Share = 0.95

    card: ClassVar[Card] = Card(
        name="multi-block", title="Multi-Block Diffusion", models="diffusion",
        idea="A running set of consecutive blocks is decoded together, so a pass commits tokens in several blocks. The "
             "entries of a block are kept when it and all blocks before it are complete.",
        arxiv="2606.29215", year=2026, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=Upstream(repo="SJTU-DENG-Lab/mbd-lms", commit="f20911d", license="MIT"),
        deviations=(
            ("the authors' models attend causally across blocks; here every token attends to every token, and a full "
            "pass refreshes all entries whenever the first running block is complete"),
            "without --gen threshold each running block commits tokens by the run's schedule, from the step it joins",
            ("the stability of tokens is no condition for the next block to join, as by default in the authors' engine "
            "(SJTU-DENG-Lab/Diffulex at 184ba97)"),
            "ready is 0.95; that engine has 0.9, and the same blocks and add", COMPLETE,
        ),
        limits=(
            "its authors train models for it; on others, tokens of later blocks are committed with less context",
            "without --gen block the whole answer is one block, and nothing runs ahead", "one sequence at a time",
        ),
    )

    def begin(self, d: Denoising) -> None:
        """Start the first block, or go on with those that run ahead.

        Raises:
            UserError: there are several sequences.
        """
        require_single(d, self.card.name, "blocks join by their own progress")
        if d.start == d.prompt:
            # Steps of each block so far; -1: it has not joined. Only the host reads them.
            d.notes["age"] = torch.full((d.block_count,), -1, dtype=torch.int16)

    def plan(self, d: Denoising) -> PassPlan:
        """Let the next blocks join; all tokens, then those from the first running block on."""
        ages, first = d.notes["age"], self._index(d)
        for block in range(first, min(first + self.blocks, len(ages))):
            if ages[block] < 0 and (block == first or self._progress(d, block - 1) >= self.add):
                ages[block] = 0
        return super().plan(d)

    def open(self, d: Denoising) -> Tensor:
        """The masks of the running blocks. [B, N]"""
        return d.masked & d.within(d.start, d.start + self._running(d) * d.sampling.block)

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """In each running block, as many as the schedule says; with a threshold, the tokens above it.

        The first block commits its most confident token at least, and so does a block after one that is ready.
        """
        accepted = torch.zeros_like(d.masked)
        for block in range(self._index(d), self._index(d) + self._running(d)):
            inside = d.within(*self._bounds(d, block))
            scores = confidence.masked_fill(~inside, float("-inf"))
            if d.sampling.threshold is None:
                accepted |= top(scores, self._due(d, block))
            else:
                forced = block == self._index(d) or self._progress(d, block - 1) >= self.ready
                accepted |= (scores >= d.sampling.threshold) | top(scores, torch.full_like(d.quota, int(forced)))
        return accepted

    def commit(self, d: Denoising, accepted: Tensor) -> None:
        """Count the step of every running block."""
        del accepted
        first = self._index(d)
        d.notes["age"][first : first + self._running(d)] += 1

    def _due(self, d: Denoising, block: int) -> Tensor:
        """Tokens that a block commits in its step by the schedule; a full share until it is complete. [B]"""
        steps = d.steps_of(block)
        age = int(d.notes["age"][block])
        return torch.full_like(d.quota, d.sampling.block // steps + (age < d.sampling.block % steps))

    def _index(self, d: Denoising) -> int:
        """The number of the first running block."""
        return (d.start - d.prompt) // d.sampling.block

    def _running(self, d: Denoising) -> int:
        """How many blocks run: consecutive ones, from the first."""
        return int((d.notes["age"][self._index(d) :] >= 0).sum())

    def _bounds(self, d: Denoising, block: int) -> tuple[int, int]:
        start = d.prompt + block * d.sampling.block
        return start, start + d.sampling.block

    def _progress(self, d: Denoising, block: int) -> float:
        """The share of a block that is decoded."""
        start, end = self._bounds(d, block)
        return (d.sampling.block - int(d.masked[0, start:end].sum())) / d.sampling.block
