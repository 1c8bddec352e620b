"""InfiniteBench's twelve tasks, with its prompts for yarn-mistral, an open model without a chat template.

Without a chat template, a prompt equals the official one byte for byte. With one, the words that start the answer
(`The pass key is`) follow the assistant header, as in kvpress. The filled prompt is cut in the middle, as in the
official code, which allows 131,072 tokens without generation. The default length is the same number including
generation, because models of 128k positions have no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.task import Example, Mode
from kvbench.tasks.infinitebench.prompts import MAX_NEW_TOKENS, PREFIXES, PROMPTS
from kvbench.tasks.longbench.filled import FilledPrompt, fill
from kvbench.tasks.longbench.hub import open_file
from kvbench.tasks.records import Record, Source
from kvbench.tasks.scoring.infinitebench import SCORERS
from kvbench.text.template import Frame

LETTERS = "ABCD"
CHOICES = frozenset({"longbook_choice_eng", "code_debug"})
NUMBERS = frozenset({"math_find", "math_calc", "code_run"})
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
WHOLE = re.compile(r"-?[0-9]+")
CALL = re.compile(r"func_[0-9]+\(-?[0-9]+\)")
TARGET = re.compile("The .+ of")
"""Greedy, as in the official code: up to the last `of` of the line."""


@dataclass(frozen=True)
class InfiniteBench(FilledPrompt):
    """Base class; a subclass's name is `infinitebench_` plus its data file's name, which selects everything else."""

    suite: ClassVar[str] = "infinitebench"
    default_length: ClassVar[int] = 131_072
    hub: ClassVar[str] = "xinrongzhang2022/InfiniteBench"
    revision: ClassVar[str] = "90f0394333616266d9fe85824ceaf505093cbaa5"
    columns: ClassVar = {"context": str, "input": str, "answer": (str, int, float, list)}
    kind: ClassVar[str]
    """The task by its name in InfiniteBench."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.config = cls.kind = cls.name.removeprefix("infinitebench_")
        cls.scorers = SCORERS[cls.kind]

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the model that the official prompt was written for."""
        return f"infinitebench/yarn-mistral/{self.kind}@1"

    @property
    def source(self) -> Source:
        """The records of the local copy, or of the file on the hub."""
        return super().source if self.data else open_file(self.hub, self.revision, f"{self.config}.jsonl")

    def fault(self, record: Record) -> str | None:
        """Report a record whose question cannot be asked or whose answer cannot be scored."""
        answers, asked = find_answers(record), record["input"]
        if not answers or not all(answers):
            return "answer must hold a text or number, or several"
        if self.kind in CHOICES:
            options = record.get("options")
            if not isinstance(options, list) or len(options) != 4 or not all(isinstance(x, str) for x in options):
                return "options must be four texts"
            if find_letter(answers, options) is None:
                return f"the answer '{answers[0]}' is none of the options"
        if self.kind in NUMBERS and not all(NUMBER.fullmatch(x) for x in answers):
            return "answer must be numbers"
        if self.kind == "code_run" and not WHOLE.fullmatch(answers[0]):
            return f"answer is {answers[0]}, and a function returns a whole number"
        if self.kind == "code_run" and not CALL.search(asked):
            return "input calls no function such as func_1(2)"
        if self.kind == "math_find" and not TARGET.search(asked):
            return "input names no number, as in `The largest number of`"
        return None

    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:  # noqa: ARG002  # one turn
        """Fill the prompt; the facts of a multiple-choice question are its options and the right letter."""
        answers, facts = find_answers(record), dict[str, object]()
        reference = answers[0]
        if self.kind in CHOICES:
            letter = find_letter(answers, record["options"])
            assert letter is not None, "`fault` refuses records without a letter"
            reference, answers, facts = letter, answers[:1], {"letter": letter, "options": record["options"]}
        elif self.kind == "math_calc":
            reference = f"[{', '.join(answers)}]"
        return fill(
            PROMPTS[self.kind], self.find_words(record), prefix=PREFIXES[self.kind], answer=reference,
            references=answers, max_new_tokens=MAX_NEW_TOKENS[self.kind], frame=frame, facts=facts,
        )

    def find_words(self, record: Record) -> Mapping[str, str]:
        """A text for each name in braces in the task's templates."""
        asked = record["input"]
        words = {"context": record["context"], "input": asked, "question": asked}
        if self.kind in CHOICES:
            words |= {f"OPTION_{letter}": option for letter, option in zip(LETTERS, record["options"], strict=True)}
        elif self.kind == "kv_retrieval":
            words["last_line"] = asked.rpartition("\n")[2]
        elif self.kind == "code_run":
            words["func_call"] = call = CALL.findall(asked)[0]
            words["func"] = call.partition("(")[0]
        elif self.kind == "math_find":
            words["prefix"] = f"What is {TARGET.findall(asked)[0].lower().removesuffix(' of')} in the following list?"
        return words


