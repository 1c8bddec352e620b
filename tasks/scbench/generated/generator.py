"""What the generated tasks share: a context of as many units (strings, words of noise, exemplars) as fit the length.

The context is the same text in every mode and holds no word of a question, so that nothing of a question is seen by a
method that compresses the context first. Tokens of the first prompt and the limit of new tokens come within a unit or
so of the length and never exceed it.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvbench.task import Example, Task, count_prompt
from kvbench.tasks.length import Line, largest_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAWS = 16
"""Examples that a minimum length is found by."""
STRETCH = 40
"""Units over which tokens are measured, where a search for a length starts."""
T = TypeVar("T")


@dataclass(frozen=True)
class Generated(Task):
    """A task says what an example is made of, whatever the number of units will be."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "scbench"
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"
    max_new_tokens: ClassVar[int]
    """New tokens of an answer."""
    unit_tokens: ClassVar[int]
    """No tokenizer needs fewer for a unit."""

    @abstractmethod
    def least(self, turns: int) -> int:
        """Fewest units."""

    @abstractmethod
    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """The example as a function of its units, `most` of them at most; all else is drawn."""

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """One example whose first prompt and limit fill `length`; UserError where it is too short."""
        least = self.least(turns)
        make = self.prepare(rng, id=id, turns=turns, most=max(least, length // self.unit_tokens))
        frame = self.frame(tokenizer)
        n = largest_fit(
            lambda n: count_prompt(self, make(n), tokenizer, frame), length - self.max_new_tokens, least=least,
            line=measure(self, turns, tokenizer), what=f"{self.name} with {turns} turn{'s' if turns > 1 else ''}",
        )
        return make(n)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the longest of many examples with the fewest units and one more, generation included."""
        least, frame = self.least(turns), self.frame(tokenizer)
        makers = (self.prepare(random.Random(seed), id="", turns=turns, most=least + 1) for seed in range(DRAWS))
        return max(count_prompt(self, make(least + 1), tokenizer, frame) for make in makers) + self.max_new_tokens


@cache
def measure(task: Generated, turns: int, tokenizer: PreTrainedTokenizerBase) -> Line:
    """Tokens of the task's prompts by units."""
    least, frame = task.least(turns), task.frame(tokenizer)
    make = task.prepare(random.Random(0), id="", turns=turns, most=least + STRETCH)
    return Line.through(lambda n: count_prompt(task, make(n), tokenizer, frame), least, least + STRETCH)


def shuffle(items: Sequence[T], asked: int, seed: int) -> tuple[list[T], list[int]]:
    """The items in random order, and where the first `asked` of them have come to stand."""
    order = random.Random(seed).sample(range(len(items)), len(items))
    return [items[i] for i in order], [order.index(i) for i in range(asked)]


def depths(text: str, parts: Sequence[str]) -> list[float]:
    """Where each part first stands in the text, from 0 to 1."""
    return [round(text.index(part) / len(text), 4) for part in parts]
