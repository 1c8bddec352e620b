"""The number with a given rank in a long list, after SCBench's Math.Find.

SCBench's numbers have three digits, so that in a long list most numbers occur many times, the second largest may equal
the largest, and the median is nearly the same in all lists. Here numbers have seven digits and are distinct, their
count is odd, so that the median is one of them, and the range is drawn for each sample. SCBench puts a short form of
the question before the list, which would show a method the first question. Here it precedes the question in every mode,
as in SCBench's follow-ups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Scorer, Turn
from kvbench.tasks.scbench.generated.generator import Generated
from kvbench.tasks.scoring.scbench import SCORERS

QUESTION = (
    "What is the {target} of the list?\n\n"
    "You should answer with only one number, no other words. The {target} of the list is: "
)
TARGETS = (
    "largest number", "second largest number", "third largest number", "smallest number", "second smallest number",
    "third smallest number", "median",
)
LOWEST, HIGHEST = range(1_000_000, 2_800_000), range(8_200_000, 10_000_000)
"""Ranges of the smallest and the largest number of a list, each a fifth of all numbers."""


def find(target: str, numbers: Sequence[int]) -> int:
    """The number that a target describes."""
    ranks = dict(zip(TARGETS, (-1, -2, -3, 0, 1, 2, len(numbers) // 2), strict=True))
    return sorted(numbers)[ranks[target]]


@dataclass(frozen=True)
class GeneratedMathFind(Generated):
    """Find numbers by their rank."""

    name: ClassVar[str] = "math-find"
    summary: ClassVar[str] = "SCBench Math.Find format: the largest, smallest or median number of a list, and the like"
    scorers: ClassVar[tuple[Scorer, ...]] = SCORERS["scbench_mf"]
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = 12
    """SCBench has 5, for three digits."""
    unit_tokens: ClassVar[int] = 4

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the kind of numbers."""
        return "math-find/seven-digits@1"

    def least(self, turns: int) -> int:
        """Three units, which are seven numbers, so that no two targets are the same number."""
        del turns
        return 3

    def compose(self, numbers: Sequence[int], targets: Sequence[str], *, id: str) -> Example:
        """Build the example that lists these numbers and asks for these targets in turn."""
        reference = [find(target, numbers) for target in targets]
        turns = tuple(
            Turn(QUESTION.format(target=target), "", str(number), (str(number),), self.max_new_tokens)
            for target, number in zip(targets, reference, strict=True)
        )
        facts = {
            "targets": list(targets), "depths": [round(numbers.index(x) / len(numbers), 4) for x in reference],
            "numbers": len(numbers),
        }
        return Example(id, str(list(numbers)), turns, facts)

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is two numbers, plus one number in total."""
        if turns > len(TARGETS):
            raise UserError(f"{self.name} has {len(TARGETS)} questions for a list, not {turns}. Use fewer --turns.")
        drawn = rng.sample(range(rng.choice(LOWEST), rng.choice(HIGHEST)), 2 * most + 1)
        targets = rng.sample(TARGETS, turns)
        return lambda n: self.compose(drawn[: 2 * n + 1], targets, id=id)
