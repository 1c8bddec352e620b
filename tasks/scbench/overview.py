"""SCBench's tasks whose answers depend on the whole context: Math.Find, ICL.ManyShot and En.Sum."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.errors import UserError
from kvbench.task import Turn
from kvbench.tasks.records import Columns, Record
from kvbench.tasks.scbench.official import Place, SCBench

TARGET = re.compile("The .+ is")


def shorten(question: str) -> str:
    """The short form of a question, such as `What is the largest number of the list?`."""
    found = TARGET.search(question)
    assert found is not None  # MathFind.fault
    return f"What is {found[0].lower()[:-3]}?"


@dataclass(frozen=True)
class MathFind(SCBench):
    """The number with a given rank in a long list. Context and answer are numbers in the data.

    With multi-request the context begins with the first question, as in the runner, so a method that compresses the
    context sees that question.
    """

    name: ClassVar[str] = "scbench_mf"
    summary: ClassVar[str] = "SCBench Math.Find: the largest, smallest or median number of a list, or one next to it"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    leak: ClassVar[str | None] = "the number that the first question asks for"
    columns: ClassVar[Columns] = {"context": list, "multi_turns": list}
    turn_columns: ClassVar[Columns] = {"input": str, "answer": int}
    max_new_tokens: ClassVar[int] = 5

    def record(self, index: int) -> Record:
        """Read and check one record, whose context must be a list of whole numbers."""
        record = super().record(index)
        if not all(type(x) is int for x in record["context"]):
            raise UserError(f"record {index} of {self.source.name}: column context is no list of int. {self.hint}")
        return record

    def fault(self, turn: Record) -> str | None:
        """Report a question without the `The ... is` that names its target."""
        said = TARGET.search(turn["input"])
        return super().fault(turn) or (None if said else "the input has no 'The ... is' to say what is asked for")

    def begin(self, record: Record, place: Place) -> str:
        """The first question or its short form, then the list in Python's notation."""
        first = record["multi_turns"][0]["input"]
        return f"{first if place is Place.REQUEST else shorten(first)}\n\n{record['context']}"

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; a question that does not follow the context directly begins with its short form."""
        short = "" if place is Place.FIRST else f"{shorten(asked['input'])}\n\n"
        return replace(super().turn(asked, place), question=f"{short}{asked['input']}")


@dataclass(frozen=True)
class ICLManyShot(SCBench):
    """Multiple-choice questions of BIG-Bench Hard after many answered ones; the answer is a letter."""

    name: ClassVar[str] = "scbench_many_shot"
    summary: ClassVar[str] = "SCBench ICL.ManyShot: an option by its letter, after many answered examples"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    max_new_tokens: ClassVar[int] = 10


@dataclass(frozen=True)
class EnSum(SCBench):
    """A summary of each of several papers; with a chat template, the answer of a follow-up has a prefix."""

    name: ClassVar[str] = "scbench_summary"
    summary: ClassVar[str] = "SCBench En.Sum: a summary of each of several papers"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    max_new_tokens: ClassVar[int] = 200

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn, with the runner's answer prefix for follow-ups in a chat template."""
        return replace(super().turn(asked, place), prefix="This paper" if place is Place.AFTER_CHAT else "")
