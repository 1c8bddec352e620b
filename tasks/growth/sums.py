"""Running sums: a long answer in which every line follows from the previous one.

The context is a numbered list of digits, `17. 4`. The answer has the sum of the digits up to each line, modulo 10, with
the line's number. A wrong line makes all later ones wrong, and no line can be right before the previous one is known.
The task therefore shows errors of a diffusion model that commits tokens too early or uses outdated KV entries.

With several turns, each asks for half of the lines, as in `list-copy`, and sums from the first of them. Lines are
scored as in `list-copy`.
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
    """Write the running sums modulo 10 of a list of digits."""

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
        """The prompt's id."""
        return "growth-sums/mod-10@1"

    def draw_items(self, rng: random.Random, n: int) -> list[str]:
        """Draw `n` digits."""
        return [str(rng.randrange(10)) for _ in range(n)]

    def longest_item(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """An item with the most tokens: any digit."""
        del tokenizer
        return "7"

    def reference(self, items: Sequence[str], first: int, last: int) -> tuple[str, ...]:
        """The running sums from line `first` on."""
        sums = accumulate(map(int, items[first - 1 : last]))
        return tuple(f"{i}. {total % 10}" for i, total in enumerate(sums, first))
