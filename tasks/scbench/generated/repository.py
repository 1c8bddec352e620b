"""A function by its description, after SCBench's Code.RepoQA.

The instruction is SCBench's; code and descriptions are generated. As in SCBench, an answer is compared with the
requested functions by RepoQA's measure; a second scorer is the edit similarity to the right function.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbench.task import Example, Scorer, Turn
from kvbench.tasks.scbench.generated.functions import Function, draw_functions
from kvbench.tasks.scbench.generated.generator import Generated, depths, shuffle
from kvbench.tasks.scbench.repositories import CodeRepoQA
from kvbench.tasks.scoring.overlap import edit_similarity
from kvbench.tasks.scoring.repoqa import find_function
from kvbench.tasks.scoring.scbench import REPOQA

LANGUAGE = "python"
QUESTION = "Function description:\n{}\n"
PER_NOUN = 8
"""Most functions about one noun, if all drawn functions are shown."""


def compare(prediction: str, references: Sequence[str]) -> float:
    """Edit similarity of the function in an answer to the reference."""
    return edit_similarity(find_function(prediction, LANGUAGE), references[0])


@dataclass(frozen=True)
class RepoFunction(Generated):
    """Repeat the function that fits a description, among generated functions."""

    name: ClassVar[str] = "repo-function"
    summary: ClassVar[str] = "SCBench Code.RepoQA format: the one of many generated functions that fits a description"
    scorers: ClassVar[tuple[Scorer, ...]] = (REPOQA, Scorer("repo-function-edit@1", "edit_similarity", compare))
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "kvbench[data], a larger model"
    max_new_tokens: ClassVar[int] = 200
    unit_tokens: ClassVar[int] = 40

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "repo-function/parts@1"

    def least(self, turns: int) -> int:
        """Only the functions asked for."""
        return turns

    def compose(self, functions: Sequence[Function], asked: Sequence[int], *, id: str) -> Example:
        """Build the example that shows all functions in this order and asks for those with the indices `asked`."""
        text = "\n\n\n".join(x.source for x in functions)
        reference = [functions[i] for i in asked]
        turns = tuple(
            Turn(QUESTION.format(x.description), "", x.source, (x.source,), self.max_new_tokens, facts={"name": x.name})
            for x in reference
        )
        facts = {
            "keys": [x.name for x in reference], "depths": depths(text, [x.source for x in reference]),
            "lang": LANGUAGE, "functions": {x.name: x.source for x in reference}, "shown": len(functions),
        }
        return Example(id, CodeRepoQA.intro + text, turns, facts)

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is a function."""
        drawn = list(itertools.islice(draw_functions(rng, turns + most // PER_NOUN), most))
        seed = rng.getrandbits(64)
        return lambda n: self.compose(*shuffle(drawn[:n], turns, seed), id=id)
