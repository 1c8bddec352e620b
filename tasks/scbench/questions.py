"""SCBench's questions about a book: En.QA, Zh.QA and En.MultiChoice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.task import Turn
from kvbench.tasks.records import Columns, Record
from kvbench.tasks.scbench.official import Place, SCBench

LETTERS = "ABCD"


@dataclass(frozen=True)
class BookQA(SCBench):
    """Free questions about a book."""

    max_new_tokens: ClassVar[int] = 40
    question: ClassVar[str]
    """Template around the turn's input."""

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; the question has the same template in every place."""
        return replace(super().turn(asked, place), question=self.question.format(asked["input"]))


@dataclass(frozen=True)
class EnQA(BookQA):
    """Questions about English books."""

    name: ClassVar[str] = "scbench_qa_eng"
    summary: ClassVar[str] = "SCBench En.QA: short answers about an English book"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    intro: ClassVar[str] = "Read the book and answer the question. Be very concise in your answer.\n\n"
    question: ClassVar[str] = "Question: {}\nAnswer:"


@dataclass(frozen=True)
class ZhQA(BookQA):
    """Questions about Chinese books of 1.5M tokens on average."""

    name: ClassVar[str] = "scbench_qa_chn"
    summary: ClassVar[str] = "SCBench Zh.QA: short answers about a Chinese book"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    intro: ClassVar[str] = "阅读以下书籍然后回答问题。\n\n"
    question: ClassVar[str] = "问题：{}\n答案："  # noqa: RUF001


@dataclass(frozen=True)
class EnMultiChoice(SCBench):
    """Questions with four options.

    `The the correct answer is` is the runner's wording for all places but a follow-up without a chat template.
    """

    name: ClassVar[str] = "scbench_choice_eng"
    summary: ClassVar[str] = "SCBench En.MultiChoice: one of four options about an English book"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    turn_columns: ClassVar[Columns] = {"input": str, "answer": str, "options": list}
    intro: ClassVar[str] = "Read the book and answer the question.\n\n"
    max_new_tokens: ClassVar[int] = 40

    def fault(self, turn: Record) -> str | None:
        """Report options that are not four texts, or an answer that is none of the options."""
        options = turn["options"]
        if len(options) != len(LETTERS) or not all(isinstance(x, str) for x in options):
            return "options are not four texts"
        return super().fault(turn) or (None if turn["answer"] in options else "the answer is none of the options")

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; the question lists its options with letters."""
        options = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, asked["options"], strict=True))
        end = "The letter of the correct answer is" if place is Place.AFTER_TEXT else "The the correct answer is"
        facts = {"options": list(asked["options"]), "letter": LETTERS[asked["options"].index(asked["answer"])]}
        return replace(
            super().turn(asked, place), question=f"Question: {asked['input']}{options}\n\n{end}", facts=facts
        )
