"""SCBench's two mixed tasks, whose turns alternate between two tasks: summaries and needles, functions and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.task import Turn
from kvbench.tasks.records import Columns, Record
from kvbench.tasks.scbench.official import Place, SCBench
from kvbench.tasks.scbench.repositories import Repositories


@dataclass(frozen=True)
class MixedTask(SCBench):
    """Base class; the column `task` of a turn names the task that it belongs to."""

    turn_columns: ClassVar[Columns] = {"input": str, "answer": str, "task": str}
    max_new_tokens_by_task: ClassVar[Mapping[str, int]]
    """max_new_tokens by the name of the turn's task."""

    def fault(self, turn: Record) -> str | None:
        """Report a turn of a task other than these two."""
        unknown = f"task {turn['task']} is none of {', '.join(self.max_new_tokens_by_task)}"
        return super().fault(turn) or (None if turn["task"] in self.max_new_tokens_by_task else unknown)

    def answer_tokens(self, asked: Record) -> int:
        """max_new_tokens of the turn's task."""
        return self.max_new_tokens_by_task[asked["task"]]

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; its fact `task` tells the scorers which rule applies."""
        return replace(super().turn(asked, place), facts={"task": asked["task"]})

    def room(self, turns: int) -> int:
        """The sum of both tasks' max_new_tokens for every two turns."""
        return sum(self.max_new_tokens_by_task.values()) * turns // 2


@dataclass(frozen=True)
class MixSumNeedles(MixedTask):
    """Summaries of papers, and pass keys hidden among the papers."""

    name: ClassVar[str] = "scbench_summary_with_needles"
    summary: ClassVar[str] = "SCBench Mix.Sum+NIAH: summaries of papers and pass keys hidden among them, by turns"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    max_new_tokens_by_task: ClassVar[Mapping[str, int]] = {"scbench_summary": 800, "scbench_passkey": 15}


@dataclass(frozen=True)
class MixRepoQAKV(MixedTask, Repositories):
    """Functions of a repository, and values of keys hidden in its code."""

    name: ClassVar[str] = "scbench_repoqa_and_kv"
    summary: ClassVar[str] = "SCBench Mix.RepoQA+KV: functions of a repository and values hidden in it, by turns"
    needs: ClassVar[str | None] = "SCBench's data, a larger model"
    max_new_tokens_by_task: ClassVar[Mapping[str, int]] = {"scbench_repoqa": 1024, "scbench_kv": 80}

    def fault(self, turn: Record) -> str | None:
        """Report a turn that asks for a function and does not name it."""
        named = turn["task"] != "scbench_repoqa" or isinstance(turn.get("name"), str)
        return super().fault(turn) or (None if named else "the function has no name")

    def functions(self, turns: Iterable[Record]) -> Iterator[tuple[str, str]]:
        """Names and source of the functions, from the turns that ask for one."""
        return super().functions(turn for turn in turns if turn["task"] == "scbench_repoqa")

    def turn(self, asked: Record, place: Place) -> Turn:
        """Build the turn; its fact `name` is the function's name, empty for a value."""
        made = super().turn(asked, place)
        return replace(made, facts={**made.facts, "name": asked.get("name") or ""})
