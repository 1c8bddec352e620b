"""A task for the tests over two lengths and three depths, with a score that says where a sample stands."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Split, Task, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CELLS = tuple(product((60, 50), (0, 50.0, 100)))


def score(prediction: str, references: Sequence[str], *, length: int, depth: float) -> float:
    """1 where prompts are short, and the depth where they are long."""
    del prediction, references
    return 1.0 if length == 50 else depth / 100


@dataclass(frozen=True)
class Cells(Task):
    """Letters."""

    name: ClassVar[str] = "cells"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "toys"
    summary: ClassVar[str] = "a grid for tests"
    scorers: ClassVar[tuple[Scorer, ...]] = (Scorer("place@1", "place", score, facts=("length", "depth")),)
    default_length: ClassVar[int] = 60

    @property
    def prompt_id(self) -> str:
        """One wording."""
        return "cells@1"

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Some."""
        del turns, tokenizer
        return 50

    def generate(
        self, index: int, *, seed: int, split: Split, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """The next cell."""
        del split, turns, length, tokenizer
        length, depth = CELLS[index % len(CELLS)]
        text = "".join(random.Random(f"{seed} {index}").choices("abcdefgh ", k=length - 20))
        return Example(f"{index}", text, (Turn("q?", "=", " x", ("x",), 2),), {"length": length, "depth": depth})
