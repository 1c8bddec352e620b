"""Sampling settings of diffusion models, equal for every policy of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvbench.errors import UserError
from kvbench.runs.spec import DenoisingSpec


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one answer.

    steps: denoising steps for the whole answer, divided evenly among its blocks. Ignored if there is a threshold.
    block: tokens per block; divides the length of the response block.
    remasking: `low-confidence` commits the most probable tokens first, `random` in an order drawn for each block.
    temperature: 0: the most probable token; otherwise Gumbel noise is added to the logits divided by it.
    threshold: commit every token with at least this probability, and always the most probable one; None: commit as
        many tokens per step as the schedule says.
    """

    steps: int
    block: int
    remasking: Literal["low-confidence", "random"] = "low-confidence"
    temperature: float = 0.0
    threshold: float | None = None

    def check(self, answer: int) -> None:
        """Check the settings against the length of an answer.

        Raises:
            UserError: they do not fit; the message has values that do.
        """
        if self.block < 1 or answer % self.block:
            fit = [x for x in range(1, answer + 1) if answer % x == 0]
            raise UserError(
                f"--gen block={self.block} does not divide a response block of {answer} tokens. Use one of {fit}, or "
                f"--gen response_length={math.ceil(answer / max(1, self.block)) * self.block}."
            )
        blocks = answer // self.block
        if self.steps < blocks:
            raise UserError(
                f"--gen steps={self.steps} is less than one step for each of {blocks} blocks of {self.block} tokens. "
                f"Use --gen steps={blocks} or more, or larger blocks."
            )
        if self.threshold is not None and self.remasking == "random":
            raise UserError("--gen threshold needs confidences: use --gen remasking=low-confidence, or leave it out.")

    def require_one_block(self, policy: str, answer: int) -> None:
        """Refuse several blocks (`UserError`), for a policy whose window moves over the whole answer."""
        if self.block < answer:
            raise UserError(f"{policy} uses a moving window instead of blocks: leave --gen block out.")

    def require_masks(self, policy: str, setting: str, computed: int, answer: int) -> None:
        """Refuse steps that commit more tokens (`UserError`) than the policy computes masks in a step.

        setting: of the policy, which has this number.
        """
        most = math.ceil(answer / self.steps)
        if self.threshold is None and computed < most:
            raise UserError(
                f"{policy} computes {computed} masks in a step, but a step commits {most}. Use more --gen steps, or "
                f"--set {setting}={most} or more."
            )

    def halved(self, answer: int) -> Sampling | None:
        """The same settings with half of the steps; None if a threshold decides or too few steps would be left."""
        steps = self.steps // 2
        return None if self.threshold is not None or steps * self.block < answer else replace(self, steps=steps)


def plan_sampling(asked: DenoisingSpec, limit: int) -> tuple[int, Sampling]:
    """Length of the response block and its sampling settings.

    The length is that of the run's settings, or the limit. Steps are at most as many as tokens.

    Raises:
        UserError: a response block that is shorter than the limit or not whole blocks, fewer steps than blocks, or
            settings that exclude each other.
    """
    if asked.threshold is not None and asked.steps is not None:
        raise UserError(
            "--gen steps cannot be combined with threshold, which decides the number of steps. Leave one out."
        )
    length = asked.response_length or limit
    if length < limit:
        raise UserError(
            f"--gen response_length={length} is shorter than an answer, which may have {limit} tokens. Use {limit} or "
            f"more, or add --gen max_new_tokens={length}."
        )
    block = asked.block or length
    steps = asked.steps or max(math.ceil(length / block), math.ceil(length / asked.tokens_per_step))
    sampling = Sampling(
        steps=length if asked.threshold is not None else min(steps, length), block=block, remasking=asked.remasking,
        temperature=asked.temperature, threshold=asked.threshold,
    )
    sampling.check(length)
    return length, sampling
