"""What papers print, and how it stands by the runs that are here, laid out as their tables are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kvbench.errors import UserError
from kvbench.leaderboard.site.entries import Entry
from kvbench.reproduce.shape import ShapeRecord
from kvbench.reproduce.standing import list_judgments, read_findings
from kvbench.reproduce.verdict import Judgment, Verdict, find_unanchored

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Block:
    """The numbers of one model in one table, by row and column; None where none is printed."""

    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Judgment | None, ...]], ...]
    off: float | None
    """Points between the dense cache here and in the paper; None: as near as it must be, or not run."""


@dataclass(frozen=True)
class Source:
    """A paper with the verdicts on its numbers."""

    name: str
    judged: tuple[Judgment, ...]

    @property
    def counts(self) -> list[int]:
        """Numbers with each verdict, in the order of VERDICTS."""
        counts = Counter(x.verdict for x in self.judged)
        return [counts[x] for x in VERDICTS]

    @property
    def tables(self) -> Iterator[tuple[Judgment, list[Block]]]:
        """Any number of each table, and the table by model."""
        off = find_unanchored(self.judged)
        tables: dict[str, dict[str, list[Judgment]]] = {}
        for x in self.judged:
            tables.setdefault(x.claim.table.name, {}).setdefault(x.claim.model, []).append(x)
        for name, models in tables.items():
            blocks = [_lay_out(model, some, off.get((self.name, name, model))) for model, some in models.items()]
            yield next(iter(models.values()))[0], blocks


def _lay_out(model: str, judged: Sequence[Judgment], off: float | None) -> Block:
    cells = {(x.claim.row, x.claim.column): x for x in judged}
    columns = [x for x in judged[0].claim.table.columns if any(column == x for _, column in cells)]
    rows = dict.fromkeys(row for row, _ in cells)
    return Block(model, tuple(columns), tuple((row, tuple(cells.get((row, x)) for x in columns)) for row in rows), off)


@dataclass(frozen=True)
class Claims:
    """Printed numbers by paper, and findings put to the bundled models."""

    sources: tuple[Source, ...]
    findings: ShapeRecord | None
    """None: they were not tested here."""
    pages: Mapping[Path, str]
    """Of runs, by their folders."""
    problem: str | None = None
    """Why there are none."""


def read_claims(results: Path, entries: Sequence[Entry]) -> Claims:
    """How every claim stands by these runs, and by the clocks and the findings of the folder."""
    papers: dict[str, list[Judgment]] = {}
    try:
        findings = read_findings(results)
        for x in list_judgments(results, results=[(x.run.folder, x.result) for x in entries]):
            papers.setdefault(x.claim.paper, []).append(x)
    except UserError as error:
        return Claims((), None, {}, str(error))
    pages = {x.run.folder: x.name for x in entries}
    return Claims(tuple(Source(name, tuple(judged)) for name, judged in papers.items()), findings, pages)


def join_reasons(cells: Sequence[Judgment | None]) -> list[str]:
    """What the numbers of a row lack, and what is otherwise than in the paper, each once."""
    judged = [x for x in cells if x is not None]
    missing, differs = (y.why for x in judged for y in x.missing), (y for x in judged for y in x.differs)
    return list(dict.fromkeys([*missing, *differs]))
