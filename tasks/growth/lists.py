"""Copying a list: long answers, so that a budget matters at every decode step.

The context is a numbered list, `17. brave-otter 482`. `list-copy` asks for its lines in order, `list-reverse` for the
lines from the last to the first. With one turn the answer is the whole list, nearly half of all tokens. With several
turns, each asks for half of the list (rounded up); the halves begin at evenly spaced lines, so that together they cover
all lines, and are asked in random order.

The length includes the first prompt and max_new_tokens, which is the reference answer's tokens plus SLACK. The list has
as many lines as fit.

A predicted line is compared with the reference line that has its number; of several predicted lines with one number,
the first counts. A line is right if it equals the reference line up to white space and follows the previous predicted
line also in the reference's order, so that a forward copy is not a reversed list. `lines` is the share of reference
lines that are right; `lines_q1` to `lines_q4` are the same score over the quarters of the reference answer: the error
as a function of output position.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn, count_prompt
from kvbench.tasks.growth.quarters import QUARTERS, score_quarters
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.words import draw_keys, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Below is a numbered list. You will be asked to write it down again.\n\n"
SLACK = 8
"""New tokens beyond the reference answer's: for the end of text, and to detect that a model does not stop."""
SHORT = 6
"""Most letters in each word of an item."""
MIN_LINE_TOKENS = 5
"""Lower bound on the tokens of a number, two words, another number and a line break, for any tokenizer."""


def right_lines(prediction: str, references: Sequence[str]) -> list[bool]:
    """For each reference line, whether the prediction has it."""
    reference = [" ".join(line.split()) for line in references]
    places = {line.partition(".")[0]: i for i, line in enumerate(reference)}
    right = [False] * len(reference)
    seen: set[int] = set()
    before = -1
    for line in prediction.split("\n"):
        text = " ".join(line.split())
        number = re.match(r"[0-9]+", text)
        place = places.get(number[0]) if number else None
        if place is None or place in seen:
            continue
        right[place] = text == reference[place] and place > before
        seen.add(place)
        before = place
    return right


def halves(n: int, order: Sequence[int]) -> list[tuple[int, int]]:
    """First and last line that each turn asks for: the whole list in a single turn, otherwise halves in this order."""
    if len(order) == 1:
        return [(1, n)]
    size = (n + 1) // 2
    starts = [(n - size) * i // (len(order) - 1) for i in order]
    return [(start + 1, start + size) for start in starts]


@dataclass(frozen=True)
class NumberedList(Task):
    """Base class of the variants, which differ in the order of lines."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "growth"
    scorers: ClassVar[tuple[Scorer, ...]] = score_quarters("growth-lines", "lines", right_lines)
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"
    intro: ClassVar[str] = INTRO
    whole: ClassVar[str]
    """The question for the whole list, up to the start of the answer."""
    part: ClassVar[str]
    """The question for the lines from {first} to {last}."""
    step: ClassVar[int]
    """1: forwards, -1: backwards."""

    def draw_items(self, rng: random.Random, n: int) -> list[str]:
        """Draw `n` items with distinct words and numbers from 100 to 999."""
        return [f"{key} {rng.randrange(100, 1000)}" for key in draw_keys(rng, n, SHORT)]

    def reference(self, items: Sequence[str], first: int, last: int) -> tuple[str, ...]:
        """The lines of the answer for the items from `first` to `last`, counted from 1."""
        return tuple(f"{i}. {items[i - 1]}" for i in range(first, last + 1))[:: self.step]

    def compose(
        self,
        items: Sequence[str],
        ranges: Sequence[tuple[int, int]],
        *,
        id: str,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Example:
        """Build the example that lists all items and asks for these ranges of lines (first and last, from 1)."""
        lines = [f"{i}. {item}" for i, item in enumerate(items, 1)]
        turns = []
        for first, last in ranges:
            wording = self.whole if (first, last) == (1, len(lines)) else self.part
            reference = self.reference(items, first, last)
            answer = "\n".join(reference)
            most = len(tokenizer(answer, add_special_tokens=False).input_ids) + SLACK
            turns.append(Turn(wording.format(first=first, last=last), "", answer, reference, most))
        facts = {"lines": len(lines), "ranges": [list(pair) for pair in ranges]}
        return Example(id, self.intro + "\n".join(lines), tuple(turns), facts)

    def count(self, items: Sequence[str], order: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt plus its max_new_tokens, for a list of all items and halves in this order."""
        example = self.compose(items, halves(len(items), order)[:1], id="", tokenizer=tokenizer)
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + example.turns[0].max_new_tokens

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and max_new_tokens fill `length`; UserError if it is too short."""
        order = rng.sample(range(turns), turns)
        least = fewest(turns)
        items = self.draw_items(rng, max(least, length // MIN_LINE_TOKENS))
        n = largest_fit(
            lambda n: self.count(items[:n], order, tokenizer),
            length,
            least=least,
            line=measure(self, turns, tokenizer),
            what=f"{self.name} with {turns} turn{'s' if turns > 1 else ''}",
        )
        return self.compose(items[:n], halves(n, order), id=id, tokenizer=tokenizer)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the fewest lines, all with the longest words, generation included."""
        return self.count([self.longest_item(tokenizer)] * fewest(turns), range(turns)[::-1], tokenizer)

    def longest_item(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """An item with the most tokens."""
        return f"{longest('adjective', ' ', tokenizer)}-{longest('noun', '-', tokenizer)} 777"


def fewest(turns: int) -> int:
    """Fewest lines such that every quarter of an answer has a line, and no two halves are equal."""
    return QUARTERS if turns == 1 else 2 * max(QUARTERS, turns - 1)


@cache
def longest(kind: str, before: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The word of a kind with the most tokens after the character `before`."""
    choices = words(kind, SHORT)
    sizes = [len(ids) for ids in tokenizer([before + word for word in choices], add_special_tokens=False).input_ids]
    return choices[sizes.index(max(sizes))]


@cache
def measure(task: NumberedList, turns: int, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of first prompts and answers as a line over the number of lines."""
    least = fewest(turns)
    items = task.draw_items(random.Random(0), least + 40)
    return LengthEstimate.through(lambda n: task.count(items[:n], range(turns), tokenizer), least, len(items))


@dataclass(frozen=True)
class ListCopy(NumberedList):
    """Copy the lines in order."""

    name: ClassVar[str] = "list-copy"
    summary: ClassVar[str] = "a numbered list, to be copied"
    whole: ClassVar[str] = "Copy the list as it is, each line with its number:\n"
    part: ClassVar[str] = "Copy lines {first} to {last} of the list as they are, each line with its number:\n"
    step: ClassVar[int] = 1

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "growth-list/copy@1"


@dataclass(frozen=True)
class ListReverse(NumberedList):
    """Write the lines from the last to the first."""

    name: ClassVar[str] = "list-reverse"
    summary: ClassVar[str] = "a numbered list, to be written from its last line to its first"
    whole: ClassVar[str] = "Write the list from its last line to its first, each line with its number:\n"
    part: ClassVar[str] = (
        "Write lines {first} to {last} of the list from the last of them to the first, each line with its number:\n"
    )
    step: ClassVar[int] = -1

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "growth-list/reverse@1"
