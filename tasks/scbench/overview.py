"""SCBench's tasks that take the whole context: Math.Find, ICL.ManyShot and En.Sum."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.errors import UserError
from kvbench.task import Turn
from kvbench.tasks.rows import Columns, Row
from kvbench.tasks.scbench.official import Place, SCBench

TARGET = re.compile("The .+ is")


def shorten(question: str) -> str:
    """The question in short, `What is the largest number of the list?`."""
    found = TARGET.search(question)
    assert found is not None  # MathFind.fault
    return f"What is {found[0].lower()[:-3]}?"


@dataclass(frozen=True)
class MathFind(SCBench):
    """A number of a long list, by its rank. Context and answer are numbers in the data.

    With multi-request the context begins with the first question, as in the runner: a method sees it before it is
    asked.
    """

    name: ClassVar[str] = "scbench_mf"
    summary: ClassVar[str] = "SCBench Math.Find: the largest, smallest or median number of a list, or one next to it"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    leak: ClassVar[str | None] = "the number that the first question asks for"
    columns: ClassVar[Columns] = {"context": list, "multi_turns": list}
    turn_columns: ClassVar[Columns] = {"input": str, "answer": int}
    limit: ClassVar[int] = 5

    def row(self, index: int) -> Row:
        """One row, checked: its context is made of whole numbers."""
        row = super().row(index)
        if not all(isinstance(x, int) for x in row["context"]):
            raise UserError(f"row {index} of {self.source.name}: column context is no list of int. {self.hint}")
        return row

    def fault(self, turn: Row) -> str | None:
        """A question that does not say what it asks for as the others do."""
        said = TARGET.search(turn["input"])
        return super().fault(turn) or (None if said else "the input has no 'The ... is' to say what is asked for")

    def begin(self, row: Row, place: Place) -> str:
        """The list in Python's notation, after what is asked for first."""
        first = row["multi_turns"][0]["input"]
        return f"{first if place is Place.REQUEST else shorten(first)}\n\n{row['context']}"

    def turn(self, asked: Row, place: Place) -> Turn:
        """The question; in short before it, where the context does not begin with that."""
        short = "" if place is Place.FIRST else f"{shorten(asked['input'])}\n\n"
        return replace(super().turn(asked, place), question=f"{short}{asked['input']}")


@dataclass(frozen=True)
class ICLManyShot(SCBench):
    """Questions of BIG-Bench Hard after many that are answered; the answer is a letter."""

    name: ClassVar[str] = "scbench_many_shot"
    summary: ClassVar[str] = "SCBench ICL.ManyShot: an option by its letter, after many answered examples"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    limit: ClassVar[int] = 10


@dataclass(frozen=True)
class EnSum(SCBench):
    """A summary of each of several papers; after a chat template's header a follow-up's answer begins for the model."""

    name: ClassVar[str] = "scbench_summary"
    summary: ClassVar[str] = "SCBench En.Sum: a summary of each of several papers"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    limit: ClassVar[int] = 200

    def turn(self, asked: Row, place: Place) -> Turn:
        """The question, and where the runner has it the first words of the answer."""
        return replace(super().turn(asked, place), prefix="This paper" if place is Place.AFTER_CHAT else "")
