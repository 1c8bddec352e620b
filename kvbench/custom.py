"""Tasks without code: a TOML file with settings and a JSONL file of contexts and turns (docs/adding_a_task.md)."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from kvbench.errors import UserError
from kvbench.scorers import SCORERS, name_strict
from kvbench.task import Example, Mode, Scorer, Split, Task, Turn, count_prompt
from kvbench.text.tokens import cut_middle
from kvbench.toml import STRICT, explain, read_toml

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

FindScorer = Callable[[str, Iterable[str]], tuple[Scorer, type[Task]]]
"""`registry.find_scorer`, passed in because the registry imports this module."""
HINT = "See docs/adding_a_task.md."
RENAMED = {"limit": "max_new_tokens"}
"""Keys of older files, and their names now."""


def _check_text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _check_template(text: str) -> str:
    if "{question}" not in text:
        raise ValueError("has no {question}")
    return text


Text = Annotated[str, AfterValidator(_check_text)]
Positive = Annotated[int, Field(ge=1)]


class TaskTable(BaseModel):
    """The keys of the TOML file."""

    model_config = STRICT

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: Text
    summary: Text
    data: Text
    """Path of the JSONL file, relative to the folder of the TOML file."""
    scorer: str
    max_new_tokens: Positive = Field(serialization_alias="limit")
    """Most tokens of an answer, unless the turn has its own. The alias keeps the prompt ids of older files."""
    suite: Text = "custom"
    question: Annotated[str, AfterValidator(_check_template)] = "{question}"
    prefix: str = ""
    """Start of the answer; may contain {question}."""
    joint: str = Task.joint
    separator: str = Task.separator
    modes: list[Literal["single", "multi-turn", "multi-request"]] = Field(
        ["single", "multi-turn", "multi-request"], min_length=1
    )
    truncation: Literal["none", "middle"] = "none"
    length: Positive = Task.default_length
    """Default length of a run: most tokens of the first prompt and its answer."""
    answer_in_context: bool = False
    """Whether every context contains its answers; `kvbench check` verifies it."""


class TurnRecord(BaseModel):
    """One turn of a record."""

    model_config = STRICT

    question: Text
    answer: Text
    references: list[Text] | None = Field(None, min_length=1)
    """Texts that the scorer compares the prediction with; None: the stripped answer."""
    prefix: str | None = None
    max_new_tokens: Positive | None = None
    choices: list[Text] = []
    answer_in_context: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, keys: object) -> object:
        for old, new in RENAMED.items():
            if isinstance(keys, Mapping) and old in keys:
                raise ValueError(f"has the key {old}, which is now {new}")
        return keys

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.choices and self.max_new_tokens is not None:
            raise ValueError("choices are compared and nothing is generated: leave max_new_tokens out")
        if self.choices and self.answer not in self.choices:
            raise ValueError("the answer is none of the choices")
        return self


class TaskRecord(BaseModel):
    """One line of the JSONL file."""

    model_config = STRICT

    id: Text | int
    context: Text
    turns: list[TurnRecord] = Field(min_length=1)
    parts: list[Text] = []
    """The context in parts, an instruction and documents, for methods that reuse entries; then `context` is left out.
    """
    earlier: list[list[Text]] = []
    """Prompts that ran before, each in parts."""

    @model_validator(mode="before")
    @classmethod
    def _join_parts(cls, keys: object) -> object:
        if isinstance(keys, Mapping) and isinstance(keys.get("parts"), list) and all(
            isinstance(x, str) for x in keys["parts"]
        ):
            if "context" in keys:
                raise ValueError("has parts and a context: leave the context out, which the parts make up")
            return {**keys, "context": "".join(keys["parts"])}
        if isinstance(keys, Mapping) and "earlier" in keys:
            raise ValueError("has earlier prompts and no parts: write its context as parts")
        return keys


@dataclass(frozen=True)
class RecordFile:
    """The content of a JSONL file: valid records and errors of the other lines, by line number from 1."""

    path: Path
    sha256: str
    valid: dict[int, TaskRecord]
    errors: dict[int, str]


@dataclass(frozen=True)
class CustomTask(Task):
    """Base class of the tasks that are read from TOML files; `make_task` creates a subclass for each file."""

    table: ClassVar[TaskTable]
    records: ClassVar[RecordFile]
    owner: ClassVar[type[Task] | None]
    """The task that defines the scorer; its code is recorded with a run. None: the scorer is one of SCORERS."""

    @property
    def prompt_id(self) -> str:
        """The prompt's id: a hash of all keys of the TOML file that decide prompts and answers."""
        text = self.table.model_dump_json(exclude={"summary", "data", "answer_in_context"}, by_alias=True)
        return f"custom/{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def dataset_revision(self) -> str:
        """`sha256:` and the hash of the JSONL file."""
        return f"sha256:{self.records.sha256}"

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:  # noqa: ARG002
        """Return 1; `examples` refuses records that are too long."""
        return 1

    def check_samples(self, samples: int) -> None:
        """Raise a UserError if there are fewer records than samples."""
        total = len(self.records.valid)
        if samples > total:
            raise UserError(f"{self.name} has {total} records, not {samples}. Use --samples {total} or fewer.")

    def check_turns(self, turns: int) -> None:
        """Raise a UserError if a record has fewer turns: a run asks as many questions about every context."""
        records = self.records.valid.values()
        least, most = (pick(records, key=lambda x: len(x.turns)) for pick in (min, max))
        few, many = len(least.turns), len(most.turns)
        if turns <= few:
            return
        if few == many:
            raise UserError(f"records of {self.name} have {few} turns each, not {turns}. Use --turns {few} or fewer.")
        raise UserError(
            f"records of {self.name} have unequal numbers of turns: '{least.id}' has {few}, '{most.id}' {many}. "
            f"A run asks {turns} questions about every context: use --turns {few} or fewer, or leave short records out."
        )

    def compose(self, record: TaskRecord, turns: int) -> Example:
        """Build the example of a record, with its first `turns` turns and its whole context."""
        table = self.table
        made = []
        for x in record.turns[:turns]:
            prefix = (table.prefix if x.prefix is None else x.prefix).replace("{question}", x.question)
            most = 0 if x.choices else x.max_new_tokens or table.max_new_tokens
            references = tuple(x.references or [x.answer.strip()])
            question = table.question.replace("{question}", x.question)
            made.append(Turn(question, prefix, x.answer, references, most, tuple(x.choices)))
        return Example(
            str(record.id), record.context, tuple(made), parts=tuple(record.parts),
            earlier=tuple(map(tuple, record.earlier)),
        )

    def count(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt plus its max_new_tokens."""
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + example.turns[0].max_new_tokens

    def cut(self, example: Example, length: int, tokenizer: PreTrainedTokenizerBase) -> Example:
        """Cut the middle out of the context if the example is longer than `length`; the fact `cut_tokens` counts it.

        Raises:
            UserError: nothing of the context would be left.
        """
        text, cut = cut_middle(
            tokenizer, example.context, length, lambda x: self.count(replace(example, context=x), tokenizer)
        )
        if cut and example.parts:
            raise UserError(
                f"record '{example.id}' of {self.records.path} is longer than {length} tokens, and parts are not "
                "cut. Use a greater --length."
            )
        if not text:
            raise UserError(
                f"record '{example.id}' of {self.records.path}: its first question and answer leave no room for the "
                f"context in a length of {length}. Use a greater --length."
            )
        return replace(example, context=text, facts={"cut_tokens": cut})

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples from records, in file order for seed 0 and in a random order for any other seed.

        Raises:
            UserError: the split is dev, there are fewer than `n` records, or one of them is too long.
        """
        if split is Split.DEV:
            raise UserError(f"{self.name} has only a test split. Leave --split out.")
        self.check_samples(n)
        records = list(self.records.valid.values())
        if seed:
            random.Random(f"{self.name}/{seed}").shuffle(records)
        made = [self.compose(record, turns) for record in records[:n]]
        if self.truncation == "middle":
            return (self.cut(x, length, tokenizer) for x in made)
        sizes = [self.count(x, tokenizer) for x in made]
        if max(sizes) > length:
            worst = made[sizes.index(max(sizes))]
            raise UserError(
                f"record '{worst.id}' of {self.records.path} has {max(sizes)} tokens with its answer, more than "
                f'--length {length}. Use --length {max(sizes)}, or set truncation = "middle" in the task\'s file.'
            )
        return iter(made)


def read_task(path: Path, find_scorer: FindScorer) -> type[CustomTask]:
    """Read a task from a TOML file and its JSONL file.

    Raises:
        UserError: a file cannot be read, or a line of the JSONL file is not a valid record.
    """
    table, records = read_parts(path)
    for line, error in records.errors.items():
        raise UserError(f"{records.path}, line {line}: {error}. {HINT}")
    return make_task(table, records, find_scorer)


def read_parts(path: Path) -> tuple[TaskTable, RecordFile]:
    """Read a TOML file and its JSONL file; errors of single lines are returned and not raised.

    Raises:
        UserError: one of the two files cannot be read, or the JSONL file has no lines.
    """
    table = read_toml(path.expanduser(), TaskTable, "task file", HINT, RENAMED)
    data = path.expanduser().parent / table.data
    try:
        stat = data.stat()
        records = _read_records(data, (stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except OSError as error:
        raise UserError(f"{path}: data = '{data}' cannot be read: {error.strerror}. {HINT}") from error
    if not records.valid and not records.errors:
        raise UserError(f"{data} has no records. {HINT}")
    return table, records


def make_task(table: TaskTable, records: RecordFile, find_scorer: FindScorer) -> type[CustomTask]:
    """Create the class of a task that was read from files.

    Raises:
        UserError: the scorer is unknown, or needs facts, which records do not have.
    """
    if table.scorer in SCORERS:
        scorer, owner = SCORERS[table.scorer], None
    else:
        scorer, owner = find_scorer(table.scorer, SCORERS)
        if scorer.facts:
            raise UserError(
                f"scorer {scorer.id} needs the facts {', '.join(scorer.facts)}, which records cannot have. Use one of "
                f"{', '.join(SCORERS)}."
            )
    known = SCORERS.values() if owner is None else owner.scorers
    scorers = (scorer, *(x for x in known if x.id == name_strict(scorer.id)))
    # The class name contains the hash, so that two files with the same task name are two tasks.
    return type(f"CustomTask_{table.name}_{records.sha256}", (CustomTask,), {
        "__module__": __name__, "__doc__": CustomTask.__doc__, "table": table, "records": records, "owner": owner,
        "name": table.name, "version": table.version, "suite": table.suite, "summary": table.summary,
        "modes": tuple(Mode(x) for x in table.modes), "scorers": scorers, "truncation": table.truncation,
        "default_length": table.length, "joint": table.joint, "separator": table.separator,
        "default_turns": max((len(x.turns) for x in records.valid.values()), default=1),
    })


@functools.lru_cache(maxsize=4)
def _read_records(path: Path, stamp: tuple[int, ...]) -> RecordFile:  # noqa: ARG001  # part of the cache's key
    data = path.read_bytes()
    valid, errors = {}, {}
    for line, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            try:
                valid[line] = TaskRecord.model_validate_json(text)
            except ValidationError as error:
                errors[line] = explain(error).replace(" at line 1 column ", " at column ")
    return RecordFile(path, hashlib.sha256(data).hexdigest(), valid, errors)
