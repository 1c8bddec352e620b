"""Running sums: a long answer in which every line follows from the one before.

The context is a numbered list of digits, `17. 4`. The answer has the sum of the digits up to each line, modulo 10, each
with its number. A line that is wrong makes all that follow wrong, and none can be right before its predecessor is
known: what a diffusion model writes too early, or from rows that are out of date, shows.

With several turns each asks for half of the lines and sums from the first of them, as `list-copy` does. Lines are
scored as there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from kvbench.tasks.growth.lists import NumberedList

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunningSums(NumberedList):
    """Digits in, running sums modulo 10 out."""

    name: ClassVar[str] = "running-sums"
    summary: ClassVar[str] = "a numbered list of digits, to be written with the running sum modulo 10 on each line"
    default_length: ClassVar[int] = 512
    tokens_per_step: ClassVar[int] = 1
    needs: ClassVar[str | None] = "a larger model"
    intro: ClassVar[str] = "Below is a numbered list of digits. You will be asked for their running sum.\n\n"
    whole: ClassVar[str] = "Write the last digit of the running sum of the list, line by line:\n"
    part: ClassVar[str] = "Write the last digit of the running sum of lines {first} to {last}, line by line:\n"
    step: ClassVar[int] = 1

    @property
    def prompt_id(self) -> str:
        """The wording."""
        return "growth-sums/mod-10@1"

    def draw_items(self, rng: random.Random, n: int) -> list[str]:
        """`n` digits."""
        return [str(rng.randrange(10)) for _ in range(n)]

    def longest_item(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Any digit."""
        del tokenizer
        return "7"

    def reference(self, items: Sequence[str], first: int, last: int) -> tuple[str, ...]:
        """The sums, from the first line asked for."""
        sums = accumulate(map(int, items[first - 1 : last]))
        return tuple(f"{i}. {total % 10}" for i, total in enumerate(sums, first))
