"""Numbers that papers print and their verdicts by the runs at hand, laid out as in the papers' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kvbench.errors import UserError
from kvbench.leaderboard.site.listed import ListedRun
from kvbench.reproduce.standing import list_judgments
from kvbench.reproduce.verdict import Judgment, Verdict, find_unanchored

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class ModelTable:
    """The numbers of one model in one table, by row and column; None where the paper prints none."""

    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Judgment | None, ...]], ...]
    off: float | None
    """Points between our full cache and the paper's; None if they are close enough, or if ours was not run."""


@dataclass(frozen=True)
class PaperVerdicts:
    """A paper with the verdicts on its numbers."""

    name: str
    judged: tuple[Judgment, ...]

    @property
    def counts(self) -> list[int]:
        """Count of each verdict, in the order of VERDICTS."""
        counts = Counter(x.verdict for x in self.judged)
        return [counts[x] for x in VERDICTS]

    @property
    def tables(self) -> Iterator[tuple[Judgment, list[ModelTable]]]:
        """One number of each table as an example, with the table split by model."""
        off = find_unanchored(self.judged)
        tables: dict[str, dict[str, list[Judgment]]] = {}
        for x in self.judged:
            tables.setdefault(x.claim.table.name, {}).setdefault(x.claim.model, []).append(x)
        for name, models in tables.items():
            blocks = [_lay_out(model, some, off.get((self.name, name, model))) for model, some in models.items()]
            yield next(iter(models.values()))[0], blocks


def _lay_out(model: str, judged: Sequence[Judgment], off: float | None) -> ModelTable:
    cells = {(x.claim.row, x.claim.column): x for x in judged}
    columns = [x for x in judged[0].claim.table.columns if any(column == x for _, column in cells)]
    rows = dict.fromkeys(row for row, _ in cells)
    lines = tuple((row, tuple(cells.get((row, x)) for x in columns)) for row in rows)
    return ModelTable(model, tuple(columns), lines, off)


@dataclass(frozen=True)
class ClaimsReport:
    """Verdicts on printed numbers by paper."""

    sources: tuple[PaperVerdicts, ...]
    pages: Mapping[Path, str]
    """Page names of runs by folder."""
    problem: str | None = None
    """The reason why nothing can be shown."""


def read_claims(results: Path, runs: Sequence[ListedRun]) -> ClaimsReport:
    """Judge every claim by the verified runs and the benchmarks of a results folder, of equal runs the most trusted."""
    counted = sorted((x for x in runs if x.counted), key=lambda x: x.priority)
    papers: dict[str, list[Judgment]] = {}
    try:
        for x in list_judgments(results, [x.run for x in counted]):
            papers.setdefault(x.claim.paper, []).append(x)
    except UserError as error:
        return ClaimsReport((), {}, problem=str(error))
    pages = {x.run.folder: x.name for x in runs}
    verdicts = tuple(PaperVerdicts(name, tuple(judged)) for name, judged in papers.items())
    return ClaimsReport(verdicts, pages)


def join_reasons(cells: Sequence[Judgment | None]) -> list[str]:
    """List what the numbers of a row lack and where they differ from the paper, without duplicates."""
    judged = [x for x in cells if x is not None]
    missing, differs = (y.why for x in judged for y in x.missing), (y for x in judged for y in x.differs)
    return list(dict.fromkeys([*missing, *differs]))
