"""Schema of the claims files: one TOML file per paper, with the paper's own names, validated strictly.

Fields shared by a table are given once; numbers are given by model and row, one per column. docs/reproducing.md
describes the format with an example.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from kvbench.registry import HERE
from kvbench.runs.spec import History, Visibility
from kvbench.text.template import Template
from kvbench.toml import STRICT, read_toml

FOLDER = HERE / "reproduce" / "data" / "papers"
HINT = "See docs/reproducing.md."
Evidence = Literal["verified", "secondary", "memory"]
"""Read in the original source; read in a copy of it; from memory, not checked."""
Measure = Literal["score", "tokens/s", "ms", "times", "bytes", "sequences", "tokens"]
"""A task's score, throughput, a time, a factor over the full cache, a share of its bytes, a batch, or a length."""
Prediction = Literal["stored bytes", "device bytes", "peak bytes", "largest batch", "longest context"]
"""A quantity that follows from the shapes of a model and its caches, without a run.

Stored bytes of a context; those of them that are not in host memory; peak bytes while decoding, with the weights, of
the most sequences that the GPU holds with the full cache; the most sequences that it holds; the longest prompt.
"""


class PaperProtocol(BaseModel):
    """Conditions that are known to change scores, as far as the paper states them."""

    model_config = STRICT

    template: Template | None = None
    """`none` for the plain text, or the model's own chat template."""
    truncation: int | None = None
    """Maximum prompt length in tokens; longer prompts lose their middle."""
    visibility: Visibility | None = None
    history: History | None = None
    granularity: Literal["query head", "KV head"] | None = None
    """Whether entries are selected per query head or per KV head."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    differs: list[str] = []
    """Deviations from kvbench that no field expresses."""

    def under(self, common: PaperProtocol) -> PaperProtocol:
        """This protocol, completed by the fields of a common one."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return common.model_copy(update={**given, "differs": [*common.differs, *self.differs]})


class PaperColumn(BaseModel):
    """A column: the tasks and lengths whose mean it is, or the reason why kvbench has none."""

    model_config = STRICT

    task: str | list[str] = []
    """Empty: all tasks of the table's suite."""
    length: int | list[int] = []
    room: int | None = None
    """Tokens of an answer, which a length in kvbench includes and the paper's truncation does not."""
    run: dict[str, Any] = {}
    """Options of the runs."""
    timing: Literal["kernel", "step", "end-to-end"] | None = None
    """Timing level of `kvbench bench`, for speeds."""
    predicts: Prediction | None = None
    """For a number that `kvbench plan` predicts. Without a length, peak bytes are those of the longest context that
    fits the GPU with the full cache."""
    lacks: str | None = None
    """A requirement that kvbench lacks."""


class PaperRow(BaseModel):
    """A row: the method in kvbench with its options."""

    model_config = STRICT

    method: str
    budget: str | list[str] | None = None
    """One budget, or one per column."""
    set: dict[str, str | int | float | bool] = {}
    run: dict[str, Any] = {}
    """Other options of the runs."""
    baseline: str | None = None
    """Overrides the table's baseline."""
    words: str = ""
    """The budget in the paper's words."""
    differs: list[str] = []
    """Deviations of this row, as in the protocol."""
    lacks: str | None = None


class Block(BaseModel):
    """The numbers of one model, by row, in the order of the columns; `nan` if none is printed."""

    model_config = STRICT

    id: str | None = None
    """Name on the hub."""
    shape: str | None = None
    """An architecture of `kvbench list models` with the same shape."""
    lacks: str | None = None
    protocol: PaperProtocol = PaperProtocol()
    batch: dict[str, list[float]] = {}
    """Batch sizes by row and column, for speeds."""
    values: dict[str, list[float]]


class Note(BaseModel):
    """A remark on some numbers, selected by model, row and column."""

    model_config = STRICT

    model: str | None = None
    row: str | None = None
    column: str | None = None
    evidence: Evidence | None = None
    correct: float | None = None
    """The correct number, if the printed one is wrong."""
    text: str


