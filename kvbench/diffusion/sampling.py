"""How a diffusion model's answers are made: settings of the run, the same for every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvbench.errors import UserError
from kvbench.runs.spec import DenoisingSpec


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are made.

    steps: forward passes for the whole answer, shared evenly by its blocks. Without a meaning beside a threshold.
    block: tokens of a block; the answer's length is a multiple.
    remasking: `low-confidence` commits the surest tokens first, `random` in an order drawn for each block.
    temperature: 0: the most likely token; else Gumbel noise on the logits over it.
    threshold: commit every token whose probability reaches it (and always the surest one), however many; None: as many
        as the schedule says.
    """

    steps: int
    block: int
    remasking: Literal["low-confidence", "random"] = "low-confidence"
    temperature: float = 0.0
    threshold: float | None = None

    def check(self, answer: int) -> None:
        """Refuse what does not fit an answer of this length.

        Raises:
            UserError: with what does.
        """
        if self.block < 1 or answer % self.block:
            fit = [x for x in range(1, answer + 1) if answer % x == 0]
            raise UserError(f"--gen block={self.block} does not divide an answer of {answer} tokens. Use one of {fit}.")
        blocks = answer // self.block
        if self.steps < blocks:
            raise UserError(
                f"--gen steps={self.steps} is less than one for each of {blocks} blocks of {self.block} tokens. Use "
                f"--gen steps={blocks} or more, or larger blocks."
            )
        if self.threshold is not None and self.remasking == "random":
            raise UserError("--gen threshold needs confidences: use --gen remasking=low-confidence, or leave it out.")

    def halved(self, answer: int) -> Sampling | None:
        """The same with half of the passes; None where steps do not decide, or there would be too few."""
        steps = self.steps // 2
        return None if self.threshold is not None or steps * self.block < answer else replace(self, steps=steps)


def plan_sampling(asked: DenoisingSpec, limit: int) -> tuple[int, Sampling]:
    """Tokens of an answer's canvas, its limit rounded up to whole blocks, and how it is filled.

    A block longer than the answer is the whole answer, and more steps than tokens are one for each token.

    Raises:
        UserError: fewer steps than blocks, or settings that exclude each other.
    """
    if asked.threshold is not None and asked.steps is not None:
        raise UserError("--gen steps has no meaning beside threshold, which alone decides how many passes there are.")
    block = min(asked.block or limit, limit)
    blocks = math.ceil(limit / block)
    canvas = blocks * block
    steps = asked.steps or max(blocks, math.ceil(canvas / asked.tokens_per_step))
    sampling = Sampling(
        steps=canvas if asked.threshold is not None else min(steps, canvas), block=block, remasking=asked.remasking,
        temperature=asked.temperature, threshold=asked.threshold,
    )
    sampling.check(canvas)
    return canvas, sampling
