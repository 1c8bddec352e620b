"""SCBench's string retrieval: a value by its key, a string by its two ends, and variables by their assigned value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.task import Turn
from kvbench.tasks.records import Columns, Record
from kvbench.tasks.scbench.official import Place, SCBench


@dataclass(frozen=True)
class RetrKV(SCBench):
    """Retrieve the value of a key in a JSON object of UUIDs."""

    name: ClassVar[str] = "scbench_kv"
    summary: ClassVar[str] = "SCBench Retr.KV: the value of a key in a JSON object of 2,500 pairs of UUIDs"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    intro: ClassVar[str] = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    max_new_tokens: ClassVar[int] = 150


@dataclass(frozen=True)
class RetrPrefixSuffix(SCBench):
    """Retrieve the string with a given prefix and suffix; the question's wording comes from the data."""

    name: ClassVar[str] = "scbench_prefix_suffix"
    summary: ClassVar[str] = "SCBench Retr.Prefix-Suffix: the one string with a given beginning and end"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    max_new_tokens: ClassVar[int] = 150


@dataclass(frozen=True)
class RetrMultiHop(SCBench):
    """RULER's variable tracking. A record's context is its column `input`, which includes the instruction.

    In the history, an answer is the list of names in Python's notation, as the runner writes it.
    """

    name: ClassVar[str] = "scbench_vt"
    summary: ClassVar[str] = "SCBench Retr.MultiHop: all variables that come to be assigned a value"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    columns: ClassVar[Columns] = {"input": str, "multi_turns": list}
    turn_columns: ClassVar[Columns] = {"input": str, "answer": list}
    body: ClassVar[str] = "input"
    max_new_tokens: ClassVar[int] = 30

    def fault(self, turn: Record) -> str | None:
        """Report an answer that is not a list of names."""
        named = all(isinstance(name, str) and name for name in turn["answer"])
        return super().fault(turn) or (None if named else "the answer is no list of names")

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; every name is a reference."""
        return replace(super().turn(asked, place), references=tuple(asked["answer"]))
