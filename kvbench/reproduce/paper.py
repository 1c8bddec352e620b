"""The form of a claims file: one TOML file per paper, in the paper's own words, read strictly.

A table's shared fields stand once; its numbers stand by model and row, one for each column. docs/reproducing.md has the
form with an example.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from kvbench.registry import HERE
from kvbench.runs.spec import History, Visibility
from kvbench.template import Template
from kvbench.toml import STRICT, read_toml

FOLDER = HERE / "reproduce" / "data" / "papers"
HINT = "See docs/reproducing.md."
Evidence = Literal["verified", "secondary", "memory"]
"""Read in the source itself; in somebody else's copy of it; not read again."""
Measure = Literal["score", "tokens/s", "ms", "times", "bytes"]
"""A task's score, two clocks, a factor over the dense cache, or a share of its bytes."""


class PaperProtocol(BaseModel):
    """What is known to change scores, as far as the paper says it."""

    model_config = STRICT

    template: Template | None = None
    """The text alone, or in the model's own chat template."""
    truncation: int | None = None
    """Most tokens of a prompt; the middle of a longer one is cut out."""
    visibility: Visibility | None = None
    history: History | None = None
    granularity: Literal["query head", "KV head"] | None = None
    """What rows are kept for."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    differs: list[str] = []
    """What is otherwise than in kvbench and has no field here."""

    def under(self, common: PaperProtocol) -> PaperProtocol:
        """This one, and what the common one says besides."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return common.model_copy(update={**given, "differs": [*common.differs, *self.differs]})


class PaperColumn(BaseModel):
    """A column: which tasks of kvbench at which lengths it is the mean of, or why it is none."""

    model_config = STRICT

    task: str | list[str] = []
    """None: all tasks of the table's suite."""
    length: int | list[int] = []
    room: int | None = None
    """Tokens of an answer, which a length of kvbench has in it and a truncation has not."""
    run: dict[str, Any] = {}
    """Options of the runs."""
    timing: Literal["kernel", "step", "end-to-end"] | None = None
    """Of `kvbench bench`, for a speed."""
    lacks: str | None = None
    """What kvbench does not have for it."""


class PaperRow(BaseModel):
    """A row: the method of kvbench that it is, with its options."""

    model_config = STRICT

    method: str
    budget: str | list[str] | None = None
    """One, or one for each column."""
    set: dict[str, str | int | float | bool] = {}
    run: dict[str, Any] = {}
    """Other options of the runs."""
    baseline: str | None = None
    """In place of the table's."""
    words: str = ""
    """What the paper says of the budget."""
    differs: list[str] = []
    """As in the protocol, of this row."""
    lacks: str | None = None


class Block(BaseModel):
    """The numbers of one model, by row and in the order of the columns; `nan` where none is printed."""

    model_config = STRICT

    id: str | None = None
    """On the hub."""
    shape: str | None = None
    """The architecture of `kvbench list models` that has its shape."""
    lacks: str | None = None
    protocol: PaperProtocol = PaperProtocol()
    batch: dict[str, list[float]] = {}
    """Sequences at a time by row and column, of speeds."""
    values: dict[str, list[float]]


class Note(BaseModel):
    """What is special about some numbers: each of these that is given narrows which."""

    model_config = STRICT

    model: str | None = None
    row: str | None = None
    column: str | None = None
    evidence: Evidence | None = None
    correct: float | None = None
    """What should have been printed."""
    text: str


class PaperTable(BaseModel):
    """A table of a paper."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    where: str
    """Where the numbers were read."""
    evidence: Evidence
    measure: Measure = "score"
    scale: float = 100.0
    """What a score of 1 is printed as."""
    decimals: int = Field(2, ge=0, le=6)
    hardware: str | None = None
    """Where a speed was measured, as the paper says it."""
    gpu: str | None = None
    """The same as a part of the GPU's name."""
    batch: int = 1
    """Sequences at a time, where no model says others."""
    suite: str | None = None
    """kvbench's suite of the tasks."""
    baseline: str | None = None
    """The row that a difference is taken to, where a row names no other."""
    run: dict[str, Any] = {}
    """Options of all runs."""
    protocol: PaperProtocol = PaperProtocol()
    columns: dict[str, PaperColumn] = Field(min_length=1)
    rows: dict[str, PaperRow] = Field(min_length=1)
    models: dict[str, Block] = Field(min_length=1)
    notes: list[Note] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        for model, block in self.models.items():
            for row, values in (*block.values.items(), *block.batch.items()):
                if row not in self.rows:
                    raise ValueError(f"{self.name}: '{row}' of {model} is no row of the table")
                if len(values) != len(self.columns):
                    raise ValueError(
                        f"{self.name}: '{row}' of {model} has {len(values)} numbers for {len(self.columns)} columns"
                    )
        for name, asked in self.rows.items():
            if isinstance(asked.budget, list) and len(asked.budget) != len(self.columns):
                raise ValueError(
                    f"{self.name}: '{name}' has {len(asked.budget)} budgets for {len(self.columns)} columns"
                )
        for name, column in self.columns.items():
            if self.measure == "score" and not (column.task or column.lacks or self.suite):
                raise ValueError(f"{self.name}: column '{name}' names no task, and the table no suite")
        for baseline in {self.baseline, *(x.baseline for x in self.rows.values())} - {None, *self.rows}:
            raise ValueError(f"{self.name}: '{baseline}', a baseline, is no row of the table")
        for note in self.notes:
            for kind, value, known in (
                ("model", note.model, self.models), ("row", note.row, self.rows), ("column", note.column, self.columns)
            ):
                if value is not None and value not in known:
                    raise ValueError(f"{self.name}: a note is about {kind} '{value}', which the table has not")
        return self


class Paper(BaseModel):
    """The tables of a paper."""

    model_config = STRICT

    title: str
    arxiv: str | None = None
    table: list[PaperTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [x.name for x in self.table]
        if twice := {x for x in names if names.count(x) > 1}:
            raise ValueError(f"two tables are called {', '.join(sorted(twice))}")
        return self


def list_papers() -> dict[str, Paper]:
    """The papers that come with kvbench, by the name of their file.

    Raises:
        UserError: a file is not one.
    """
    return {x.stem: read_paper(x) for x in sorted(FOLDER.glob("*.toml"))}


def read_paper(path: Path) -> Paper:
    """The tables of a file.

    Raises:
        UserError: it cannot be read, or is not one.
    """
    return read_toml(path, Paper, "claims file", HINT)
