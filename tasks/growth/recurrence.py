"""Recurrences: a long answer that needs its own earlier tokens, which are not in the prompt.

The context has the first `lag` digits of a sequence per turn, `A: 4 0 7 ...`. A term is the last digit of the sum of
the term before it and the term `lag` places before it. Each turn asks for the terms of one sequence from number
`lag + 1` on, one per line with its number. After `lag` lines everything that a line needs is in the answer, as in a
chain of reasoning: what a method drops of its own output is lost.

The length includes the first prompt and max_new_tokens, which is the reference answer's tokens plus SLACK. Answers have
as many lines as fit, and are scored as in `list-copy`. As with `running-sums`, a wrong line makes later ones wrong; the
agreement with the full cache, which follows the reference answer, shows errors without their consequences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvbench.constraints import Ge, Le
from kvbench.errors import UserError
from kvbench.task import Example, Scorer, Task, Turn, count_prompt
from kvbench.tasks.growth.lists import SLACK, right_lines
from kvbench.tasks.growth.quarters import QUARTERS, score_quarters
from kvbench.tasks.length import LengthEstimate, largest_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Below are the first {lag} terms of sequences of digits. You will be asked to continue them.\n\n"
QUESTION = (
    "Each further term is the last digit of the sum of the term before it and the term {lag} places before it. Write "
    "terms {first} to {last} of sequence {name}, each with its number:\n"
)


def continue_terms(start: Sequence[int], lines: int) -> list[int]:
    """The next terms of the sequence that starts with `lag` terms."""
    terms = list(start)
    for _ in range(lines):
        terms.append((terms[-1] + terms[-len(start)]) % 10)
    return terms[len(start) :]


@dataclass(frozen=True)
class Recurrence(Task):
    """Continue sequences of digits by a rule that looks back."""

    lag: Annotated[int, Ge(2), Le(64)] = 8
    """Terms that a term looks back, and terms in the context."""

    name: ClassVar[str] = "recurrence"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "growth"
    summary: ClassVar[str] = "digits to be continued, each from two earlier lines of the answer"
    scorers: ClassVar[tuple[Scorer, ...]] = score_quarters("growth-lines", "lines", right_lines)
    default_length: ClassVar[int] = 512
    default_turns: ClassVar[int] = 1
    tokens_per_step: ClassVar[int] = 1
    needs: ClassVar[str | None] = "a larger model"
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "growth-recurrence@1"

    def check_turns(self, turns: int) -> None:
        """Refuse more turns than there are letters (`UserError`)."""
        if turns > len(ascii_uppercase):
            raise UserError(
                f"{self.name} names its sequences by letters, which are fewer than {turns} turns. Use --turns "
                f"{len(ascii_uppercase)} or less."
            )

    def compose(
        self, starts: Sequence[Sequence[int]], lines: int, *, id: str, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Build the example that asks for this many lines of every sequence."""
        turns = []
        for name, start in zip(ascii_uppercase, starts, strict=False):
            reference = tuple(f"{i}. {x}" for i, x in enumerate(continue_terms(start, lines), self.lag + 1))
            answer = "\n".join(reference)
            question = QUESTION.format(lag=self.lag, first=self.lag + 1, last=self.lag + lines, name=name)
            most = len(tokenizer(answer, add_special_tokens=False).input_ids) + SLACK
            turns.append(Turn(question, "", answer, reference, most))
        listed = zip(ascii_uppercase, starts, strict=False)
        text = INTRO.format(lag=self.lag) + "\n".join(f"{name}: {' '.join(map(str, start))}" for name, start in listed)
        return Example(id, text, tuple(turns), {"lines": lines})

    def count(self, starts: Sequence[Sequence[int]], lines: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt plus its max_new_tokens."""
        example = self.compose(starts, lines, id="", tokenizer=tokenizer)
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + example.turns[0].max_new_tokens

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and max_new_tokens fill `length`; UserError if it is too short."""
        starts = [[rng.randrange(10) for _ in range(self.lag)] for _ in range(turns)]
        lines = largest_fit(
            lambda n: self.count(starts, n, tokenizer), length, least=QUARTERS, line=measure(self, turns, tokenizer),
            what=f"{self.name} with {turns} turn{'s' if turns > 1 else ''}",
        )
        return self.compose(starts, lines, id=id, tokenizer=tokenizer)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of sequences with one line per quarter, generation included; one more line is a margin."""
        return self.count([[7] * self.lag] * turns, QUARTERS + 1, tokenizer)


@cache
def measure(task: Recurrence, turns: int, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of first prompts and answers as a line over the number of lines."""
    starts = [[7] * task.lag] * turns
    return LengthEstimate.through(lambda n: task.count(starts, n, tokenizer), QUARTERS, 40)