class PaperTable(BaseModel):
    """A table of a paper."""

    model_config = STRICT

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    where: str
    """The source of the numbers."""
    evidence: Evidence
    measure: Measure = "score"
    scale: float = 100.0
    """The printed value of a score of 1."""
    decimals: int = Field(2, ge=0, le=6)
    hardware: str | None = None
    """The hardware of a speed, in the paper's words."""
    gpu: str | None = None
    """The GPU, as a part of its device name."""
    batch: int = Field(1, ge=1)
    """Default batch size."""
    suite: str | None = None
    """The suite of kvbench with these tasks."""
    baseline: str | None = None
    """The row that differences are taken to by default."""
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
            if any(x < 1 for x in ([column.length] if isinstance(column.length, int) else column.length)):
                raise ValueError(f"{self.name}: column '{name}' has a length that is not 1 or more")
            if self.measure == "score" and not (column.task or column.lacks or self.suite):
                raise ValueError(f"{self.name}: column '{name}' names no task, and the table no suite")
            if self.measure != "score" and column.lacks is None and (lacks := self._find_lack(column)) is not None:
                raise ValueError(f"{self.name}: column '{name}' {lacks}")
        for problem in (*self._list_alike(), *self._list_wrong_numbers()):
            raise ValueError(f"{self.name}: {problem}")
        for baseline in {self.baseline, *(x.baseline for x in self.rows.values())} - {None, *self.rows}:
            raise ValueError(f"{self.name}: '{baseline}', a baseline, is no row of the table")
        for note in self.notes:
            for kind, value, known in (
                ("model", note.model, self.models), ("row", note.row, self.rows), ("column", note.column, self.columns)
            ):
                if value is not None and value not in known:
                    raise ValueError(f"{self.name}: a note is about {kind} '{value}', which the table has not")
        return self

    def _find_lack(self, column: PaperColumn) -> str | None:
        """The missing part of a column of speeds, bytes, batches or lengths; None: it can be measured or predicted."""
        if column.timing is None and column.predicts is None:
            return None
        if isinstance(column.length, list):
            if column.length:
                return "has several lengths; one number is of one length"
            if column.predicts in (None, "largest batch"):
                return f"needs a length for {column.predicts or f'{column.timing} timing'}"
        on_a_gpu = column.predicts in ("peak bytes", "largest batch", "longest context")
        if self.gpu is None and (on_a_gpu or (column.predicts is not None and column.length == [])):
            return f"needs the gpu of the table for {column.predicts}"
        return None

    def _list_alike(self) -> Iterator[str]:
        """Names that are one name in an id, or none."""
        for kind, names in (("models", self.models), ("rows", self.rows), ("columns", self.columns)):
            for part, count in Counter(map(slug, names)).items():
                if not part:
                    yield f"a name of {kind} has no letter a to z and no digit, so no id can name it"
                elif count > 1:
                    alike = ", ".join(f"'{x}'" for x in names if slug(x) == part)
                    yield f"{kind} {alike} have the same id, {part}"

    def _list_wrong_numbers(self) -> Iterator[str]:
        """Infinite numbers, and batches of printed numbers that are no batches."""
        for model, block in self.models.items():
            for row, values in block.values.items():
                if any(map(math.isinf, values)):
                    yield f"'{row}' of {model} has an infinite number"
                for value, batch in zip(values, block.batch.get(row, []), strict=False):
                    if not math.isnan(value) and not (batch >= 1 and batch.is_integer()):
                        yield f"'{row}' of {model} has batch {batch:g}, which is no whole number of 1 or more"


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


def slug(text: str) -> str:
    """Normalize a name for an id."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def list_papers() -> dict[str, Paper]:
    """The bundled papers by file name.

    Raises:
        UserError: a file is invalid.
    """
    return {x.stem: read_paper(x) for x in sorted(FOLDER.glob("*.toml"))}


def read_paper(path: Path) -> Paper:
    """Read a claims file.

    Raises:
        UserError: the file cannot be read or is invalid.
    """
    return read_toml(path, Paper, "claims file", HINT)