def find_answers(record: Record) -> tuple[str, ...]:
    """The answers of a record as texts; an answer that is neither text nor number becomes an empty text.

    The hub's file of math_calc has its answers as a list in a list.
    """
    answer = record["answer"]
    several = answer if isinstance(answer, list) else [answer]
    if len(several) == 1 and isinstance(several[0], list):
        several = several[0]
    return tuple(str(x) if isinstance(x, (str, int, float)) else "" for x in several)


def find_letter(answers: tuple[str, ...], options: Sequence[str]) -> str | None:
    """The letter of the right option: the second of two answers, or found by the option's text."""
    if len(answers) == 2:
        return answers[1] if answers[1] in tuple(LETTERS) else None
    return LETTERS[options.index(answers[0])] if len(answers) == 1 and answers[0] in options else None


class Passkey(InfiniteBench):
    """A number that is said twice in repeated sentences."""

    name: ClassVar[str] = "infinitebench_passkey"
    summary: ClassVar[str] = "InfiniteBench: a key of five digits among repeated sentences"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class NumberString(InfiniteBench):
    """Ten digits, some of them doubled."""

    name: ClassVar[str] = "infinitebench_number_string"
    summary: ClassVar[str] = "InfiniteBench: a string of ten digits among repeated sentences"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class KvRetrieval(InfiniteBench):
    """Pairs of UUIDs."""

    name: ClassVar[str] = "infinitebench_kv_retrieval"
    summary: ClassVar[str] = "InfiniteBench: the value of a key in a JSON object of UUIDs"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class LongbookSumEng(InfiniteBench):
    """A novel with other names."""

    name: ClassVar[str] = "infinitebench_longbook_sum_eng"
    summary: ClassVar[str] = "InfiniteBench: a summary of a novel"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class LongbookChoiceEng(InfiniteBench):
    """A novel with other names and four choices."""

    name: ClassVar[str] = "infinitebench_longbook_choice_eng"
    summary: ClassVar[str] = "InfiniteBench: multiple choice about a novel"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class LongbookQaEng(InfiniteBench):
    """A novel with other names and a question."""

    name: ClassVar[str] = "infinitebench_longbook_qa_eng"
    summary: ClassVar[str] = "InfiniteBench: questions about a novel"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class LongbookQaChn(InfiniteBench):
    """A Chinese book and a question."""

    name: ClassVar[str] = "infinitebench_longbook_qa_chn"
    summary: ClassVar[str] = "InfiniteBench: questions about a Chinese book"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class LongdialogueQaEng(InfiniteBench):
    """A film script that lacks one name."""

    name: ClassVar[str] = "infinitebench_longdialogue_qa_eng"
    summary: ClassVar[str] = "InfiniteBench: the masked name in a film script"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class InfiniteMathFind(InfiniteBench):
    """A list of numbers."""

    name: ClassVar[str] = "infinitebench_math_find"
    summary: ClassVar[str] = "InfiniteBench: the largest, smallest or median number of a list"
    leak: ClassVar[str | None] = "the number that is asked for"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class MathCalc(InfiniteBench):
    """A sum of thousands of numbers."""

    name: ClassVar[str] = "infinitebench_math_calc"
    summary: ClassVar[str] = "InfiniteBench: all intermediate values of a long sum"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class CodeRun(InfiniteBench):
    """Functions that call each other."""

    name: ClassVar[str] = "infinitebench_code_run"
    summary: ClassVar[str] = "InfiniteBench: what a chain of small functions returns"
    leak: ClassVar[str | None] = "the function that is asked for"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"


class CodeDebug(InfiniteBench):
    """A package with one broken function."""

    name: ClassVar[str] = "infinitebench_code_debug"
    summary: ClassVar[str] = "InfiniteBench: the function of a package that holds an error"
    needs: ClassVar[str | None] = "InfiniteBench's data, a larger model"
