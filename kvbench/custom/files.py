"""The files of a task without code: a TOML file with settings and a JSONL file of contexts and turns."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.task import Task
from kvbench.toml import STRICT, explain, read_toml

if TYPE_CHECKING:
    from typing import Self

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


class RepeatedKeyError(ValueError):
    """An object of JSON has two values for one key."""


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    """Raise an error that names the first key that occurs twice: a JSON reader keeps the last value only."""
    keys = [key for key, _ in pairs]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise RepeatedKeyError(f"has the key {key} twice. Leave one out")


@functools.lru_cache(maxsize=4)
def _read_records(path: Path, stamp: tuple[int, ...]) -> RecordFile:  # noqa: ARG001  # part of the cache's key
    data = path.read_bytes()
    valid, errors = {}, {}
    for line, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            try:
                record = TaskRecord.model_validate_json(text)
                json.loads(text, object_pairs_hook=_refuse_repeated, parse_int=str)
                valid[line] = record
            except RepeatedKeyError as error:
                errors[line] = str(error)
            except ValidationError as error:
                errors[line] = explain(error).replace(" at line 1 column ", " at column ")
                if line == 1 and text.startswith(codecs.BOM_UTF8):
                    errors[line] = "starts with a byte order mark. Save the file as UTF-8 without it"
    return RecordFile(path, hashlib.sha256(data).hexdigest(), valid, errors)
