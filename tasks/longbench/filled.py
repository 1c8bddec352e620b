"""Base class of LongBench and InfiniteBench: a prompt is one template filled with a record, and is cut as a whole.

The published code tokenizes the filled prompt; if it is too long, it keeps the first and the last half of the allowed
tokens, decodes them and puts the text into the chat template. The question belongs to the last half, so the cut must be
made on the filled prompt and not on the context alone. Where decoding changes the text after the context (a normalized
letter, a special token's name), that text stays as it is in the record, and is found by its place.

LongBench's first version decodes the halves one by one, as is done here for all. LongBench v2 and InfiniteBench decode
them together, which differs where the last half begins with a space and the tokenizer (Llama-2) omits it there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Split, Turn, count_prompt
from kvbench.tasks.dataset import DatasetTask
from kvbench.tasks.records import Record
from kvbench.text.template import Frame
from kvbench.text.tokens import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FilledPrompt(DatasetTask):
    """A task with one question per text, and so with a single turn."""

    version: ClassVar[str] = "1"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    default_turns: ClassVar[int] = 1

    def fault(self, record: Record) -> str | None:  # noqa: ARG002  # for overrides
        """Describe what is wrong with a record that has all columns with the right types; None if nothing is."""
        return None

    def record(self, index: int) -> Record:
        """Read and check one record.

        Raises:
            UserError: a column is missing, of another type or empty, or `fault` finds a fault.
        """
        record = super().record(index)
        if fault := self.fault(record):
            raise UserError(f"record {index} of {self.source.name}: {fault}. {self.hint}")
        return record

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples from records; each filled prompt is cut in the middle until it and its generation fit.

        Raises:
            UserError: as in `DatasetTask.examples`, or the cut would reach the question.
        """
        whole = super().examples(
            seed=seed, split=split, n=n, length=sys.maxsize, turns=turns, mode=mode, tokenizer=tokenizer
        )
        for example in whole:
            yield self.cut(example, length, tokenizer)

    def cut(self, example: Example, length: int, tokenizer: PreTrainedTokenizerBase) -> Example:
        """Cut the middle of the prompt until it fits; both remaining halves have the same number of tokens.

        Raises:
            UserError: the last half does not contain all text after the context.
        """
        frame, (turn,) = self.frame(tokenizer), example.turns
        most = length - turn.max_new_tokens
        over = count_prompt(self, example, tokenizer, frame) - most
        if over <= 0:
            return example
        end = f"{example.joint}{turn.question}{turn.prefix}"
        ids = tokenize(tokenizer, example.context + end, special=True)
        half = (len(ids) - over) // 2
        while half > 0:
            first, last = (
                str(tokenizer.decode(list(x), skip_special_tokens=True, clean_up_tokenization_spaces=False))
                for x in (ids[:half], ids[-half:])
            )
            if (first + last).endswith(end):
                context = (first + last).removesuffix(end)
            else:  # the cut reached the question, or decoding changed it
                stop = self._find_end(tokenizer, example, end, len(ids) - half)
                if stop > len(example.context):
                    break
                context = first + example.context[stop:]
            facts = {**example.facts, "cut_tokens": len(ids) - 2 * half}
            kept = replace(example, context=context, facts=facts)
            over = count_prompt(self, kept, tokenizer, frame) - most
            if over <= 0:
                return kept
            half -= (over + 1) // 2
        raise UserError(
            f"{example.id} of {self.name} cannot be cut to {length} tokens: the question must stand whole in the last "
            "half of the prompt. Use a greater --length."
        )

    def _find_end(self, tokenizer: PreTrainedTokenizerBase, example: Example, end: str, tokens: int) -> int:
        """Characters of the prompt that its first tokens cover.

        Raises:
            UserError: the tokenizer cannot tell, and does not give the question back as it is.
        """
        text = example.context + end
        if tokenizer.is_fast:
            return int(tokenizer(text, return_offsets_mapping=True).offset_mapping[tokens - 1][1])
        ids = list(tokenize(tokenizer, text, special=True))
        if str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).endswith(end):
            return len(text)  # the cut reached the question
        raise UserError(
            f"{example.id} of {self.name} cannot be cut: the tokenizer changes its question and has no offsets to find "
            "it by. Use a greater --length, or a model with a fast tokenizer."
        )


def fill(
    template: str, words: Mapping[str, str], *, prefix: str, answer: str, references: tuple[str, ...],
    max_new_tokens: int, frame: Frame, facts: Mapping[str, object],
) -> Example:
    """Fill a template: the text up to and including `{context}` becomes the context, the rest the question.

    words: a text for each name in braces.
    prefix: last words of the template, if they start the answer.
    answer: reference answer; a space is put before it if the preceding text does not end in white space.
    """
    head, _, tail = template.partition("{context}")
    body = tail.lstrip("\n")
    start = prefix.format(**words)
    question = body.format(**words).removesuffix(start)
    last = (question + frame.tail + start)[-1:]
    space = " " if last.isascii() and not last.isspace() else ""
    turn = Turn(question, start, space + answer, references, max_new_tokens)
    return Example("", head.format(**words) + words["context"], (turn,), facts, tail[: len(tail) - len(body)])
