"""Base class of SCBench's twelve tasks: records of microsoft/SCBench in the wording of its runner.

Prompts, max_new_tokens and the allowed length of the first prompt are those of microsoft/MInference at fb56c917
(scbench/, arXiv 2412.10319). The runner's wording depends on the mode and on whether there is a chat template; `Place`
holds that choice. All other wording comes from the data's `input`. A single question is the first turn of a
conversation.

Intended differences from the runner:

- Context and questions are tokenized separately (docs/design.md), so that no token spans both.
- There is one beginning-of-sequence token; the runner adds a second one before that of a chat template.
- The chat template is applied once, with its own system prompt. The runner removes the system prompt from each
  follow-up as text, which fails for templates with a default system prompt (Qwen2) and leaves a second one there.
- With a chat template, a follow-up of scbench_mf repeats the target of its own question, as without a template; the
  runner repeats the target of the last question.
- With own history and no chat template, a blank line separates an answer from the next question; the runner has nothing
  there, or an end-of-sequence token after a truncated answer.
- With own history and no chat template, a follow-up of scbench_choice_eng ends as with reference history (`The letter
  of the correct answer is`); the runner's ends with `The the correct answer is`.
- Every record is cut to the requested number of turns; the runner cuts none if the first record has no more than that.
- The middle of the context is cut; the runner cuts the middle of the whole first prompt, which lies some tokens later.
  With multi-request, the length includes the first question.
- Without multi-request, the length has room for the whole conversation with its reference answers. The runner reserves
  max_new_tokens for every answer, in which later questions, chat headers and longer reference answers may not fit.
- Of two functions of a repository with the same name, RepoQA's scorers compare an answer with the first; the runner's
  compare it with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Turn, encode
from kvbench.tasks.dataset import DatasetTask
from kvbench.tasks.records import Columns, Record, check_columns
from kvbench.tasks.scoring.scbench import SCORERS
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST_ROOM = 1000
"""Tokens that the runner reserves for a question of multi-request."""


class Place(Enum):
    """Position of a question in the conversation, which decides its wording."""

    FIRST = auto()
    """After the context, in the same message."""
    AFTER_TEXT = auto()
    """After an answer, without a chat template."""
    AFTER_CHAT = auto()
    """After an answer, with a chat template."""
    REQUEST = auto()
    """After a context that was prefilled without the question."""

    @classmethod
    def of(cls, mode: Mode, index: int, frame: Frame) -> Place:
        """The place of the turn with this index."""
        if mode is Mode.MULTI_REQUEST:
            return cls.REQUEST
        if index == 0:
            return cls.FIRST
        return cls.AFTER_TEXT if frame.sha is None else cls.AFTER_CHAT


@dataclass(frozen=True)
class SCBench(DatasetTask):
    """A task of SCBench. data: path of a local copy; empty: the hub."""

    version: ClassVar[str] = "2"
    suite: ClassVar[str] = "scbench"
    hub: ClassVar[str] = "microsoft/SCBench"
    revision: ClassVar[str] = "283310bb8c5ba6909dd9a6b1be087d2937f76f6d"
    columns: ClassVar[Columns] = {"context": str, "multi_turns": list}
    turn_columns: ClassVar[Columns] = {"input": str, "answer": str}
    default_length: ClassVar[int] = 131_072
    default_turns: ClassVar[int] = 5
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"
    intro: ClassVar[str] = ""
    """Text before the context."""
    max_new_tokens: ClassVar[int]
    """Most tokens of an answer, if it is the same for all turns."""

    def __init_subclass__(cls) -> None:
        """Set the part of the data and the scorers from the task's name."""
        super().__init_subclass__()
        if "name" in cls.__dict__:
            cls.config, cls.scorers = cls.name, SCORERS[cls.name]

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the runner's commit."""
        return f"{self.name}@fb56c917"

    def record(self, index: int) -> Record:
        """Read and check one record with its turns.

        Raises:
            UserError: the record does not follow SCBench's schema, or an answer is empty.
        """
        record = super().record(index)
        if not record["multi_turns"]:
            raise UserError(f"record {index} of {self.source.name}: column multi_turns is empty. {self.hint}")
        for number, turn in enumerate(record["multi_turns"]):
            where = f"record {index}, turn {number} of {self.source.name}"
            check_columns(turn, self.turn_columns, where, self.hint)
            if fault := self.fault(turn):
                raise UserError(f"{where}: {fault}. {self.hint}")
        return record

    def fault(self, turn: Record) -> str | None:
        """Describe what is wrong with a turn that has all columns with the right types; None if nothing is."""
        return "the answer is empty" if turn["answer"] in ("", []) else None

    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:
        """Build the example of the record's first `turns` turns, each worded for its place."""
        asked = record["multi_turns"][:turns]
        places = [Place.of(mode, index, frame) for index in range(len(asked))]
        return Example(
            id="", context=self.begin(record, places[0]),
            turns=tuple(self.turn(x, place) for x, place in zip(asked, places, strict=True)),
            facts={"mode": str(mode), **self.facts(record)}, joint="" if mode is Mode.MULTI_REQUEST else None,
        )

    def begin(self, record: Record, place: Place) -> str:  # noqa: ARG002  # for scbench_mf
        """The text before the first question."""
        return f"{self.intro}{record[self.body]}"

    def turn(self, asked: Record, place: Place) -> Turn:  # noqa: ARG002  # for overrides
        """Build one turn with its question, answer and facts for the scorers."""
        return Turn(asked["input"], "", str(asked["answer"]), (str(asked["answer"]),), self.answer_tokens(asked))

    def answer_tokens(self, asked: Record) -> int:  # noqa: ARG002  # for mixed tasks
        """max_new_tokens of a turn."""
        return self.max_new_tokens

    def facts(self, record: Record) -> Mapping[str, Any]:  # noqa: ARG002  # for overrides
        """Facts of the record for the scorers."""
        return {}

    def room(self, turns: int) -> int:
        """Tokens that the runner reserves for the answers of this many turns."""
        return self.max_new_tokens * turns

    def reserve(self, example: Example, *, turns: int, mode: Mode, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens that the runner reserves, or those of the conversation after the first question if these are more.

        The runner reserves for the requested turns, but at most for those of the first record. The number of turns of
        the example itself does not matter there.
        """
        room = self.room(min(turns, count_turns(self)))
        if mode is Mode.MULTI_REQUEST:
            return max(room + REQUEST_ROOM, example.turns[0].max_new_tokens)
        encoded, begun = encode(self, replace(example, context=""), tokenizer), 0
        for index, (turn, ids) in enumerate(zip(example.turns, encoded.turns, strict=True)):
            begun += len(ids.later) if index else 0
            room = max(room, begun + max(turn.max_new_tokens, len(ids.answer)))
            begun += len(ids.answer)
        return room


@cache
def count_turns(task: SCBench) -> int:
    """Number of turns of the first record."""
    return len(task.record(0)["multi_turns"])
