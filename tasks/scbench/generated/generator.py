"""Base class of the generated tasks: a context of as many units (strings, words, solved examples) as fit the length.

The context is the same in every mode and contains no part of a question, so that a method that compresses the context
first sees nothing of the questions. The first prompt plus max_new_tokens comes within about one unit of the length and
never exceeds it.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvbench.task import Example, Task, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAWS = 16
"""Examples from which a minimum length is determined."""
STRETCH = 40
"""Units between the two measurements for the initial estimate of a length."""
T = TypeVar("T")


@dataclass(frozen=True)
class Generated(Task):
    """Base class; a subclass draws the parts of an example independently of the number of units."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "scbench"
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"
    max_new_tokens: ClassVar[int]
    """Most tokens of an answer."""
    unit_tokens: ClassVar[int]
    """Lower bound on the tokens of a unit, for any tokenizer."""

    @abstractmethod
    def least(self, turns: int) -> int:
        """Fewest units."""

    @abstractmethod
    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; return the example as a function of that number, up to `most`."""

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and answer fill `length`; UserError if it is too short."""
        least = self.least(turns)
        make = self.prepare(rng, id=id, turns=turns, most=max(least, length // self.unit_tokens))
        frame = self.frame(tokenizer)
        n = largest_fit(
            lambda n: count_prompt(self, make(n), tokenizer, frame), length - self.max_new_tokens, least=least,
            line=measure(self, turns, tokenizer), what=f"{self.name} with {turns} turn{'s' if turns > 1 else ''}",
        )
        return make(n)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Most tokens over DRAWS examples with one unit more than the fewest, generation included."""
        least, frame = self.least(turns), self.frame(tokenizer)
        makers = (self.prepare(random.Random(seed), id="", turns=turns, most=least + 1) for seed in range(DRAWS))
        return max(count_prompt(self, make(least + 1), tokenizer, frame) for make in makers) + self.max_new_tokens


@cache
def measure(task: Generated, turns: int, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of prompts as a line over the number of units."""
    least, frame = task.least(turns), task.frame(tokenizer)
    make = task.prepare(random.Random(0), id="", turns=turns, most=least + STRETCH)
    return LengthEstimate.through(lambda n: count_prompt(task, make(n), tokenizer, frame), least, least + STRETCH)


def shuffle(items: Sequence[T], asked: int, seed: int) -> tuple[list[T], list[int]]:
    """The items in random order, and the new indices of the first `asked` of them."""
    order = random.Random(seed).sample(range(len(items)), len(items))
    return [items[i] for i in order], [order.index(i) for i in range(asked)]


def depths(text: str, parts: Sequence[str]) -> list[float]:
    """Relative position of the first occurrence of each part in the text, from 0 to 1."""
    return [round(text.index(part) / len(text), 4) for part in parts]
