"""What LongBench and InfiniteBench have in common: a prompt is one template filled with a row, cut as a whole.

The published code tokenizes the filled prompt, keeps its first and last half where it is too long, and puts what it
decodes into the chat template. Half of the room is thus the end's, question included, which is why the cut is made here
and not on the context alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Frame, Mode, Split, Turn, count_prompt
from kvbench.tasks.dataset import DatasetTask
from kvbench.tasks.rows import Row
from kvbench.tokens import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FilledPrompt(DatasetTask):
    """One question about one text: there is nothing to ask in a second turn."""

    version: ClassVar[str] = "1"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    default_turns: ClassVar[int] = 1

    def fault(self, row: Row) -> str | None:  # noqa: ARG002  # every data set looks
        """What is wrong with a row whose columns are there and of their types."""
        return None

    def row(self, index: int) -> Row:
        """One row, checked.

        Raises:
            UserError: a column is missing, of another type or empty, or the row has a fault of its own.
        """
        row = super().row(index)
        if fault := self.fault(row):
            raise UserError(f"row {index} of {self.source.name}: {fault}. {self.hint}")
        return row

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """The rows as examples, each filled prompt cut in the middle so that it and its generation fit.

        Raises:
            UserError: as for every data set, and where the cut would reach the question.
        """
        whole = super().examples(
            seed=seed, split=split, n=n, length=sys.maxsize, turns=turns, mode=mode, tokenizer=tokenizer
        )
        for example in whole:
            yield self.cut(example, length, tokenizer)

    def cut(self, example: Example, length: int, tokenizer: PreTrainedTokenizerBase) -> Example:
        """The example without as much of its prompt's middle as is too long; both halves have the same tokens.

        Raises:
            UserError: the last half does not hold what follows the context.
        """
        frame, (turn,) = self.frame(tokenizer), example.turns
        most = length - turn.limit
        over = count_prompt(self, example, tokenizer, frame) - most
        if over <= 0:
            return example
        end = f"{example.joint}{turn.question}{turn.prefix}"
        ids = tokenize(tokenizer, example.context + end, special=True)
        half = (len(ids) - over) // 2
        while half > 0:
            text = "".join(
                str(tokenizer.decode(list(x), skip_special_tokens=True, clean_up_tokenization_spaces=False))
                for x in (ids[:half], ids[-half:])
            )
            if not text.endswith(end):
                break
            facts = {**example.facts, "cut_tokens": len(ids) - 2 * half}
            kept = replace(example, context=text.removesuffix(end), facts=facts)
            over = count_prompt(self, kept, tokenizer, frame) - most
            if over <= 0:
                return kept
            half -= (over + 1) // 2
        raise UserError(
            f"{example.id} of {self.name} cannot be cut to {length} tokens: the question must stand whole in the last "
            "half of the prompt. Ask for a greater --length."
        )


def fill(
    template: str, words: Mapping[str, str], *, prefix: str, answer: str, references: tuple[str, ...], limit: int,
    frame: Frame, facts: Mapping[str, object],
) -> Example:
    """The example of a template: up to `{context}` and its text is the context, what follows is the question.

    words: a text for each name in braces.
    prefix: the template's last words, where they start the answer.
    answer: the reference one, put after a space where the text before it does not end in one.
    """
    head, _, tail = template.partition("{context}")
    body = tail.lstrip("\n")
    start = prefix.format(**words)
    question = body.format(**words).removesuffix(start)
    last = (question + frame.tail + start)[-1:]
    space = " " if last.isascii() and not last.isspace() else ""
    turn = Turn(question, start, space + answer, references, limit)
    return Example("", head.format(**words) + words["context"], (turn,), facts, tail[: len(tail) - len(body)])
