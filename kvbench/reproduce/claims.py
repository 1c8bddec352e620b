"""Claims: single printed numbers with the fields of their table, addressed as `paper:table/model/row/column`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.errors import UserError, unknown
from kvbench.reproduce.paper import (
    FOLDER,
    Block,
    Evidence,
    Note,
    Paper,
    PaperColumn,
    PaperProtocol,
    PaperRow,
    PaperTable,
    read_paper,
    slug,
)


@dataclass(frozen=True)
class Claim:
    """One printed number."""

    paper: str
    """Name of the claims file."""
    source: Paper = field(repr=False)
    table: PaperTable = field(repr=False)
    model: str
    row: str
    column: str
    printed: float

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Table, model, row and column, as written in an id."""
        return self.table.name, slug(self.model), slug(self.row), slug(self.column)

    @property
    def id(self) -> str:
        """`paper:table/model/row/column`."""
        return f"{self.paper}:{'/'.join(self.parts)}"

    @property
    def block(self) -> Block:
        """The model's part of the table."""
        return self.table.models[self.model]

    @property
    def method(self) -> PaperRow:
        """The row's method."""
        return self.table.rows[self.row]

    @property
    def budget(self) -> str | None:
        """The row's budget in this column."""
        asked = self.method.budget
        return asked[self._place] if isinstance(asked, list) else asked

    @property
    def batch(self) -> int:
        """Batch size of a speed."""
        given = self.block.batch.get(self.row)
        return self.table.batch if given is None else int(given[self._place])

    @property
    def _place(self) -> int:
        return list(self.table.columns).index(self.column)

    @property
    def cell(self) -> PaperColumn:
        """The column's tasks."""
        return self.table.columns[self.column]

    @property
    def protocol(self) -> PaperProtocol:
        """The protocol of the number, as far as the paper states it."""
        return PaperProtocol(differs=self.method.differs).under(self.block.protocol.under(self.table.protocol))

    @property
    def notes(self) -> list[Note]:
        """Remarks on this number."""
        return [
            x for x in self.table.notes
            if x.model in (None, self.model) and x.row in (None, self.row) and x.column in (None, self.column)
        ]

    @property
    def evidence(self) -> Evidence:
        """The kind of source of the number."""
        return next((x.evidence for x in self.notes if x.evidence is not None), self.table.evidence)

    @property
    def value(self) -> float:
        """The printed number, corrected if it is a misprint."""
        return next((x.correct for x in self.notes if x.correct is not None), self.printed)

    def room_of(self, task: str) -> int | None:
        """Tokens of an answer to a task, if a column of the table states them."""
        return next((x.room for x in self.table.columns.values() if x.task == task and x.room is not None), None)

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit."""
        return 0.5 * 10.0**-self.table.decimals


def list_claims(name: str, paper: Paper) -> Iterator[Claim]:
    """Every number of a paper, in the order of its file."""
    for table in paper.table:
        for model, block in table.models.items():
            for row, values in block.values.items():
                for column, value in zip(table.columns, values, strict=True):
                    if not math.isnan(value):
                        yield Claim(name, paper, table, model, row, column, value)


def find_claims(text: str) -> list[Claim]:
    """The numbers that `paper:table/model/row/column` stands for; a part that is left out or empty stands for all.

    Raises:
        UserError: there is no such paper, table, model, row or column.
    """
    name, _, path = text.partition(":")
    if name.endswith(".toml"):
        paper = read_paper(Path(name).expanduser())
        name = Path(name).stem
    else:
        papers = {x.stem: x for x in FOLDER.glob("*.toml")}
        if name not in papers:
            raise unknown("paper", name, papers, "See `kvbench reproduce --list`, or give path/to/claims.toml:TABLE.")
        paper = read_paper(papers[name])
    found = list(list_claims(name, paper))
    asked = path.split("/")
    parts = [slug(x) for x in asked]
    if len(parts) > 4:
        raise UserError(f"claim '{text}' has too many parts. Write paper:table/model/row/column, or less of it.")
    for index, (kind, part) in enumerate(zip(("table", "model", "row", "column"), parts, strict=False)):
        names = dict.fromkeys(x.parts[index] for x in found)
        if asked[index] and part not in names:
            hint = "See `kvbench reproduce --list`."
            if index:
                table = f"{text.partition(':')[0]}:{parts[0]}"
                hint = f"`kvbench reproduce {table} --dry-run` lists its models and rows, with --json also its columns."
            raise unknown(f"{kind} of {name}", part or asked[index], names, hint)
        found = [x for x in found if part in ("", x.parts[index])]
    return found
